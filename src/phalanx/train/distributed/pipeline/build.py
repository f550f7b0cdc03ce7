"""Build the pipeline of a worker: cut the model into stages, parallelize each stage, and set up the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from phalanx.errors import RecipeError
from phalanx.recipe.schema import Parallelism
from phalanx.recipe.work_division import stages_of
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.mesh import Mesh, make_stage_group
from phalanx.train.distributed.module_state import EXTRA_STATE_PREFIX, find_extra_state_modules
from phalanx.train.distributed.parallel_model import ParallelModel, TiedParam
from phalanx.train.distributed.parallelize import ModelPlan, ParallelConfig, parallelize_part, plan_model
from phalanx.train.distributed.pipeline.dataflow import trace_dataflow
from phalanx.train.distributed.pipeline.partition import (
    StageModule,
    StagePartition,
    assign_buffer_owners,
    balance_stage_bounds,
    extract_stages,
    partition_stages,
)
from phalanx.train.distributed.pipeline.schedule import SPLIT_BACKWARD_SCHEDULES, Pipeline, assign_stage_owners
from phalanx.train.distributed.shard_spec import DimShard

if TYPE_CHECKING:
    from phalanx.train.loss import LossFn, LossSums
    from phalanx.train.tasks import TensorBatch


def partition_model(
    model: nn.Module, loss_fn: LossFn, batch: TensorBatch, parallelism: Parallelism, model_plan: ModelPlan
) -> StagePartition:
    """Partition the model into stages. Raises RecipeError if it cannot be cut like this."""
    count = stages_of(parallelism)
    if len(model_plan.blocks) < count:
        raise RecipeError(
            f"parallelism.pipeline: {count} stages ({parallelism.pipeline_schedule} on {parallelism.pipeline} ranks) "
            f"need as many blocks, and the model has {len(model_plan.blocks)}"
        )
    dataflow = trace_dataflow(model, model_plan.blocks, _flatten_loss(loss_fn), batch)
    if parallelism.pipeline_schedule in SPLIT_BACKWARD_SCHEDULES and dataflow.reused_params:
        raise RecipeError(  # torch computes the gradients of weights by a walk that would pass the first use again
            f"parallelism.pipeline_schedule: {parallelism.pipeline_schedule} cannot train "
            f"{min(dataflow.reused_params)}, which a block uses again on what it computed with it; use 1f1b"
        )
    inside = {
        name: tuple(n for n in sorted(dataflow.required_params[i]) if n.startswith(f"{name}."))
        for i, name in enumerate(model_plan.blocks)
    }
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    # The cost of a block is its number of parameters; the last also has those that only the loss uses (the head).
    weights = [float(sum(sizes[name] for name in names)) for names in inside.values()]
    after = float(sum(sizes[name] for name in dataflow.required_params[-1].difference(*inside.values())))
    bounds = balance_stage_bounds(weights, count, head_cost=after, blocks_per_stage=parallelism.layers_per_stage)
    return partition_stages(dataflow, bounds)


class PipelineRunner:
    """This worker's pipeline with the interface of a step: takes the micro-batches of a step, or one to evaluate."""

    def __init__(self, pipeline: Pipeline, loss_fn: LossFn):
        self.pipeline = pipeline
        self.loss_fn = loss_fn

    def train(self, mode: bool) -> None:
        """Set training or evaluation mode of all stages."""
        for stage in self.pipeline.stages.values():
            stage.train(mode)

    def modules(self) -> Iterator[nn.Module]:
        """Yield the modules of all stages on this worker."""
        return (module for stage in self.pipeline.stages.values() for module in stage.modules())

    def step(self, batches: Sequence[TensorBatch]) -> list[tuple[Tensor, Tensor | int]] | None:
        """Run forward and backward; return loss and terms of each micro-batch on ranks with the last stage."""
        results = self.pipeline.step(batches)
        return None if results is None else [(result[0], result[1]) for result in results]

    def __call__(self, batch: TensorBatch, metrics: bool) -> LossSums:
        names: list[str] = []

        def flat(model: nn.Module, batch: TensorBatch) -> tuple[Any, ...]:
            sums = self.loss_fn(model, batch, metrics)
            names[:] = [name for name, _, _ in sums]
            return tuple(value for _, total, num_terms in sums for value in (total, num_terms))

        values = self.pipeline.evaluate(batch, flat)
        if values is None:
            return []
        return list(zip(names, values[::2], values[1::2], strict=True))


def build_pipeline(
    model: nn.Module,
    loss_fn: LossFn,
    batch: TensorBatch,
    mesh: Mesh,
    dist_env: DistEnv,
    config: ParallelConfig,
    seed: Callable[[int], None],
    get_loss_scale: Callable[[], float] | None,
) -> tuple[ParallelModel, PipelineRunner]:
    """Build this worker's stages of `model`, parallelized, and the pipeline that runs them. The stages take over the
    model's parameters; nothing else should hold the model afterwards. Raises RecipeError if the model does not fit."""
    parallelism = mesh.parallelism
    assert mesh.pipeline_group is not None
    model_plan = plan_model(model, parallelism, config)
    partition = partition_model(model, loss_fn, batch, parallelism, model_plan)
    stage_owners = assign_stage_owners(parallelism.pipeline_schedule, partition.num_stages, parallelism.pipeline)
    own_stages = [stage for stage, owner in enumerate(stage_owners) if owner == mesh.coordinates["pipeline"]]
    tied_params = _make_tie_groups(partition, stage_owners, mesh, dist_env)
    buffer_owners = assign_buffer_owners(model, partition)
    partial_models = extract_stages(model, partition, own_stages)
    stages: dict[int, StageModule] = {}
    dim_shards: dict[str, tuple[DimShard, ...]] = {}
    partial_grads: set[str] = set()
    for index in own_stages:
        stages[index] = stage = StageModule(partial_models[index], partition, index, _flatten_loss(loss_fn), seed=seed)
        if mesh.fsdp_mesh is None:
            _unify_tied_params(stage.model, [stages[earlier].model for earlier in own_stages if earlier < index])
        new_dim_shards, new_partial_grads, vocab_group = parallelize_part(stage.model, stage, mesh, config, model_plan)
        dim_shards, partial_grads = dim_shards | new_dim_shards, partial_grads | new_partial_grads
        if loss_fn.lm_head is not None and vocab_group is not None:
            loss_fn.lm_head = replace(loss_fn.lm_head, group=vocab_group)
    models = tuple(stage.model for stage in stages.values())
    owned_elsewhere = _find_buffers_owned_elsewhere(buffer_owners, own_stages, models)
    parallel_model = ParallelModel(mesh, models, dim_shards, frozenset(partial_grads), tied_params, owned_elsewhere)
    pipeline = Pipeline(
        stages,
        partition.num_stages,
        schedule=parallelism.pipeline_schedule,
        group=mesh.pipeline_group,
        device=dist_env.device,
        get_loss_scale=get_loss_scale,
    )
    return parallel_model, PipelineRunner(pipeline, loss_fn)


def _flatten_loss(loss_fn: LossFn) -> Callable[[nn.Module, Any], tuple[Any, ...]]:
    """Wrap a loss function to return what a pipeline needs: (sum of losses, number of terms)."""

    def flat_loss_fn(model: nn.Module, batch: TensorBatch) -> tuple[Tensor, Tensor | int]:
        ((_, total, num_terms),) = loss_fn(model, batch)
        return total, num_terms

    return flat_loss_fn


def _make_tie_groups(
    partition: StagePartition, stage_owners: Sequence[int], mesh: Mesh, dist_env: DistEnv
) -> dict[str, TiedParam]:
    """Create groups for the parameters that stages on several ranks hold. Every rank creates all groups."""
    names_by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, stages in partition.tied_params.items():
        ranks = tuple(sorted({stage_owners[stage] for stage in stages}))
        names_by_ranks.setdefault(ranks, []).append(name)
    found: dict[str, TiedParam] = {}
    for ranks, names in sorted(names_by_ranks.items()):
        if len(ranks) == 1:
            if mesh.fsdp_mesh is not None:
                raise RecipeError(
                    f"parallelism.pipeline: {names[0]} is shared (tied) by two stages of one rank, which cannot both "
                    "be sharded; use another schedule, or untie it"
                )
            continue
        group = make_stage_group(mesh, dist_env, ranks)
        if mesh.coordinates["pipeline"] in ranks:
            found |= {name: TiedParam(group, mesh.coordinates["pipeline"] == ranks[0]) for name in names}
    return found


def _unify_tied_params(model: nn.Module, others: Sequence[nn.Module]) -> None:
    """Make a stage use the same parameter objects as an earlier stage of this rank that shares them."""
    known = {name: parameter for other in others for name, parameter in other.named_parameters()}
    for name, parameter in list(model.named_parameters()):
        if name in known and known[name] is not parameter:
            for module in model.modules():
                for attribute, value in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                    if value is parameter:
                        setattr(module, attribute, known[name])


def _find_buffers_owned_elsewhere(
    buffer_owners: Mapping[str, int], own_stages: Sequence[int], models: Sequence[nn.Module]
) -> frozenset[str]:
    """Return buffers and extra state that stages on other ranks save."""
    names = {name for model in models for name, _ in model.named_buffers()}
    names |= {EXTRA_STATE_PREFIX + name for model in models for name in find_extra_state_modules(model)}
    return frozenset(name for name in names if buffer_owners[name] not in own_stages)
