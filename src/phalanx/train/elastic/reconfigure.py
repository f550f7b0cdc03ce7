"""Reconfiguration: the surviving replicas form a new world and continue from the state in their memory.

When one of several replicas is lost, the others need no state from it. A worker completes a step only after all have
contributed to it, so the steps of the survivors differ by at most one. Workers that are behind, and workers that have
just joined, get the state from one that is not behind. Under `determinism: elastic` nothing else depends on the number
of replicas. This module has the rendezvous and the recovery of whole replicas; `sharded_recovery.py` recovers sharded
ones. A checkpoint save in flight is carried along (`train/checkpoint/checkpointer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phalanx.errors import DataError
from phalanx.recipe.schema import Parallelism
from phalanx.run.event_types import CheckpointFailed
from phalanx.run.process_messages import JoinedGroup, LeftGroup, MembershipUpdate
from phalanx.train.builder import make_accumulator
from phalanx.train.checkpoint import SaveInFlight, clean_checkpoint_dir
from phalanx.train.checkpoint.load_plan import get_state_tensors, load_full_state
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.failures import is_peer_failure
from phalanx.train.distributed.mesh import Mesh, build_mesh
from phalanx.train.distributed.object_collectives import all_gather_json, broadcast_json, format_dtype, parse_dtype
from phalanx.train.distributed.process_group import abort_process_group, init_process_group
from phalanx.train.distributed.store import open_attempt_store
from phalanx.train.elastic.membership import MembershipUpdates, SocketRegistry
from phalanx.train.evaluation import EvaluationResult
from phalanx.train.ops.random_draws import MicroBatchSeeds
from phalanx.train.resume import report_start
from phalanx.train.train_context import MembershipChanged, TrainContext, WorkerProcess
from phalanx.train.train_state import SurvivorState, TrainState

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer

EvaluatorFactory = Callable[[DistEnv, Mesh], Callable[[], EvaluationResult | None] | None]
"""Makes the evaluation function for a new world."""
MIN_POLL_INTERVAL_S, POLL_BACKOFF_FACTOR, MAX_POLL_INTERVAL_S = 0.001, 1.2, 0.05
"""Polling for the arrival of all workers: first interval, growth, and maximum; many workers may wait long for a few."""
NO_STEP = -1
"""Step that stands for: this worker has no state yet."""


@dataclass(frozen=True)
class PeerStates:
    """The states of the workers in the new world, by rank.

    `step_of_rank` is the last completed step (NO_STEP for a new worker). `grads_reduced` marks the workers that
    have the reduced gradients of the next step. `saving_step_of_rank` is the step of the save in flight. `source_rank`
    is the first rank that is furthest ahead; `survivor_state` and `scaler_state` are its state."""

    step_of_rank: list[int]
    grads_reduced: list[bool]
    saving_step_of_rank: list[int]
    source_rank: int
    survivor_state: SurvivorState
    scaler_state: dict[str, Tensor]

    @property
    def all_at_same_step(self) -> bool:
        """Whether all workers are at the same step."""
        return min(self.step_of_rank) == max(self.step_of_rank)

    @property
    def saves_diverged(self) -> bool:
        """Whether a save started or ended on some workers only, because they left during that step."""
        saving = zip(self.step_of_rank, self.saving_step_of_rank, strict=True)
        return len({step for reached, step in saving if reached != NO_STEP}) > 1


class RecoveryMode(Protocol):
    """How a worker gets its state in a new world."""

    def rebuild(self, before: TrainContext | None, dist_env: DistEnv) -> TrainContext:
        """Return the context for the new world; `before` is the old one, or None for a worker that just joined."""

    def sync_state(self, before: TrainContext | None, now: TrainContext, peers: PeerStates) -> None:
        """Bring all workers to the state of those furthest ahead."""

    def warm_up(self, now: TrainContext, train_state: TrainState) -> None:
        """Do what is left before the next step."""


class Reconfiguration:
    """Reconfigurations of one worker, over its whole life. `worker_id` identifies the worker, whatever its rank.
    `inter_replica_sockets` and `intra_replica_sockets` are its connections to other replicas and within its own."""

    def __init__(
        self,
        membership_updates: MembershipUpdates,
        inter_replica_sockets: SocketRegistry,
        intra_replica_sockets: SocketRegistry,
        worker_id: int,
        process: WorkerProcess,
        recovery_mode: RecoveryMode,
        fingerprint: str,
    ):
        self.membership_updates, self._inter_replica_sockets, self._intra_replica_sockets = (
            membership_updates,
            inter_replica_sockets,
            intra_replica_sockets,
        )
        self._worker_id, self._dist_env = worker_id, process.dist_env
        self._reporter, self._heartbeat = process.reporter, process.heartbeat
        self._recovery_mode, self._fingerprint = recovery_mode, fingerprint
        self._hooks: list[RemovableHandle] = []

    def install_membership_hooks(self, modules: Iterable[nn.Module], compiled: bool) -> None:
        """Check for a lost worker before the forward of each module with parameters (unless compiled) and after each
        gradient in backward. Otherwise a worker in a long step would notice only in the gradient synchronization."""
        for hook in self._hooks:
            hook.remove()
        parameters_by_module = {
            module_: list(module_.parameters(recurse=False)) for module in modules for module_ in module.modules()
        }
        trained = {parameter for own in parameters_by_module.values() for parameter in own if parameter.requires_grad}
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._check_on_grad) for parameter in trained]
        if not compiled:
            self._hooks += [
                module_.register_forward_pre_hook(self._check_on_forward)
                for module_, own in parameters_by_module.items()
                if own
            ]

    def check_membership(self) -> None:
        """Raise MembershipChanged if a worker was lost, so that the current step cannot finish."""
        if self.membership_updates.worker_lost:
            raise MembershipChanged

    def _check_on_grad(self, parameter: Tensor) -> None:
        self.check_membership()

    def _check_on_forward(self, module: nn.Module, arguments: Any) -> None:
        if module.training:
            self.check_membership()

    def detach(self, trainer: Trainer) -> SurvivorState:
        """Leave a process group in which workers may be lost, and undo the unfinished step."""
        self._reporter.send_control(LeftGroup(rank=self._worker_id))
        survivor_state = trainer.detach()
        for sockets in (self._inter_replica_sockets, self._intra_replica_sockets):
            sockets.shut_down()  # otherwise workers that have not noticed the loss would wait for this one
        abort_process_group()
        return survivor_state

    def rejoin(
        self, before: TrainContext | None, survivor_state: SurvivorState | None, samples: int
    ) -> tuple[TrainContext, SurvivorState]:
        """Join the new world and synchronize the state; `survivor_state` is None for a worker that has none yet. Return
        the new context and the synchronized state. Raises DataError if this worker's data differ from the others'."""
        was_rank_zero = self._dist_env.is_rank_zero and survivor_state is not None
        update = self._wait_for_rendezvous()
        dist_env, rank, world_size = self._dist_env, self._dist_env.rank, self._dist_env.world_size
        init_process_group(dist_env, connection_scope=self._inter_replica_sockets)
        peers = self._gather_peer_states(before, survivor_state)
        built = self._recovery_mode.rebuild(before, dist_env)
        if before is not None:
            before.callbacks.run_context.rank, before.callbacks.run_context.world_size = (
                rank,
                world_size,
            )
        self._recovery_mode.sync_state(before, built, peers)
        self._heartbeat.reset_count()
        pending_save = None if survivor_state is None else survivor_state.pending_save
        if peers.saves_diverged:
            self._cancel_pending_save(pending_save, peers)
            pending_save = None
        own_step, last = peers.step_of_rank[rank], peers.survivor_state.last_step
        if NO_STEP < own_step < max(peers.step_of_rank) and last is not None:
            for event in last.events:
                self._reporter.remember_event(event)
        if dist_env.is_rank_zero:
            # Also removes what lost workers left of an abandoned save; the pending save is still being written.
            clean_checkpoint_dir(built.run.checkpoints, keep_step=None if pending_save is None else pending_save.step)
            report_start(built, samples, peers.survivor_state.train_state, scaled_up=not update.worker_lost)
            self._reporter.resend_events(own_step if was_rank_zero else update.last_reported_step)
        all_gather_json(dist_env, None)  # no worker may start a save before the cleanup; one may be due right now
        self._recovery_mode.warm_up(built, peers.survivor_state.train_state)
        return built, replace(peers.survivor_state, pending_save=pending_save)

    def _wait_for_rendezvous(self) -> MembershipUpdate:
        """Wait for an update and until all workers that it names have arrived. Creating a process group would wait
        forever for one that does not arrive; if one is lost before, the agent sends another update."""
        while True:
            update = self.membership_updates.take_update()
            rank, world_size = update.active_ranks.index(self._worker_id), len(update.active_ranks)
            self._dist_env = replace(self._dist_env, rank=rank, world_size=world_size, attempt=update.attempt)
            if world_size == 1 or self._all_arrived(update):
                self._reporter.send_control(JoinedGroup(rank=self._worker_id, attempt=update.attempt))
                return update

    def _all_arrived(self, update: MembershipUpdate) -> bool:
        """Wait until all workers have arrived; return False if another update comes first."""
        store, poll_interval_s = open_attempt_store(self._dist_env), MIN_POLL_INTERVAL_S
        if store.add("come", 1) == len(update.active_ranks):
            store.set("all", "1")
        while not store.check(["all"]):
            self.membership_updates.wait_for_update(poll_interval_s)
            if self.membership_updates.has_update:
                return False
            poll_interval_s = min(POLL_BACKOFF_FACTOR * poll_interval_s, MAX_POLL_INTERVAL_S)
        return True

    def _cancel_pending_save(self, pending_save: SaveInFlight | None, peers: PeerStates) -> None:
        """Drop a save that is in flight on some workers only. If it is in flight on the workers furthest ahead, its
        checkpoint is now missing; if it has ended there, it is a checkpoint or has failed."""
        if pending_save is not None:
            pending_save.saver.cancel()
        all_gather_json(self._dist_env, None)  # after this no worker writes any more
        train_state, step = peers.survivor_state.train_state, peers.saving_step_of_rank[peers.source_rank]
        if step != NO_STEP:
            train_state.lost_checkpoint_step = train_state.lost_checkpoint_step or step
            if self._dist_env.is_rank_zero:
                reason = "workers were lost when only some had begun with it"
                self._reporter.report_event(CheckpointFailed(step=step, reason=reason))

    def _gather_peer_states(self, before: TrainContext | None, survivor_state: SurvivorState | None) -> PeerStates:
        """Exchange step, pending save, and state with the other workers."""
        dist_env = self._dist_env
        step, grads_reduced = (
            (NO_STEP, False)
            if survivor_state is None
            else (survivor_state.train_state.step, survivor_state.grads_reduced)
        )
        saving_step = (
            NO_STEP
            if survivor_state is None or survivor_state.pending_save is None
            else survivor_state.pending_save.step
        )
        scaler_state = {} if before is None else before.scaler.state()
        if dist_env.world_size == 1:
            assert survivor_state is not None
            return PeerStates([step], [grads_reduced], [saving_step], 0, survivor_state, scaler_state)
        mine = torch.tensor([step, int(grads_reduced), saving_step])
        all_of_them = [torch.empty_like(mine) for _ in range(dist_env.world_size)]
        dist.all_gather(all_of_them, mine)
        step_of_rank = [int(each[0]) for each in all_of_them]
        source = step_of_rank.index(max(step_of_rank))
        payload: list[Any] = []
        if dist_env.rank == source:
            assert survivor_state is not None
            payload = [
                survivor_state.to_json(),
                self._fingerprint,
                {name: float(value) for name, value in scaler_state.items()},
            ]
        state_json, fingerprint, scaler_values = broadcast_json(source, payload)
        farthest = SurvivorState.from_json(state_json)
        scaler_state = {name: torch.tensor(value, dtype=torch.float64) for name, value in scaler_values.items()}
        if fingerprint != self._fingerprint:
            raise DataError(
                f"worker {self._worker_id} has other data than the other workers: all nodes must read the same data"
            )
        of_sums, of_saves = [bool(each[1]) for each in all_of_them], [int(each[2]) for each in all_of_them]
        return PeerStates(step_of_rank, of_sums, of_saves, source, farthest, scaler_state)


class ReplicatedRecovery:
    """Recovery of replicas in which each worker holds the whole state: the model stays, and a worker that is behind
    receives all of the state."""

    def __init__(self, evaluator_factory: EvaluatorFactory):
        self._evaluator_factory = evaluator_factory

    def rebuild(self, before: TrainContext | None, dist_env: DistEnv) -> TrainContext:
        """Return the same model and optimizer in the new world."""
        assert before is not None
        before.accumulator.reducer.close()
        mesh = build_mesh(Parallelism(replicate=dist_env.world_size), dist_env)
        parallel_model = replace(before.parallel_model, mesh=mesh)
        seeds = MicroBatchSeeds(before.recipe.seed, dist_env.device)
        accumulator = make_accumulator(before.recipe, dist_env, parallel_model, before.optimizer, before.scaler, seeds)
        return replace(
            before,
            dist_env=dist_env,
            parallel_model=parallel_model,
            accumulator=accumulator,
            evaluate=self._evaluator_factory(dist_env, mesh),
        )

    def sync_state(self, before: TrainContext | None, now: TrainContext, peers: PeerStates) -> None:
        if peers.all_at_same_step:
            return
        context = now
        behind = peers.step_of_rank[context.dist_env.rank] < max(peers.step_of_rank)
        own = None if behind else get_state_tensors(context.model, context.optimizer, context.scaler)
        received = broadcast_tensors(own if context.dist_env.rank == peers.source_rank else None, peers.source_rank)
        if behind:
            load_full_state(
                context.parallel_model.modules[0], context.optimizer, context.scaler, received, "the other workers"
            )

    def warm_up(self, now: TrainContext, train_state: TrainState) -> None:
        """Do nothing: the model was not rebuilt."""


def broadcast_tensors(
    own: dict[str, Tensor] | None, source: int, group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Broadcast the `own` tensors of `source_rank` to all workers of the group, and return them."""
    specs = [[name, list(tensor.shape), format_dtype(tensor.dtype)] for name, tensor in (own or {}).items()]
    found = {}
    for name, shape, dtype in broadcast_json(source, specs, group):
        tensor = torch.empty(shape, dtype=parse_dtype(dtype)) if own is None else own[name].contiguous()
        if tensor.numel():  # a shard may be empty
            dist.broadcast(tensor, src=source, group=group)
        found[name] = tensor
    return found


def requires_reconfiguration(error: BaseException) -> bool:
    """Return whether an error ends the process group but not the run."""
    return isinstance(error, MembershipChanged) or is_peer_failure(error)
