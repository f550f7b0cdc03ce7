"""In-memory checkpoints: keep the state in the memory of the nodes every few steps, so that a failure loses few steps.

Each worker copies, in the background, its share of the state that its node holds to the node's folder
(`run/in_memory_checkpoint.py`). State that only one node holds is also replicated to the next node (`replication.py`),
so any one node may be lost. The newest two copies are kept; one of them while the next is written. The progress of a
copy is exchanged as flags in the per-step all-reduce, as for durable checkpoints (`train/checkpoint/manager.py`).
`restore.py` restores from copies.
"""

import math
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError, is_storage_error
from phalanx.recipe.schema import Parallelism
from phalanx.run.event_types import InMemoryCheckpointSaved, InMemoryIntervalChosen, RunWarning
from phalanx.run.in_memory_checkpoint import (
    begin_epoch,
    create_node_dir,
    delete_history,
    record_checkpoint,
    remove_node_dir,
    truncate_history,
)
from phalanx.train.checkpoint import CheckpointSaver, SavePhase, assign_to_ranks
from phalanx.train.checkpoint.in_memory.capacity import explain_missing_space, find_available_bytes, is_memory_backed
from phalanx.train.checkpoint.in_memory.destination import NodeFolder
from phalanx.train.checkpoint.in_memory.format import NUM_TENSORS_KEY, format_copy_name, list_copies
from phalanx.train.checkpoint.in_memory.replication import ReplicaClient, ReplicaServer, find_local_address
from phalanx.train.checkpoint.interval import StepTimes
from phalanx.train.checkpoint.save_context import SaveContext, make_shards, measure_sizes
from phalanx.train.distributed.mesh import Mesh, rank_coordinates
from phalanx.train.distributed.object_collectives import (
    NodeMap,
    all_gather_json,
    all_reduce_max,
    broadcast_json_from_rank_zero,
    gather_node_map,
)
from phalanx.train.distributed.parallel_model import LocalTensor
from phalanx.train.train_state import TrainState

MIN_INTERVAL_S = 1.0
"""Minimum seconds between copies: a restart takes about as long, so more frequent copies save nothing."""
WARMUP_STEPS = 4
"""Steps of an attempt before the interval is chosen."""
MIN_RETRY_STEPS = 500
"""Minimum steps before copies that were too expensive are tried again: the trial must stay within the time budget."""
PIN_BYTES_PER_S = 1e9
"""Lower bound on the speed at which the buffer for copies from a GPU is page-locked in the background."""
TRIAL_COPIES = 3
"""Copies during a trial, plus one as a margin."""


class InMemoryCheckpointer:
    """In-memory checkpoints of one worker.

    `interval` is a number of steps, a maximum share of the training time ("1%"), or None. Every worker makes the same
    calls at the same step."""

    def __init__(
        self,
        save_context: SaveContext,
        interval: int | str | None,
        start_step: int,
        step_times: StepTimes,
        checkpoint_interval: Callable[[], int | None],
        environment: Mapping[str, str] = os.environ,
    ):
        self._run, self._dist_env, self._mesh = save_context.run, save_context.dist_env, save_context.mesh
        self._common_meta, self._environment = save_context.common_meta, environment
        self._report_event, self._flush = save_context.report_event, save_context.flush
        self._staging = save_context.staging
        self._step_times, self._checkpoint_interval = step_times, checkpoint_interval
        self._overhead_fraction = parse_percent(interval) if isinstance(interval, str) else None
        self.interval_steps: int | None = interval if isinstance(interval, int) else None
        """Current steps between two copies; None for no copies."""
        self._disabled = interval is None
        self._epoch_start = self._last_copied_step = self._last_decision_step = start_step
        self._must_decide = self._overhead_fraction is not None
        self._retry_steps = MIN_RETRY_STEPS
        self._is_set_up = self._first_copy_done = False
        self._nodes = NodeMap((0,) * self._dist_env.world_size)
        self._copy_dir: Path | None = None
        self._node_folder: NodeFolder | None = None
        self._saver: CheckpointSaver | None = None
        self._replica_server: ReplicaServer | None = None
        self._replica_client: ReplicaClient | None = None
        self._epoch_token = ""
        self._newest_complete_copy: str | None = None  # the newest complete copy of this attempt
        self._sizes: dict[str, int] = {}
        self._owned_names: list[str] = []
        self._num_tensors = 0  # over all workers
        self._total_bytes = self._max_rank_bytes = 0
        self._usual_step_s = 1.0  # step time, equal on all workers
        self.step_in_flight: int | None = None  # the step being copied, equal on all workers
        self.failure_reason = ""

    def is_due(self, step: int, last_step: int) -> bool:
        """Return whether to copy the state after this step. `last_step` is the last one of the run."""
        if self._disabled or self.step_in_flight is not None:
            return False
        if self._overhead_fraction is None:
            return self.interval_steps is not None and step % self.interval_steps == 0
        if self.interval_steps is None and step - self._last_decision_step >= self._retry_steps:
            # The copies may have been measured at a bad moment: try again.
            self._step_times.copy_overhead.reset()
            self._must_decide = True
        if self._must_decide and self._step_times.num_steps >= WARMUP_STEPS:
            self._must_decide, self._last_decision_step = False, step
            self._choose_interval(step, last_step)
        return self.interval_steps is not None and step - self._last_copied_step >= self.interval_steps

    def start_copy(self, train_state: TrainState, state: Mapping[str, LocalTensor], copy_now: list[str]) -> None:
        """Start a copy. No copy may be in flight. The tensors must not change before `wait_snapshot_copied`, except
        those named in `copy_now`."""
        step = self._last_copied_step = train_state.step
        sizes = measure_sizes(state)
        first = not self._is_set_up
        if first and not self._set_up(state, sizes):
            return
        assert self._saver is not None
        if sizes != self._sizes:
            self._sizes, self._owned_names = (
                sizes,
                assign_owned_tensors(state, sizes, self._mesh, self._nodes, self._dist_env.rank)[0],
            )
            self._count_tensors(state)
        shards = make_shards(state, self._owned_names)
        if (
            first
            and self._overhead_fraction is not None
            and self.interval_steps
            and self._dist_env.device.type != "cpu"
        ):
            self._saver.allocate_buffer(shards)  # the first copy starts when its buffer is ready
            self._last_copied_step = max(
                step,
                step - self.interval_steps + math.ceil(self._max_rank_bytes / PIN_BYTES_PER_S / self._usual_step_s),
            )
            return
        self.step_in_flight = step
        self._step_times.copy_overhead.begin()
        self._flush()  # a run that resumes from this copy must find the events of the steps before it
        try:
            owned_names = set(self._owned_names)
            self._saver.start(
                step,
                shards,
                {**self._common_meta, **asdict(train_state), NUM_TENSORS_KEY: self._num_tensors},
                [n for n in copy_now if n in owned_names],
            )
        except UsageError as error:  # a tensor with a dtype that a checkpoint cannot hold: training continues
            self.failure_reason = str(error)

    def wait_snapshot_copied(self) -> None:
        """Wait until the snapshot is copied. Call it before tensors change."""
        if self._saver is not None:
            self._saver.wait_snapshot_copied()

    def local_flags(self) -> tuple[bool, bool]:
        """Return this worker's flags, in the order of `IN_MEMORY_FLAGS`."""
        if self.step_in_flight is None or self._saver is None:
            return (False, False)
        state = self._saver.poll()
        if state.phase is SavePhase.FAILED:
            self.failure_reason = state.reason
        return (state.phase is SavePhase.WRITTEN, bool(self.failure_reason))

    def handle_flags(self, flags: Mapping[str, int]) -> None:
        """Advance the copy, given the sums of the flags over all workers."""
        if self.step_in_flight is None:
            return
        if flags["copy_failed"]:
            self._disable_after_failure()
        elif flags["copied"] == self._dist_env.world_size:
            self._complete_copy(self.step_in_flight)

    def note_checkpoint(self, step: int) -> None:
        """Record that a durable checkpoint of this step exists."""
        if self._is_set_up and not self._disabled and self._dist_env.is_rank_zero:
            record_checkpoint(self._run, step)

    def roll_back(self, step: int) -> None:
        """Roll back to a checkpoint of this step: copies of later steps become invalid."""
        if self._dist_env.is_rank_zero:
            truncate_history(self._run, step)
        if not self._is_set_up or self._disabled:
            return
        assert self._node_folder is not None
        self.cancel_copy()
        self._epoch_start = self._last_copied_step = step
        self._newest_complete_copy = None
        if self._begin_epoch():
            self._node_folder.epoch_token = self._epoch_token
        if self._nodes.is_node_leader(self._dist_env.rank):
            prune_copies(self._copy_dir, ())

    def close(self) -> None:
        """Remove all copies at the end of the run, which a durable checkpoint replaces."""
        if self._is_set_up and not self._disabled:
            self.cancel()
            all_gather_json(self._dist_env, None)  # after this no worker writes any more
        if self._dist_env.local_rank == 0 or (self._is_set_up and self._nodes.is_node_leader(self._dist_env.rank)):
            remove_node_dir(self._run, self._environment)
        if self._dist_env.is_rank_zero:
            try:
                delete_history(self._run)
            except OSError as error:  # the copies are removed, so a stale history does no harm
                if not is_storage_error(error):
                    raise
        self._disabled = True

    def cancel(self) -> None:
        """Abandon the copy in flight without waiting for other workers, which may be gone. Keep complete copies."""
        for peer in (self._replica_client, self._replica_server):
            if peer is not None:
                peer.close()
        self.cancel_copy()
        if self._replica_client is not None:
            self._replica_client.close_socket()
        self._replica_client = self._replica_server = None

    def cancel_copy(self, check_membership: Callable[[], None] = lambda: None) -> None:
        """Abandon the copy in flight, if any, on all workers. `check_membership` is called while this waits for the
        background thread, which may wait for a worker that is gone; it raises if one is."""
        if self._saver is not None and self.step_in_flight is not None:
            self._saver.cancel(check_membership)
            self._step_times.copy_overhead.record_failed()
        self.step_in_flight, self.failure_reason = None, ""

    def _complete_copy(self, step: int) -> None:
        assert self._saver is not None
        assert self._node_folder is not None
        write_s = self._saver.poll().duration_s
        self._saver.commit()
        self._saver.cancel()
        self._newest_complete_copy = format_copy_name(step, self._epoch_token)
        stall_s = self._saver.stall_s
        if self._dist_env.device.type == "cpu":  # the copying thread takes a core from training
            stall_s += self._node_folder.cpu_s + (
                self._replica_server.cpu_s if self._replica_server is not None else 0.0
            )
        self._step_times.copy_overhead.record_done(stall_s)
        if not self._first_copy_done:
            self._first_copy_done = True
            self._step_times.copy_overhead.reset()
        self._must_decide = (
            self._overhead_fraction is not None and self._step_times.copy_overhead.num_done.bit_count() == 1
        )
        event = InMemoryCheckpointSaved(
            step=step, size_bytes=self._total_bytes, duration_s=write_s, stall_s=self._saver.stall_s
        )
        self.step_in_flight = None
        self._report_event(event)

    def _choose_interval(self, step: int, last_step: int) -> None:
        """Choose the interval from measurements of all workers."""
        assert self._overhead_fraction is not None
        usual_step_s = self._step_times.usual_step_s
        copy_cost_s, usual_step_s = all_reduce_max(
            self._dist_env, [self._step_times.copy_overhead.cost_s(usual_step_s), usual_step_s]
        )
        before, checkpoint_interval = self.interval_steps, self._checkpoint_interval()
        if usual_step_s <= 0:
            return
        self._usual_step_s = usual_step_s
        affordable_interval = copy_cost_s / (self._overhead_fraction * usual_step_s)
        self.interval_steps = math.ceil(max(affordable_interval, MIN_INTERVAL_S / usual_step_s, 1.0))
        self._retry_steps = max(MIN_RETRY_STEPS, TRIAL_COPIES * math.ceil(affordable_interval))
        # A copy is useful only if it is well before the next durable checkpoint and before the end of the run.
        if (
            checkpoint_interval is not None and 2 * self.interval_steps > checkpoint_interval
        ) or step + self.interval_steps >= last_step:
            self.interval_steps = None
        if self.interval_steps != before:
            self._report_event(
                InMemoryIntervalChosen(step=step, interval_steps=self.interval_steps, cost_s=copy_cost_s)
            )

    def _set_up(self, state: Mapping[str, LocalTensor], sizes: dict[str, int]) -> bool:
        """Agree with all workers on what each copies and where to. Return whether the copies fit everywhere."""
        dist_env = self._dist_env
        self._nodes = nodes = gather_node_map(dist_env, self._environment)
        self._owned_names, single_node = assign_owned_tensors(state, sizes, self._mesh, nodes, dist_env.rank)
        self._sizes = sizes
        self._count_tensors(state)
        own_facts: dict[str, Any] = {
            "bytes": sum(sizes[name] for name in self._owned_names),
            "exposed": single_node,
            "wrong": "",
        }
        try:
            self._copy_dir = create_node_dir(self._run, self._environment)
            own_facts |= {
                "available_bytes": find_available_bytes(self._copy_dir),
                "in_memory": is_memory_backed(self._copy_dir),
            }
        except (OSError, UsageError) as error:
            own_facts["wrong"] = str(error)
        gathered = all_gather_json(dist_env, own_facts)
        problem = next((each["wrong"] for each in gathered if each["wrong"]), "") or explain_missing_space(
            gathered, nodes
        )
        if problem:
            self._disable(problem)
            return False
        assert self._copy_dir is not None
        self._total_bytes = sum(each["bytes"] for each in gathered)
        self._max_rank_bytes = max(each["bytes"] for each in gathered)
        senders = [rank for rank, each in enumerate(gathered) if each["exposed"]]
        if senders:
            self._connect_replicas(senders)
        self._is_set_up = True
        if not self._begin_epoch():
            return False
        send_to_replica = None if self._replica_client is None else self._replica_client.send_shard
        self._node_folder = NodeFolder(
            self._copy_dir, dist_env.rank, self._epoch_token, self._prune_before_write, send_to_replica
        )
        self._saver = CheckpointSaver(self._node_folder, self._staging)
        return True

    def _count_tensors(self, state: Mapping[str, LocalTensor]) -> None:
        own_coordinates = self._mesh.coordinates
        own = [
            name
            for name, local_tensor in state.items()
            if local_tensor.has_first_element
            and not any(own_coordinates[axis] for axis in local_tensor.replicated_axes)
        ]
        self._num_tensors = len(set().union(*all_gather_json(self._dist_env, sorted(own))))

    def _begin_epoch(self) -> bool:
        """Write a new epoch token to the run's history before any copy uses it. Return whether it could be written."""
        token_and_error = [secrets.token_hex(8), ""]
        if self._dist_env.is_rank_zero:
            try:
                truncate_history(self._run, self._epoch_start)
                begin_epoch(self._run, token_and_error[0])
            except OSError as error:
                token_and_error[1] = str(error)
        self._epoch_token, problem = broadcast_json_from_rank_zero(self._dist_env, token_and_error)
        if problem:
            self._disable(problem)
        return not problem

    def _connect_replicas(self, senders: list[int]) -> None:
        """Connect to the workers that this one exchanges replicas with. If that fails, copies stay on their node."""
        dist_env, nodes = self._dist_env, self._nodes
        replicated_ranks = [rank for rank in senders if nodes.replica_rank(rank) == dist_env.rank]
        assert self._copy_dir is not None
        address, problem = None, ""
        try:
            if replicated_ranks:
                self._replica_server = ReplicaServer(self._copy_dir)
                address = self._replica_server.listen(find_local_address(self._environment))
        except OSError as error:
            problem = str(error)
        addresses = all_gather_json(dist_env, address)
        try:
            if dist_env.rank in senders and addresses[nodes.replica_rank(dist_env.rank)] is not None:
                host, port, secret = addresses[nodes.replica_rank(dist_env.rank)]
                self._replica_client = ReplicaClient((host, port, secret))
            if self._replica_server is not None and not problem:
                self._replica_server.accept(len(replicated_ranks))
        except OSError as error:
            problem = problem or str(error)
        found = next((each for each in all_gather_json(dist_env, problem) if each), "")
        if found:
            self.cancel()
            text = f"in-memory checkpoints are not replicated, so a lost node costs a checkpoint interval: {found}"
            self._report_event(RunWarning(text=text))

    def _prune_before_write(self, step: int) -> None:
        """Remove old copies to free space. Called in the background before a shard is written."""
        if self._newest_complete_copy is not None and self._nodes.is_node_leader(self._dist_env.rank):
            prune_copies(self._copy_dir, (self._newest_complete_copy, format_copy_name(step, self._epoch_token)))

    def _disable_after_failure(self) -> None:
        reason = self.failure_reason
        self.cancel()
        found = next((each for each in all_gather_json(self._dist_env, reason) if each), "")
        if self._nodes.is_node_leader(self._dist_env.rank):
            remove_node_dir(self._run, self._environment)
        self._disable(found)

    def _disable(self, reason: str) -> None:
        self._disabled = True
        if self._dist_env.is_rank_zero:
            delete_history(self._run)
        text = f"in-memory checkpoints are off: {reason}; training continues, and a failure loses more steps"
        self._report_event(RunWarning(text=text))


def parse_percent(text: str) -> float:
    """Parse a percentage: "1%" is 0.01."""
    return float(text.strip().removesuffix("%")) / 100.0


def find_holders(parallelism: Parallelism, rank: int, replicated_axes: tuple[str, ...]) -> list[int]:
    """Return the ranks that differ from `rank` along `replicated_axes` only, and therefore hold the same tensors."""
    own = rank_coordinates(parallelism, rank)
    fixed = [axis for axis in own if axis not in replicated_axes]
    all_coordinates = ((other, rank_coordinates(parallelism, other)) for other in range(parallelism.world))
    return [
        other
        for other, coordinates_of_other in all_coordinates
        if all(coordinates_of_other[axis] == own[axis] for axis in fixed)
    ]


def assign_owned_tensors(
    state: Mapping[str, LocalTensor], sizes: Mapping[str, int], mesh: Mesh, nodes: NodeMap, rank: int
) -> tuple[list[str], bool]:
    """Return the sorted names of the tensors that this worker copies, so that its node keeps all that its workers hold;
    and whether the node is the only one to hold some of them."""
    own: list[str] = []
    single_node = False
    for replicated_axes in {local_tensor.replicated_axes for local_tensor in state.values()}:
        sizes_with_axes = {
            name: sizes[name] for name, local_tensor in state.items() if local_tensor.replicated_axes == replicated_axes
        }
        all_holders = find_holders(mesh.parallelism, rank, replicated_axes)
        holders_on_node = [other for other in all_holders if nodes.node_of_rank[other] == nodes.node_of_rank[rank]]
        own += assign_to_ranks(sizes_with_axes, len(holders_on_node))[holders_on_node.index(rank)]
        single_node |= nodes.num_nodes > 1 and len(holders_on_node) == len(all_holders)
    return sorted(own), single_node


def prune_copies(folder: Path | None, keep: tuple[str, ...]) -> None:
    """Remove all copies of a node except those named in `keep`."""
    for step, token in list_copies(folder) if folder is not None else ():
        name = format_copy_name(step, token)
        if name not in keep:
            assert folder is not None
            shutil.rmtree(folder / name, ignore_errors=True)  # a worker may be removing its shard at the same time
