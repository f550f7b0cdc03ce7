"""Recovery of sharded replicas from memory: the model is built again in the new world, without weights, and takes
over what this worker holds. (FSDP keeps the groups of the world in which it sharded a model.)

The same number of workers shards a replica before and after, so each worker finds its part in its own memory. A worker
that joins gets its part from the worker in the same position of another replica. A worker that is one step behind
cannot get it: the workers ahead may all be in other positions. But a step is only agreed on when every worker has its
part of the summed gradients (`GradientAccumulator.reduce_gradients`), so a worker that is behind has these gradients
and repeats the update of the others.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.compat import clear_dtensor_mesh_cache, scale_in_place
from phalanx.train.callbacks import Callbacks
from phalanx.train.compile_warmup import warm_up_compile
from phalanx.train.distributed.dtensor_utils import distribute_like, to_local
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.elastic.reconfigure import NO_STEP, PeerStates, broadcast_tensors
from phalanx.train.train_context import TrainContext
from phalanx.train.train_state import LastStep, TrainState

BuildFn = Callable[[DistEnv, Callbacks | None], TrainContext]
"""Builds and parallelizes the model for a rank, without weights; takes over existing callbacks."""
MODEL_PREFIX = "model/"


class ShardedRecovery:
    """Recovery of a worker in a replica of `replica_size` workers. `initial` is the context that it trains first."""

    def __init__(self, replica_size: int, build: BuildFn, initial: TrainContext | None):
        self._replica_size, self._build_fn = replica_size, build
        # While FSDP holds parameters unsharded, the model has other tensors than the sharded ones kept here.
        self._parameters = {} if initial is None else initial.parallel_model.parameters()

    def rebuild(self, before: TrainContext | None, dist_env: DistEnv) -> TrainContext:
        """Build the model, without weights, and its context for the new world."""
        clear_dtensor_mesh_cache()
        built = self._build_fn(dist_env, None if before is None else before.callbacks)
        built.callbacks.run_context.model = built.model
        return built

    def sync_state(self, before: TrainContext | None, now: TrainContext, peers: PeerStates) -> None:
        """Fill the new model. Raises RuntimeError on all workers if those behind cannot catch up."""
        steps, rank, context = max(peers.step_of_rank), now.dist_env.rank, now
        behind = [rank for rank, step in enumerate(peers.step_of_rank) if NO_STEP < step < steps]
        if any(peers.step_of_rank[rank] < steps - 1 or not peers.grads_reduced[rank] for rank in behind):
            raise RuntimeError(f"workers {behind} are behind step {steps}, and cannot do it without the others")
        if before is not None:
            self._copy_local_state(before, context)
        context.scaler.load(peers.scaler_state)
        if rank in behind:
            assert before is not None
            assert peers.survivor_state.last_step is not None
            self._redo_last_step(before, context, peers.survivor_state.last_step, steps)
        if NO_STEP in peers.step_of_rank:
            self._send_to_new(context, peers)
        if not peers.all_at_same_step:
            _broadcast_buffers(context, peers)
        self._parameters = context.parallel_model.parameters()

    def warm_up(self, now: TrainContext, train_state: TrainState) -> None:
        """Compile the rebuilt model."""
        if now.recipe.compile:
            warm_up_compile(now, train_state)

    @torch.no_grad()
    def _copy_local_state(self, old_context: TrainContext, new_context: TrainContext) -> None:
        """Copy this worker's state to the new model."""
        for name, parameter in new_context.parallel_model.parameters().items():
            to_local(parameter).copy_(to_local(self._parameters[name]))
        old = old_context.parallel_model.owned_buffers()
        for name, buffer in new_context.parallel_model.owned_buffers().items():
            buffer.copy_(old[name])
        new_context.optimizer.load(old_context.optimizer.state(), "memory")

    def _redo_last_step(
        self, old_context: TrainContext, new_context: TrainContext, last_step: LastStep, step: int
    ) -> None:
        """Repeat the update of the step for which this worker has the reduced gradients."""
        if last_step.applied_update is not None:
            factor, lr = last_step.applied_update
            scale_in_place(old_context.accumulator.reducer.grad_tensors(), factor)
            for name, parameter in new_context.parallel_model.trainable_parameters().items():
                gradient = self._parameters[name].grad
                assert gradient is not None
                parameter.grad = distribute_like(parameter, to_local(gradient))
            new_context.optimizer.step(lr)
        new_context.callbacks.run_context.step = step
        for event in last_step.events:
            new_context.callbacks.run_hook(event)

    @torch.no_grad()
    def _send_to_new(self, context: TrainContext, peers: PeerStates) -> None:
        """Send the state to new workers, from the same position of the replica of the source rank."""
        group, position = context.parallel_model.mesh.replicate_group, context.dist_env.rank % self._replica_size
        assert group is not None
        source = peers.source_rank - peers.source_rank % self._replica_size + position
        parameters = context.parallel_model.parameters()
        own = {MODEL_PREFIX + name: to_local(parameter) for name, parameter in parameters.items()}
        state = {key: to_local(value) for key, value in context.optimizer.state().items()}
        received = broadcast_tensors(own | state if context.dist_env.rank == source else None, source, group)
        if peers.step_of_rank[context.dist_env.rank] != NO_STEP:
            return
        for name, parameter in parameters.items():
            to_local(parameter).copy_(received.pop(MODEL_PREFIX + name))
        context.optimizer.load(received, "the other workers")


@torch.no_grad()
def _broadcast_buffers(context: TrainContext, peers: PeerStates) -> None:
    """Broadcast the buffers that forward and callbacks have changed, which are equal on all workers."""
    buffers: dict[str, Tensor] = context.parallel_model.owned_buffers()
    is_source = context.dist_env.rank == peers.source_rank
    received = broadcast_tensors(
        {name: buffer.detach() for name, buffer in buffers.items()} if is_source else None, peers.source_rank
    )
    for name, buffer in buffers.items():
        buffer.copy_(received[name])
