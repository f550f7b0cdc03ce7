"""Build what a worker trains with from a resolved recipe: model, parallelism, loss, optimizer and accumulator."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.data import DataInfo, RunData
from phalanx.recipe import ResolvedRecipe
from phalanx.recipe.devices import device_kind_of
from phalanx.recipe.grad_sync_defaults import bucket_size_bytes, num_warmup_steps
from phalanx.recipe.locations import huggingface_directory
from phalanx.train.adapters.initial_values import init_from_weights
from phalanx.train.adapters.targets import has_adapter
from phalanx.train.callbacks import RunContext, UserCallbacks, load_callbacks
from phalanx.train.checkpoint.load_plan import InitialWeights, open_hf_weights, open_initial_weights
from phalanx.train.checkpoint.peft_files import open_peft_adapter
from phalanx.train.distributed.context_parallel import local_runs
from phalanx.train.distributed.dtensor_utils import NormFn, compute_norms, compute_squared_norms
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.fsdp import sort_in_reduction_order
from phalanx.train.distributed.mesh import Mesh, build_mesh
from phalanx.train.distributed.meta_device import allocate_meta_parameters
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.distributed.parallelize import ParallelConfig, parallelize
from phalanx.train.distributed.pipeline.build import PipelineRunner, build_pipeline
from phalanx.train.grad_sync.bucketed_reducer import BucketedReducer
from phalanx.train.grad_sync.compression import GRAD_SYNC_ALGORITHMS
from phalanx.train.grad_sync.error_feedback import ErrorFeedbackState
from phalanx.train.grad_sync.reducer import GradReducer, HSDPTreeReducer, LocalReducer, ParallelReducer
from phalanx.train.hf.inputs import check_auxiliary_loss
from phalanx.train.local_sgd.step import LocalSGDAccumulator, make_local_sgd_reducer
from phalanx.train.loss import ContextSplit, LMHead, LossFn, LossModule, find_lm_head, plan_context_split
from phalanx.train.model_builder import build_model, check_same_initial_values
from phalanx.train.ops.cached_cast_linear import CachedCastLinear
from phalanx.train.ops.collectives import all_reduce_copy, group_rank, group_size
from phalanx.train.ops.random_draws import HeldSlices, MicroBatchSeeds, Runs
from phalanx.train.optim.container import OptimizerContainer, select_muon_matrices
from phalanx.train.precision import AUTOCAST_DTYPES, GradScaler, autocast_context
from phalanx.train.step_metrics import num_metric_slots
from phalanx.train.tasks import LanguageModeling, Task, check_images, check_model_config, drop_images, open_task
from phalanx.train.train_context import TrainContext, WorkerProcess
from phalanx.train.train_step import GradientAccumulator, to_device


def make_accumulator(
    recipe: ResolvedRecipe,
    dist_env: DistEnv,
    parallel_model: ParallelModel,
    optimizer: OptimizerContainer,
    scaler: GradScaler,
    seeds: MicroBatchSeeds,
) -> GradientAccumulator:
    """The accumulator of a step, with gradients reduced as the parallelism requires."""
    accumulator_class: type[GradientAccumulator] = GradientAccumulator
    if recipe.local_sgd is not None:
        accumulator_class = LocalSGDAccumulator
        reducer: GradReducer = make_local_sgd_reducer(recipe, dist_env, parallel_model)
    else:
        slots = num_metric_slots(recipe.batch.global_size // recipe.batch.micro_size)
        reducer = choose_reducer(recipe, dist_env, parallel_model, slots)
    return accumulator_class(recipe, dist_env, parallel_model, optimizer.parameter_names, reducer, scaler, seeds)


def make_held_slices(mesh: Mesh, batch: int, length: int | None, split: ContextSplit | None) -> HeldSlices | None:
    """Which slices of a forward's tensors this rank holds; None where it holds whole tensors."""
    if mesh.tensor_group is None and split is None:
        return None
    positions: Runs = () if length is None else ((0, length),)
    if split is not None and length is not None:
        positions = local_runs(length, split.method, split.group)
    return HeldSlices(batch, length, positions, group_rank(mesh.tensor_group), group_size(mesh.tensor_group))


def make_norm_fn(parallel_model: ParallelModel) -> NormFn:
    """Norms of whole parameters, also of those that tensor or expert parallel cuts: one more sum over their group."""
    groups = {"tensor": parallel_model.mesh.tensor_group, "expert": parallel_model.mesh.expert_group}
    names: dict[Tensor, str] = {parameter: name for name, parameter in parallel_model.parameters().items()}

    def compute_sharded_norms(parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        squares = compute_squared_norms(parameters, tensors)
        for axis, group in groups.items():
            is_sharded = [
                any(c.mesh_axis == axis for c in parallel_model.dim_shards.get(names[p], ())) for p in parameters
            ]
            if group is not None and any(is_sharded):
                chosen = torch.tensor(is_sharded, device=squares.device)
                squares = torch.where(chosen, all_reduce_copy(squares.where(chosen, 0.0), group), squares)
        return list(squares.sqrt_().unbind())

    return compute_sharded_norms if parallel_model.dim_shards else compute_norms


def count_units_per_sample(facts: DataInfo) -> int:
    """Tokens in a sample, or 1 where samples are counted."""
    return facts.seq_len if facts.kind == "tokens" and facts.seq_len else 1


def build_context(
    process: WorkerProcess, recipe: ResolvedRecipe, data: RunData, init_weights: bool = True
) -> TrainContext:
    """Build everything that training works with, from the recipe. `init_weights`: with the weights of a new run."""
    run, folder, dist_env = process.run, process.folder, process.dist_env
    mesh = build_mesh(recipe.parallelism, dist_env, recipe)
    task = open_task(recipe, folder, data.info, dist_env.device)
    # A model that will be sharded is built on the host or the meta device: it need not fit on one device.
    device = dist_env.device if mesh.is_pure_ddp or mesh.pipeline_group is not None else torch.device("cpu")
    model = build_model(
        recipe.model, data.info, folder, recipe.seed, device, recipe.adapter, load=False, init_weights=init_weights
    )
    check_model_config(task, model)
    check_images(model, data, mesh.fsdp_size)
    initial_weights = _find_initial_weights(recipe, folder, model) if init_weights else None
    adapter, peft_adapter = recipe.adapter if init_weights else None, None
    if adapter is not None and adapter.init_from is not None:
        peft_adapter = open_peft_adapter(adapter.init_from, folder, model, adapter)
    if init_weights and initial_weights is None:
        check_same_initial_values(dist_env, model)
    if mesh.is_pure_ddp:
        allocate_meta_parameters([model], dist_env.device)
    model.train()
    muon_matrices = select_muon_matrices(model, recipe.optimizer)
    loss_fn = make_loss_fn(recipe, task, model, mesh, dist_env, data)
    scaler = GradScaler.for_precision(recipe.precision, recipe.batch.global_size * count_units_per_sample(data.info))
    seeds = MicroBatchSeeds(recipe.seed, dist_env.device)
    parallel_model, loss_module = _build_parallel_model(recipe, model, loss_fn, mesh, dist_env, data, seeds, scaler)
    seeds.slices = make_held_slices(mesh, recipe.batch.micro_size, data.info.seq_len, loss_fn.context_split)
    allocate_meta_parameters(parallel_model.modules, dist_env.device)
    if initial_weights is not None:
        initial_weights.fill_parameters(parallel_model)
    if peft_adapter is not None:
        peft_adapter.fill_parameters(parallel_model)
    elif adapter is not None and not (initial_weights is not None and initial_weights.has_adapters):
        init_from_weights(parallel_model.modules, adapter)
    optimizer = OptimizerContainer(
        parallel_model.merged_module,
        recipe.optimizer,
        seed=recipe.seed,
        offload=recipe.optimizer.offload,
        norm_fn=make_norm_fn(parallel_model),
        muon_matrices=muon_matrices,
    )
    accumulator = make_accumulator(recipe, dist_env, parallel_model, optimizer, scaler, seeds)
    run_context = RunContext(run.path, dist_env.rank, dist_env.world_size, model)
    return TrainContext(
        **vars(process),
        recipe=recipe,
        data=data,
        model=model,
        loss_module=loss_module,
        parallel_model=parallel_model,
        optimizer=optimizer,
        scaler=scaler,
        accumulator=accumulator,
        callbacks=UserCallbacks(load_callbacks(recipe.callbacks, folder), run_context),
        count_units=data.count_units,
        validation_data=data if data.num_validation_samples else None,
        prepare_batch=lambda arrays: to_device(arrays, dist_env.device),
    )


def make_loss_fn(
    recipe: ResolvedRecipe, task: Task, model: nn.Module, mesh: Mesh, dist_env: DistEnv, data: RunData
) -> LossFn:
    """How the model is scored under this layout: its sequences split, its vocabulary's logits never whole."""
    check_auxiliary_loss(model, recipe.parallelism)
    loss_fn = LossFn(task, recipe.precision, dist_env.device)
    length = data.info.seq_len
    if mesh.context_group is not None and length is not None:
        loss_fn.context_split = plan_context_split(model, mesh.context_group, length)
    if recipe.memory.chunked_loss is True or mesh.tensor_group is not None:
        loss_fn.lm_head = make_lm_head(model, task, data)
    return loss_fn


def make_lm_head(model: nn.Module, task: Task, data: RunData) -> LMHead | None:
    """The output layer that can be left out of the forward, because the task takes the loss from what enters it."""
    head_loss = getattr(task, "head_loss", None)
    if head_loss is None or not _head_loss_matches_loss(task):
        return None
    device = next(model.parameters()).device
    sample = drop_images(to_device(data.read_training(0, 1), torch.device("cpu") if device.type == "meta" else device))
    # In fp32 a GPU has no kernel for grouped heads that keeps no scores, [heads, s, s] of them.
    device = next(iter(sample.values())).device
    with autocast_context("bf16", device) if device_kind_of(device.type).is_gpu else contextlib.nullcontext():
        name = find_lm_head(model, *task.inputs(sample))
    layer = None if name is None else model.get_submodule(name)
    # Logits of a layer with a bias, or with an adapter, are not a product with its weight alone.
    bare = getattr(layer, "bias", None) is None and layer is not None and not has_adapter(layer)
    if name is None or not isinstance(layer, nn.Linear) or not bare:
        return None
    return LMHead(name, head_loss, layer.out_features)


def _build_parallel_model(
    recipe: ResolvedRecipe,
    model: nn.Module,
    loss_fn: LossFn,
    mesh: Mesh,
    dist_env: DistEnv,
    data: RunData,
    seeds: MicroBatchSeeds,
    scaler: GradScaler,
) -> tuple[ParallelModel, LossModule | PipelineRunner]:
    """Apply the parallelism to the model. Returns this worker's part and the module that computes losses."""
    cache_weight_casts = uses_cached_casts(recipe.compile, recipe.precision, dist_env.device)
    head = make_lm_head(model, loss_fn.task, data) if cache_weight_casts and loss_fn.lm_head is None else None
    config = make_parallel_config(
        recipe,
        seq_len=data.info.seq_len,
        # Only the built-in loss supports a sharded vocabulary; a subclass may override it.
        vocab_parallel_loss=loss_fn.lm_head is not None and _has_built_in_head_loss(loss_fn.task),
        cache_weight_casts=cache_weight_casts,
        lm_head=None if head is None else head.name,
    )
    if mesh.pipeline_group is None:
        loss_module = LossModule(model, loss_fn)
        parallel_model, vocab_group = parallelize(model, loss_module, mesh, config)
        if loss_fn.lm_head is not None:
            loss_fn.lm_head = replace(loss_fn.lm_head, group=vocab_group)
        return parallel_model, loss_module
    micro_size = recipe.batch.micro_size
    return build_pipeline(
        model,
        loss_fn,
        to_device(data.read_training(0, micro_size), dist_env.device),
        mesh,
        dist_env,
        config,
        seeds.seed_micro_batch,
        (lambda: scaler.scale) if scaler.dynamic else None,
    )


def make_parallel_config(recipe: ResolvedRecipe, **facts: Any) -> ParallelConfig:
    """How a recipe computes the parts of a model, and `facts`: the fields that other things than the recipe decide."""
    return ParallelConfig(
        recipe.precision,
        activation_checkpointing=recipe.memory.activation_checkpointing,
        compile="cuda-graphs" if recipe.compile == "cuda-graphs" else recipe.compile is True,
        tp_plan=facts.pop("tp_plan", None) or recipe.model.tp_plan,
        **facts,
    )


def uses_cached_casts(compiled: bool | str, precision: str, device: torch.device) -> bool:
    """Whether weights are cast once a step (ops/cached_cast_linear.py): where compiled blocks run under autocast on a
    GPU. What a CUDA graph reads would be copied to where it was recorded, in each micro-batch."""
    return compiled is True and precision in AUTOCAST_DTYPES and device.type == "cuda"


def _has_built_in_head_loss(task: Task) -> bool:
    return getattr(type(task), "head_loss", None) is LanguageModeling.head_loss


def _head_loss_matches_loss(task: Task) -> bool:
    """Whether `head_loss` belongs to the `loss` of this task; a subclass may override only one of them."""
    owners = [kind for kind in type(task).__mro__ if "loss" in vars(kind) or "head_loss" in vars(kind)]
    return not owners or "head_loss" in vars(owners[0])


def _find_initial_weights(recipe: ResolvedRecipe, folder: Path, model: nn.Module) -> InitialWeights | None:
    """Where the weights of a new run come from; None where the model was built with them."""
    if recipe.init_from is not None:
        return open_initial_weights(recipe.init_from, folder, model)
    directory = huggingface_directory(recipe.model.build, folder)
    return None if directory is None else open_hf_weights(directory, model)


def choose_reducer(
    recipe: ResolvedRecipe, dist_env: DistEnv, parallel_model: ParallelModel, num_metric_slots: int
) -> GradReducer:
    """Make the reducer of a worker. Plain replicas also sum `num_metric_slots` fp32 values in a bucket with it."""
    mesh, micro_batches = parallel_model.mesh, recipe.batch.global_size // recipe.batch.micro_size
    parts = (part for module in parallel_model.modules for part in module.modules())
    layers = [part for part in parts if isinstance(part, CachedCastLinear)]
    parameters = list(parallel_model.trainable_parameters().values())
    if mesh.is_tree_hsdp:
        parameters = sort_in_reduction_order(parallel_model.modules, parameters)
    bucketed = _make_bucketed_reducer(recipe, dist_env, parallel_model, parameters, num_metric_slots)
    reducer: GradReducer = LocalReducer(parameters, layers) if bucketed is None else bucketed
    if not mesh.is_pure_ddp and not mesh.is_tree_hsdp:
        own_indices = mesh.own_micro_batches(micro_batches)
        last = own_indices[-1] if mesh.pipeline_group is None and len(own_indices) > 1 else None
        reducer = ParallelReducer(parallel_model, bucketed, last_micro_batch=last)
    # With one micro-batch nothing is accumulated. Elastic runs sum in the same order on any number of workers.
    accumulates_in_matmul = isinstance(reducer, LocalReducer) and micro_batches > 1 and recipe.determinism != "elastic"
    for layer in layers:
        layer.set_accumulate_in_matmul(accumulates_in_matmul)
    return reducer


def _make_bucketed_reducer(
    recipe: ResolvedRecipe,
    dist_env: DistEnv,
    parallel_model: ParallelModel,
    parameters: list[nn.Parameter],
    num_metric_slots: int,
) -> BucketedReducer | None:
    """Make the reducer of replicas, with the error feedback of its compression; None where it is not needed."""
    mesh, micro_batches = parallel_model.mesh, recipe.batch.global_size // recipe.batch.micro_size
    is_elastic, algorithm = recipe.determinism == "elastic", recipe.grad_sync.method
    uses_error_feedback = GRAD_SYNC_ALGORITHMS[algorithm].uses_error_feedback and not is_elastic
    is_needed = mesh.replicate_group is not None or (is_elastic and micro_batches > 1) or uses_error_feedback
    # A pipeline runs many backwards at once, so its gradients are summed after the last.
    if mesh.pipeline_group is not None or not (mesh.is_tree_hsdp or (mesh.fsdp_mesh is None and is_needed)):
        return None
    reducer = (HSDPTreeReducer if mesh.is_tree_hsdp else BucketedReducer)(
        parameters,
        rank=mesh.coordinates["replicate"],
        world_size=mesh.parallelism.replicate,
        micro_batches=micro_batches // mesh.micro_batch_stride,
        is_elastic=is_elastic,
        bucket_bytes=bucket_size_bytes(recipe.grad_sync),
        group=mesh.replicate_group,
        num_metric_slots=num_metric_slots if mesh.is_pure_ddp else 0,
        algorithm=algorithm,
        powersgd_rank=recipe.grad_sync.powersgd_rank,
        warmup_steps=num_warmup_steps(recipe),
    )
    if isinstance(reducer, HSDPTreeReducer):
        assert mesh.fsdp_mesh is not None
        reducer.shard_group = mesh.fsdp_mesh.get_group()
    parallel_model.error_feedback = None
    if uses_error_feedback:
        residuals, bases = reducer.residuals(), reducer.projection_bases()
        parallel_model.error_feedback = ErrorFeedbackState.from_residuals(parallel_model, residuals, bases)
    return reducer
