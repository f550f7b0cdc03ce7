"""Choose how the gradients of a step are summed, as parallelism, determinism and `grad_sync` of the recipe require."""

import torch.distributed as dist
from torch import nn

from phalanx.recipe import ResolvedRecipe
from phalanx.recipe.grad_sync_defaults import (
    auto_algorithms,
    bucket_size_bytes,
    is_chosen_while_training,
    num_warmup_steps,
)
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.fsdp import sort_in_reduction_order
from phalanx.train.distributed.mesh import Mesh
from phalanx.train.distributed.object_collectives import gather_node_map
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.grad_sync import BucketedReducer
from phalanx.train.grad_sync.error_feedback import ErrorFeedbackState
from phalanx.train.grad_sync.reducer import GradReducer, HSDPTreeReducer, LocalReducer, ParallelReducer
from phalanx.train.grad_sync.registry import GRAD_SYNC_ALGORITHMS
from phalanx.train.ops.cached_cast_linear import CachedCastLinear


def choose_reducer(
    recipe: ResolvedRecipe, dist_env: DistEnv, parallel_model: ParallelModel, num_metric_slots: int
) -> GradReducer:
    """Make the reducer of a worker. Plain replicas also sum `num_metric_slots` fp32 values in a bucket with it."""
    mesh, micro_batches = parallel_model.mesh, recipe.batch.global_size // recipe.batch.micro_size
    layers = [
        part for module in parallel_model.modules for part in module.modules() if isinstance(part, CachedCastLinear)
    ]
    parameters = list(parallel_model.trainable_parameters().values())
    if mesh.is_tree_hsdp:
        parameters = sort_in_reduction_order(parallel_model.modules, parameters)
    local = LocalReducer(parameters, layers)
    bucketed = _make_bucketed_reducer(recipe, dist_env, parallel_model, parameters, num_metric_slots)
    replica_reducer = local if bucketed is None else bucketed
    if is_chosen_while_training(recipe) and (bucketed is not None or mesh.is_pure_ddp):  # may compress at times
        parallel_model.error_feedback = ErrorFeedbackState.from_source(parallel_model, replica_reducer)
    reducer: GradReducer = replica_reducer
    if mesh.is_tree_hsdp:
        assert mesh.fsdp_mesh is not None
        reducer = HSDPTreeReducer(reducer, mesh.fsdp_mesh.get_group())
    elif not mesh.is_pure_ddp:
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
    is_elastic, algorithm = recipe.determinism == "elastic", auto_algorithms(recipe, dist_env.device.type)[0]
    uses_error_feedback = GRAD_SYNC_ALGORITHMS[algorithm].uses_error_feedback and not is_elastic
    is_needed = mesh.replicate_group is not None or (is_elastic and micro_batches > 1) or uses_error_feedback
    # A pipeline runs many backwards at once, so its gradients are summed after the last.
    if mesh.pipeline_group is not None or not (mesh.is_tree_hsdp or (mesh.fsdp_mesh is None and is_needed)):
        return None
    reducer = BucketedReducer(
        parameters,
        rank=mesh.coordinates["replicate"],
        world_size=mesh.parallelism.replicate,
        micro_batches=micro_batches // mesh.micro_batch_stride,
        is_elastic=is_elastic,
        bucket_bytes=bucket_size_bytes(recipe.grad_sync),
        group=mesh.replicate_group,
        num_metric_slots=num_metric_slots if mesh.is_pure_ddp else 0,
        algorithm=algorithm,
        node_of_rank=_find_replica_nodes(mesh, dist_env) if algorithm == "hierarchical" else None,
        powersgd_rank=recipe.grad_sync.powersgd_rank,
        warmup_steps=num_warmup_steps(recipe),
    )
    parallel_model.error_feedback = (
        ErrorFeedbackState.from_residuals(parallel_model, reducer.residuals(), reducer.projection_bases())
        if uses_error_feedback
        else None
    )
    return reducer


def _find_replica_nodes(mesh: Mesh, dist_env: DistEnv) -> list[int] | None:
    """Return the node of each replica with which this worker adds up gradients."""
    if mesh.replicate_group is None:
        return None
    nodes = gather_node_map(dist_env)
    return [nodes.node_of_rank[rank] for rank in dist.get_process_group_ranks(mesh.replicate_group)]
