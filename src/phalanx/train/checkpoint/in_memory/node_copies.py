"""The in-memory destination of one worker: copies of the state in the memory of the nodes.

Each worker copies its share of the state that its node holds to the node's folder (`run/in_memory_checkpoint.py`).
State that only one node holds is also replicated to the next node (`replication.py`), so any one node may be lost. The
newest two copies are kept; one of them while the next is written. `restore.py` restores from copies.
"""

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from phalanx.cluster.discovery import read_cgroup_memory
from phalanx.cluster.system_files import is_memory_backed
from phalanx.errors import UsageError, is_storage_error
from phalanx.formatting import format_bytes
from phalanx.run.event_types import RunWarning
from phalanx.run.in_memory_checkpoint import (
    begin_epoch,
    create_node_dir,
    delete_history,
    remove_node_dir,
    truncate_history,
)
from phalanx.train.checkpoint.format import Bytes, rank_file_name
from phalanx.train.checkpoint.in_memory.format import format_copy_name, prune_copies
from phalanx.train.checkpoint.in_memory.replication import ReplicaPeers
from phalanx.train.checkpoint.save import CheckpointSaver, OwnedTensors, SaveContext
from phalanx.train.checkpoint.shard_file import RankRecord, ShardFileSpec, write_record, write_with_checksums
from phalanx.train.distributed.mesh import Mesh, rank_coordinates
from phalanx.train.distributed.object_collectives import (
    NodeMap,
    all_gather_json,
    broadcast_json_from_rank_zero,
    gather_node_map,
)
from phalanx.train.distributed.parallel_model import LocalTensor

COPIES_PER_NODE = 2
"""Copies that a node keeps."""
MAX_FREE_MEMORY_FRACTION = 0.5
"""Maximum fraction of the free memory that copies may take."""


class CopyNeeds(NamedTuple):
    """What the copies of one worker need, and the place for them on its node."""

    size_bytes: int
    """Bytes of a copy of this worker's part."""
    is_exposed: bool
    """Whether the next node keeps a replica of it."""
    available_bytes: int = 0
    in_memory: bool = False
    """Whether the node's folder takes memory."""
    problem: str = ""
    """Why the node has no folder; then nothing else about it is known."""


def find_available_bytes(folder: Path) -> int:
    """Return the bytes that copies may take in `folder`, including those of the copies that are there already."""
    available_bytes = shutil.disk_usage(folder).free
    if is_memory_backed(folder):
        limit, available = read_cgroup_memory(Path("/")), psutil.virtual_memory().available
        available = available if limit is None else min(available, limit)
        available_bytes = min(available_bytes, int(MAX_FREE_MEMORY_FRACTION * available))
    present = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            present += path.stat().st_size
    return available_bytes + present


def explain_missing_space(needs: Sequence[CopyNeeds], node_map: NodeMap) -> str:
    """Return why copies do not fit on one of the nodes, given the needs of all workers by rank; "" if they fit."""
    for node in range(node_map.num_nodes):
        ranks = node_map.ranks_on(node)
        own = sum(needs[rank].size_bytes for rank in ranks)
        exposed = [rank for rank, each in enumerate(needs) if each.is_exposed]
        replica_bytes = sum(needs[rank].size_bytes for rank in exposed if node_map.replica_rank(rank) in ranks)
        available_bytes = min(needs[rank].available_bytes for rank in ranks)
        buffers = own if needs[ranks[0]].in_memory else 0
        needed = COPIES_PER_NODE * (own + replica_bytes) + buffers
        if needed > available_bytes:
            where = f"on node {node} " if node_map.num_nodes > 1 else ""
            return f"they need {format_bytes(needed)} {where}and may take {format_bytes(available_bytes)}"
    return ""


SendToReplica = Callable[[RankRecord, Bytes, threading.Event], None]
"""Sends a shard to the node that keeps its replica. Raises OSError on failure, and once the event is set."""


class NodeFolder:
    """The destination of one rank's shards in its node's folder.

    `epoch_token` names the epoch in the run's history. `before_write` is called in the background before anything is
    written. The workers of a node check free space together, before the first copy."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        epoch_token: str,
        before_write: Callable[[int], None],
        send_to_replica: SendToReplica | None = None,
    ):
        self.rank, self.epoch_token = rank, epoch_token
        self._folder, self._before_write, self._send_to_replica = folder, before_write, send_to_replica
        self.cpu_s = 0.0
        """Core seconds that the background work took for the last shard."""

    def check_space(self, nbytes: int) -> None:
        pass

    def shard_path(self, step: int) -> Path:
        return self._folder / format_copy_name(step, self.epoch_token) / rank_file_name(self.rank)

    def write(
        self, step: int, image: Bytes, file_spec: ShardFileSpec, meta: dict[str, Any], cancelled: threading.Event
    ) -> None:
        """Write the shard's file, then its record; then replicate both."""
        self._before_write(step)
        path = self.shard_path(step)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        chunks = write_with_checksums(path, image, cancelled)
        record = file_spec.make_record(chunks, step, self.epoch_token, self.rank, meta)
        write_record(path.parent, record)
        if self._send_to_replica is not None:
            self._send_to_replica(record, image, cancelled)
        self.cpu_s = time.thread_time()  # each save runs in a new thread

    def commit(self, step: int, meta: dict[str, Any]) -> tuple[Path, int]:
        """Return the copy's folder and the bytes of this rank's shard: a copy exists when all ranks have written."""
        path = self.shard_path(step)
        return path.parent, path.stat().st_size

    def remove_own(self, step: int) -> None:
        """Remove this rank's shard; the last rank of the node removes the copy's folder. What storage refuses to remove
        goes with the next copy, or with the node's folder."""
        path = self.shard_path(step)
        with suppress(OSError):
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            path.parent.rmdir()


class NodeCopies:
    """Copies of this worker's part of the state. Every worker makes it, and calls all methods but `leave`, at the same
    step. Copies of earlier attempts are valid up to `start_step`, from which training continued.

    Raises UsageError, on every worker, if the copies of the `state` do not fit or have no folder on one of the nodes,
    or if the history of copies cannot be written."""

    def __init__(self, save_context: SaveContext, state: Mapping[str, LocalTensor], start_step: int):
        self._run, self._dist_env = save_context.run, save_context.dist_env
        self._environment = save_context.environment
        self._mesh = save_context.mesh
        self._nodes = gather_node_map(self._dist_env, self._environment)
        self._holders = NodeHolders(self._mesh, self._nodes, self._dist_env.rank)
        self.owned = OwnedTensors(self._holders.position)
        self.owned.update(state)
        self.num_tensors = self._count_tensors(state)
        """Tensors of the whole state, over all workers."""
        folder, needs = self._agree_on_folder(state)
        self._copy_dir = folder
        sizes = [each.size_bytes for each in needs]
        self.total_bytes, self.max_rank_bytes = sum(sizes), max(sizes)
        """Bytes of a copy: over all workers, and of the worker with most."""
        self._peers = ReplicaPeers(self._dist_env, self._nodes)
        senders = [rank for rank, each in enumerate(needs) if each.is_exposed]
        if senders and (problem := self._peers.connect(folder, senders, self._environment)):
            text = f"in-memory checkpoints are not replicated, so a lost node costs a checkpoint interval: {problem}"
            save_context.report_event(RunWarning(text=text))
        self._newest_complete = ""  # name of the newest complete copy of this epoch
        client = self._peers.client
        self._node_folder = NodeFolder(
            folder, self._dist_env.rank, "", self._prune_before_write, None if client is None else client.send_shard
        )
        self.saver = CheckpointSaver(self._node_folder, save_context.staging)
        self._begin_epoch(start_step)

    @property
    def cpu_s(self) -> float:
        """Core seconds that the background work took for the last copy on this worker."""
        return self._node_folder.cpu_s + self._peers.cpu_s

    def update(self, state: Mapping[str, LocalTensor]) -> None:
        """Divide and count the tensors again if they have changed, before a copy."""
        if self.owned.update(state):
            self.num_tensors = self._count_tensors(state)

    def complete(self, step: int) -> None:
        """Record that all workers have written their part of the copy of this step."""
        self.saver.commit()
        self.saver.cancel()
        self._newest_complete = format_copy_name(step, self._node_folder.epoch_token)

    def roll_back(self, step: int) -> None:
        """Remove all copies, since training goes back to this step. No copy may be in flight. Raises UsageError, on
        every worker, if the history of copies cannot be written."""
        self._newest_complete = ""
        self._begin_epoch(step)
        if self._is_node_leader:
            prune_copies(self._copy_dir)

    def leave(self) -> None:
        """Abandon the copy in flight, if any, without waiting for other workers. Complete copies stay. No copy can
        start after it."""
        self._peers.shut_down()
        self.saver.cancel()
        self._peers.close()

    def remove_all(self) -> None:
        """Remove the node's folder, after `leave` on all workers."""
        if self._is_node_leader:
            remove_node_dir(self._run, self._environment)

    @property
    def _is_node_leader(self) -> bool:
        return self._nodes.is_node_leader(self._dist_env.rank)

    def _agree_on_folder(self, state: Mapping[str, LocalTensor]) -> tuple[Path, list[CopyNeeds]]:
        """Create the node's folder; return it and the needs of all workers. Raises UsageError, on every worker, if the
        copies do not fit."""
        folder = Path()
        own = CopyNeeds(self.owned.size_bytes, self._holders.is_exposed(state))
        try:
            folder = create_node_dir(self._run, self._environment)
            own = CopyNeeds(*own[:2], find_available_bytes(folder), is_memory_backed(folder))
        except (OSError, UsageError) as error:
            own = own._replace(problem=str(error))
        needs = [CopyNeeds(*each) for each in all_gather_json(self._dist_env, own)]
        problem = next((each.problem for each in needs if each.problem), "")
        if problem := problem or explain_missing_space(needs, self._nodes):
            raise UsageError(problem)
        return folder, needs

    def _count_tensors(self, state: Mapping[str, LocalTensor]) -> int:
        own = [
            name
            for name, each in state.items()
            if each.has_first_element and not any(self._mesh.coordinates[axis] for axis in each.replicated_axes)
        ]
        return len(set().union(*all_gather_json(self._dist_env, sorted(own))))

    def _begin_epoch(self, step: int) -> None:
        """Write a new epoch token to the run's history before any copy uses it. Raises UsageError, on every worker, if
        that fails."""
        token_and_error = [secrets.token_hex(8), ""]
        if self._dist_env.is_rank_zero:
            try:
                truncate_history(self._run, step)
                begin_epoch(self._run, token_and_error[0])
            except OSError as error:
                token_and_error[1] = str(error)
        self._node_folder.epoch_token, problem = broadcast_json_from_rank_zero(self._dist_env, token_and_error)
        if problem:
            self.leave()
            raise UsageError(problem)

    def _prune_before_write(self, step: int) -> None:
        """Remove old copies to free space. Called in the background before a shard is written."""
        if self._newest_complete and self._is_node_leader:
            prune_copies(self._copy_dir, (self._newest_complete, format_copy_name(step, self._node_folder.epoch_token)))


@dataclass(frozen=True)
class NodeHolders:
    """The workers that hold the same tensors as `rank`. A node keeps all that its workers hold, and those that hold the
    same tensors divide them."""

    mesh: Mesh
    nodes: NodeMap
    rank: int

    def position(self, axes: tuple[str, ...]) -> tuple[int, int]:
        """Return the index of `rank` among the holders on its node of tensors that are replicated along `axes`, and
        their number."""
        on_node = self._on_node(self._anywhere(axes))
        return on_node.index(self.rank), len(on_node)

    def is_exposed(self, state: Mapping[str, LocalTensor]) -> bool:
        """Return whether the node is the only one to hold some tensors of the `state`."""
        holders = [self._anywhere(axes) for axes in {each.replicated_axes for each in state.values()}]
        return self.nodes.num_nodes > 1 and any(self._on_node(each) == each for each in holders)

    def _anywhere(self, axes: tuple[str, ...]) -> list[int]:
        """Return the ranks that differ from this one along `axes` only."""
        own = self.mesh.coordinates
        fixed = [axis for axis in own if axis not in axes]
        coordinates = [rank_coordinates(self.mesh.parallelism, rank) for rank in range(self.mesh.parallelism.world)]
        return [rank for rank, theirs in enumerate(coordinates) if all(theirs[axis] == own[axis] for axis in fixed)]

    def _on_node(self, ranks: list[int]) -> list[int]:
        return [rank for rank in ranks if self.nodes.node_of_rank[rank] == self.nodes.node_of_rank[self.rank]]


def end_copies(save_context: SaveContext, copies: NodeCopies | None) -> None:
    """Remove all copies at the end of the run, also those of earlier attempts: a durable checkpoint replaces them.
    Every worker calls it."""
    dist_env = save_context.dist_env
    if copies is not None:
        copies.leave()
        all_gather_json(dist_env, None)  # after this no worker writes any more
        copies.remove_all()
    if dist_env.local_rank == 0:
        remove_node_dir(save_context.run, save_context.environment)
    if dist_env.is_rank_zero:
        try:
            delete_history(save_context.run)
        except OSError as error:  # the copies are removed, so a stale history does no harm
            if not is_storage_error(error):
                raise
