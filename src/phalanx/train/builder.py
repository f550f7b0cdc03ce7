"""How a worker's part in a run begins and ends, whichever loop trains between: the stepper, going on from a checkpoint,
the start that is told, the result."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from phalanx.errors import DataError, RecipeError
from phalanx.recipe import Recipe
from phalanx.recipe.diff import diff_recipes, is_mathematics
from phalanx.recipe.grad_sync_defaults import (
    auto_algorithms,
    bucket_size_bytes,
    is_chosen_while_training,
    num_warmup_steps,
)
from phalanx.run import read_events
from phalanx.run.directory import RESULT_FORMAT
from phalanx.run.event_types import AttemptStarted, InMemoryRestored, RunWarning
from phalanx.train.checkpoint import (
    LoadedCheckpoint,
    compute_digest,
    digest_checkpoint,
    format_checkpoint_name,
    list_checkpoints,
)
from phalanx.train.checkpoint.in_memory.restore import find_verified_copies, prune_stale, restore_in_memory
from phalanx.train.checkpoint.load_plan import get_state_tensors
from phalanx.train.checkpoint.restore import restore_checkpoint
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.fsdp import sort_in_reduction_order
from phalanx.train.distributed.mesh import Mesh
from phalanx.train.distributed.object_collectives import all_gather_json, gather_node_map
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.grad_sync import BucketedReducer
from phalanx.train.grad_sync.error_feedback import ErrorFeedbackState
from phalanx.train.grad_sync.reducer import GradReducer, HSDPTreeReducer, LocalReducer, ParallelReducer
from phalanx.train.grad_sync.registry import GRAD_SYNC_ALGORITHMS
from phalanx.train.local_sgd.step import make_local_sgd_step
from phalanx.train.model_builder import MicroBatchSeeds, has_batch_norm
from phalanx.train.ops.cached_cast_linear import CachedCastLinear
from phalanx.train.ops.collectives import all_reduce_copy
from phalanx.train.optim import NormFn, OptimizerContainer, compute_norms, compute_squared_norms
from phalanx.train.precision import GradScaler
from phalanx.train.train_context import TrainContext, report_rejected_checkpoint
from phalanx.train.train_state import TrainState
from phalanx.train.train_step import TrainStep, num_metric_slots

RESTORE_FILES_HINT = "restore the files that the recipe's data.source matched"


def make_train_step(
    recipe: Recipe,
    dist_env: DistEnv,
    parallel_model: ParallelModel,
    optimizer: OptimizerContainer,
    scaler: GradScaler,
    seeds: MicroBatchSeeds,
) -> TrainStep:
    """The stepper, with gradients summed in the way that the layout asks for."""
    if recipe.local_sgd is not None:
        return make_local_sgd_step(recipe, dist_env, parallel_model, optimizer, scaler, seeds)
    micro_size, mesh = recipe.batch.micro_size, parallel_model.mesh
    assert isinstance(micro_size, int)
    micro_batches = recipe.batch.global_size // micro_size
    is_elastic, algorithm = recipe.determinism == "elastic", auto_algorithms(recipe, dist_env.device.type)[0]
    uses_error_feedback = GRAD_SYNC_ALGORITHMS[algorithm].uses_error_feedback and not is_elastic
    auto_selects = is_chosen_while_training(recipe)  # may hold back at times
    parameters = list(parallel_model.trainable_parameters().values())
    if mesh.is_tree_hsdp:
        parameters = sort_in_reduction_order(parallel_model.modules, parameters)
    layers = [
        part for module in parallel_model.modules for part in module.modules() if isinstance(part, CachedCastLinear)
    ]
    reducer: GradReducer = LocalReducer(parameters, layers)
    # A pipeline runs many backwards at once, so its gradients are summed after the last.
    needs_bucketed_reducer = (
        mesh.replicate_group is not None or (is_elastic and micro_batches > 1) or uses_error_feedback
    )
    if mesh.pipeline_group is None and (mesh.is_tree_hsdp or (mesh.fsdp_mesh is None and needs_bucketed_reducer)):
        reducer = BucketedReducer(
            parameters,
            rank=mesh.coordinates["replicate"],
            world_size=mesh.parallelism.replicate,
            micro_batches=micro_batches // mesh.micro_batch_stride,
            is_elastic=is_elastic,
            bucket_bytes=bucket_size_bytes(recipe.grad_sync),
            group=mesh.replicate_group,
            num_metric_slots=num_metric_slots(micro_batches) if mesh.is_pure_ddp else 0,
            algorithm=algorithm,
            node_of_rank=_replica_nodes(mesh, dist_env) if algorithm == "hierarchical" else None,
            powersgd_rank=recipe.grad_sync.powersgd_rank,
            warmup_steps=num_warmup_steps(recipe),
        )
        parallel_model.error_feedback = (
            ErrorFeedbackState.from_residuals(parallel_model, reducer.residuals(), reducer.projection_bases())
            if uses_error_feedback
            else None
        )
    supports_auto_select = isinstance(reducer, BucketedReducer) or mesh.is_pure_ddp
    if auto_selects and supports_auto_select and isinstance(reducer, BucketedReducer | LocalReducer):
        parallel_model.error_feedback = ErrorFeedbackState.from_source(parallel_model, reducer)
    if mesh.is_tree_hsdp:
        assert mesh.fsdp_mesh is not None
        reducer = HSDPTreeReducer(reducer, mesh.fsdp_mesh.get_group())
    elif not mesh.is_pure_ddp:
        own_indices, replica_reducer = (
            mesh.own_micro_batches(micro_batches),
            reducer if isinstance(reducer, BucketedReducer) else None,
        )
        reducer = ParallelReducer(
            parallel_model,
            replica_reducer,
            last_micro_batch=own_indices[-1] if mesh.pipeline_group is None and len(own_indices) > 1 else None,
        )
    # One micro-batch adds up nothing, and where the number of workers must not matter all sum alike.
    accumulates_in_matmul = isinstance(reducer, LocalReducer) and micro_batches > 1 and not is_elastic
    for layer in layers:
        layer.set_accumulate_in_matmul(accumulates_in_matmul)
    return TrainStep(
        optimizer,
        scaler,
        reducer,
        dist_env=dist_env,
        mesh=mesh,
        micro_batches=micro_batches,
        max_grad_norm=recipe.optimizer.max_grad_norm,
        seeds=seeds,
        modules=parallel_model.modules,
        persistent_grads=recipe.compile == "cuda-graphs",
        elastic=is_elastic,
    )


def _replica_nodes(mesh: Mesh, dist_env: DistEnv) -> list[int] | None:
    """The node of each replica with which this worker adds up gradients."""
    if mesh.replicate_group is None:
        return None
    nodes = gather_node_map(dist_env)
    return [nodes.node_of_rank[rank] for rank in dist.get_process_group_ranks(mesh.replicate_group)]


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


def resume_training(
    context: TrainContext, fingerprint: str, force: bool, hint: str = RESTORE_FILES_HINT, needs_checkpoint: bool = False
) -> TrainState:
    """Go on from the newest hot copy of the run, or from its newest good checkpoint, if it has one, as it must if the
    model is `needs_checkpoint`. DataError, with the `hint`, when it was trained on data of another fingerprint."""
    # If one has some, and another does not see them, they are not all at the beginning.
    checkpoints_seen = any(
        all_gather_json(context.dist_env, needs_checkpoint or bool(list_checkpoints(context.run.checkpoints)))
    )
    loaded = _resume_from_memory(context)
    kept_copy = None if loaded is None else loaded.path
    if loaded is None:
        components = (context.parallel_model, context.optimizer, context.scaler)
        loaded = restore_checkpoint(
            context.run,
            context.dist_env,
            *components,
            lambda *bad: report_rejected_checkpoint(context, *bad),
            in_place=needs_checkpoint,
        )
    if loaded is None:
        if checkpoints_seen:
            raise DataError(
                f"{context.run.checkpoints}: no checkpoint here is good; `phalanx checkpoint verify` tells why"
            )
        prune_stale(context.run, context.dist_env, 0, None)
        return TrainState()
    meta = loaded.manifest.meta
    if meta.get("fingerprint") != fingerprint:
        fingerprints = f"(fingerprint {meta.get('fingerprint')}, now {fingerprint})"
        if not force:
            raise DataError(f"{loaded.path}: was trained on other data {fingerprints}; {hint}")
        if context.dist_env.is_rank_zero:
            context.reporter.report_event(RunWarning(text=f"forced: the run goes on with other data {fingerprints}"))
    check_resumed_recipe(context, loaded.path, meta, force)
    train_state = TrainState.from_meta(meta)
    if kept_copy is None:  # older checkpoints do not say that they are one
        train_state.last_saved_step = train_state.step
    prune_stale(context.run, context.dist_env, train_state.step, kept_copy)
    return train_state


def check_resumed_recipe(context: TrainContext, path: Path, meta: Mapping[str, Any], force: bool) -> None:
    """RecipeError where what decides the mathematics is not what the checkpoint at `path` was trained with: it stands
    there under a checksum, and in resolved.yaml it does not."""
    if "recipe" not in meta:
        return
    try:
        trained = Recipe.model_validate(meta["recipe"])
    except ValidationError as error:
        raise DataError(f"{path}: its recipe is not one that this Phalanx knows ({error.errors()[0]['msg']})") from None
    found = [each for each in diff_recipes(trained, context.recipe) if is_mathematics(each.key, trained)]
    if not found:
        return
    if not force:
        listed = "; ".join(map(str, found))
        raise RecipeError(
            f"{context.run.resolved}: is not what {path} was trained with: {listed}; put the old values back there, or "
            "give --force to go on with the new ones"
        )
    if context.dist_env.is_rank_zero:
        earlier_warnings = {event.text for event in read_events(context.run.events) if isinstance(event, RunWarning)}
        for text in (f"forced: {each}" for each in found):
            if text not in earlier_warnings:  # where the recipes were compared as they were given
                context.reporter.report_event(RunWarning(text=text))


def _resume_from_memory(context: TrainContext) -> LoadedCheckpoint | None:
    """Go on from the newest hot copy that is whole and newer than every checkpoint; None when there is none."""
    start_time = time.perf_counter()

    def on_reject(*bad: Any) -> None:
        report_rejected_checkpoint(context, *bad)

    verified_copies = find_verified_copies(context.run, context.dist_env, on_reject)
    if verified_copies is None:
        return None
    restored = restore_in_memory(
        context.run,
        verified_copies,
        context.dist_env,
        context.parallel_model,
        context.optimizer,
        context.scaler,
        on_reject,
    )
    if restored is None:
        return None
    meta = restored.checkpoint.manifest.meta
    if context.dist_env.is_rank_zero:
        context.reporter.report_event(
            InMemoryRestored(
                step=meta["step"],
                checkpoint_step=meta["last_saved_step"],
                fetched_bytes=restored.fetched_bytes,
                duration_s=time.perf_counter() - start_time,
            )
        )
    return restored.checkpoint


def report_start(context: TrainContext, samples: int, train_state: TrainState, scaled_up: bool = False) -> None:
    """Report that training begins on so many training samples, and what is doubtful about it. `scaled_up`: no work was
    lost before, it only goes on with more workers."""
    recipe, dist_env = context.recipe, context.dist_env
    context.reporter.report_event(
        AttemptStarted(
            world_size=dist_env.world_size,
            attempt=dist_env.attempt,
            start_step=train_state.step,
            total_steps=recipe.steps,
            device=str(dist_env.device),
            num_micro_batches=context.train_step.micro_batches,
            scaled_up=scaled_up,
        )
    )
    if has_batch_norm(context.model):
        text = (
            "the model has BatchNorm: results depend on the micro-batch, and running statistics are the first "
            "worker's; GroupNorm has none"
        )
        context.reporter.report_event(RunWarning(text=text))
    if samples < recipe.batch.global_size:
        text = f"the data have only {samples} training samples, less than batch.global_size"
        context.reporter.report_event(RunWarning(text=text))


def make_result(context: TrainContext, train_state: TrainState, status: str) -> dict[str, Any]:
    """result.json, but for the seconds: how training ended, with the digest of the state that was saved last."""
    result: dict[str, Any] = {"format": RESULT_FORMAT, "status": status, "steps": train_state.step}
    result |= {
        "final_loss": train_state.last_loss,
        "units": train_state.units_trained,
        "restarts": context.dist_env.attempt,
    }
    return {**result, "digest": _final_digest(context, train_state)}


def _final_digest(context: TrainContext, train_state: TrainState) -> str:
    """The digest of the state with which the run ends. Where no worker holds it all, it is read from the checkpoint."""
    if not context.parallel_model.fully_replicated:
        return digest_checkpoint(context.run.checkpoints / format_checkpoint_name(train_state.step))
    return compute_digest(
        get_state_tensors(context.model, context.optimizer, context.scaler).items(), train_state.samples_consumed
    )
