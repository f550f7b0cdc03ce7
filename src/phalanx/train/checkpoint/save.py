"""Save one rank's shards of a checkpoint to a destination, in the background while training continues.

    saver.start(step, shards, meta)     after the optimizer step; returns at once
    ... forward, backward ...           meanwhile a thread copies the snapshot
    saver.wait_snapshot_copied()        before the optimizer changes the tensors: the only wait
    ... more steps ...                  meanwhile the thread writes to the destination
    saver.poll()                        when it is `written` on every rank, one of them calls commit_async

The caller exchanges the state of the save between ranks. One save is in flight at a time. When ranks are lost during a
save, the other ranks may continue it: the commit checks that the lost ranks had written their shards.
"""

import heapq
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ValidationError

from phalanx.errors import UsageError
from phalanx.recipe.devices import device_kind_of
from phalanx.run import Run
from phalanx.run.events import ReportEventFn
from phalanx.storage.url import StoreUrl
from phalanx.train.checkpoint.format import CHUNK_BYTES, Bytes, RankManifest, merge_rank_manifests, rank_file_name
from phalanx.train.checkpoint.shard_file import (
    ShardFileSpec,
    SharedStaging,
    StagingBuffer,
    TensorShard,
    plan_shard_file,
)
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.mesh import Mesh
from phalanx.train.distributed.object_collectives import (
    broadcast_json_from_rank_zero,
    format_dtype,
    recv_json,
    send_json,
)
from phalanx.train.distributed.parallel_model import LocalTensor

_WRITER_NICENESS = 10


class Destination(Protocol):
    """Where saves put the shards of `rank`: durable storage, or memory. Methods raise OSError if storage fails."""

    @property
    def rank(self) -> int: ...

    def check_space(self, nbytes: int) -> None:
        """Check, before a save, that `nbytes` from this rank fit. Raises UsageError if they do not."""

    def shard_path(self, step: int) -> Path | StoreUrl:
        """Return the path of the file that `write` writes."""

    def write(
        self, step: int, image: Bytes, file_spec: ShardFileSpec, meta: dict[str, Any], cancelled: threading.Event
    ) -> None:
        """Store the file's bytes `image`, then the record that makes them valid. Raises OSError when `cancelled`."""

    def commit(self, step: int, meta: dict[str, Any]) -> tuple[Path | StoreUrl, int]:
        """Make a checkpoint of what all ranks wrote; return its path and bytes."""

    def remove_own(self, step: int) -> None:
        """Remove what this rank wrote of a save that is abandoned."""


class SavePhase(StrEnum):
    IDLE = "idle"
    WRITING = "writing"  # the snapshot is being copied, hashed, written
    WRITTEN = "written"  # this rank's file is on disk; the checkpoint does not exist yet
    COMMITTING = "committing"
    COMMITTED = "committed"  # the checkpoint exists (known to the rank that committed it only)
    FAILED = "failed"


@dataclass(frozen=True)
class SaveStatus:
    """Progress of a save. `size_bytes` is this rank's when written, the checkpoint's when committed; `duration_s` is
    the time of the background work since `start`."""

    phase: SavePhase
    step: int = 0
    reason: str = ""
    path: Path | StoreUrl | None = None
    size_bytes: int = 0
    duration_s: float = 0.0


def assign_to_ranks(sizes: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """Assign tensors that every rank holds to the ranks that write them; return sorted names for each rank. Balanced by
    bytes (largest first, to the least loaded rank) and equal on every rank."""
    ranks: list[list[str]] = [[] for _ in range(num_ranks)]
    load = [(0, rank) for rank in range(num_ranks)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        total, rank = load[0]
        heapq.heapreplace(load, (total + sizes[name], rank))
        ranks[rank].append(name)
    return [sorted(names) for names in ranks]


class CheckpointSaver:
    """Save the shards of one rank to a destination.

    Savers of one worker share `shared_staging`: while one has a save in flight, the others must not start one."""

    def __init__(self, destination: Destination, shared_staging: SharedStaging | None = None):
        self._destination = destination
        self._shared_staging = shared_staging or SharedStaging()
        self._file_spec_key: object = None
        self._file_spec = ShardFileSpec("", b"", (), {}, 0)
        self._staging: StagingBuffer | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._cancelled = threading.Event()
        self._job: Future[SaveStatus] | None = None
        self._status = SaveStatus(SavePhase.IDLE)
        self._meta: dict[str, Any] = {}
        self._start_time = 0.0
        self._must_wait = False  # whether the snapshot may still be being copied
        self.stall_s = 0.0
        """Seconds that the last save kept the caller waiting."""

    def share(self, shards: Sequence[TensorShard]) -> RankManifest:
        """Return the manifest that a save of `shards` would write, without content hashes."""
        file_spec = self._get_file_spec(shards)
        return file_spec.make_manifest([""] * math.ceil(file_spec.nbytes / CHUNK_BYTES))

    def allocate_buffer(self, shards: Sequence[TensorShard]) -> None:
        """Allocate the staging buffer before the first save; for tensors on a GPU, in the background."""
        self._shared_staging.reserve(self._get_file_spec(shards).nbytes, _find_gpu(shards))

    @property
    def blocks_training(self) -> bool:
        """Whether saves block the host because the buffer could not be page-locked; known once a save has started."""
        return self._staging is not None and not self._staging.is_pinned

    def start(
        self, step: int, shards: Sequence[TensorShard], meta: dict[str, Any], copy_now: Collection[str] = ()
    ) -> None:
        """Start a save of `shards` as they are now.

        The tensors must not change before `wait_snapshot_copied`, except those named in `copy_now` (buffers that
        forward changes), which are copied before this returns. `meta` is any JSON value, the same on all ranks; it
        should hold `step` and `samples`. Raises UsageError if there is too little space, OSError if storage fails when
        this is checked."""
        if self.poll().phase in (SavePhase.WRITING, SavePhase.WRITTEN, SavePhase.COMMITTING):
            raise RuntimeError(f"step {step}: the save of step {self._status.step} is neither committed nor given up")
        self._cancelled.clear()
        self._start_time = time.perf_counter()
        nbytes = self._get_file_spec(shards).nbytes
        self._destination.check_space(nbytes)
        self._staging = staging = self._shared_staging.take(nbytes, _find_gpu(shards))
        self._meta, shards = dict(meta), list(shards)
        self._status = SaveStatus(SavePhase.WRITING, step)
        staging.start_copy(self._file_spec, shards, copy_now)
        self._copied.clear()
        self._job = _run_in_background(partial(self._copy_and_write, staging, self._file_spec, shards, copy_now))
        self._must_wait, self.stall_s = True, time.perf_counter() - self._start_time

    def wait_snapshot_copied(self) -> None:
        """Wait until the snapshot, if one is being taken, is copied. On a GPU only the GPU stream waits."""
        if self._must_wait:
            start_time = time.perf_counter()
            self._copied.wait()
            assert self._staging is not None
            self._staging.make_stream_wait()
            self._must_wait = False
            self.stall_s += time.perf_counter() - start_time

    def poll(self) -> SaveStatus:
        """Return the progress of the save without waiting. An error that storage did not cause is raised here."""
        if self._job is not None and self._job.done():
            self._status, self._job = self._job.result(), None
        return self._status

    def poll_when_idle(self) -> SaveStatus:
        """Wait until the save is written, committed, failed or idle; then `poll`."""
        if self._job is not None:
            wait([self._job])
        return self.poll()

    def commit_async(self) -> None:
        """Create the checkpoint in the background; `poll` returns the result. Call it on one rank, when every rank has
        written."""
        if self.poll().phase is not SavePhase.WRITTEN:
            raise RuntimeError(f"rank {self._destination.rank} cannot commit a save that is {self._status.phase}")
        self._status = replace(self._status, phase=SavePhase.COMMITTING)
        self._job = _run_in_background(partial(self._commit, self._status.step, self._meta))

    def commit(self) -> SaveStatus:
        """Call `commit_async` and wait; return the committed status with path, bytes and seconds, or a failed one."""
        self.commit_async()
        return self.poll_when_idle()

    def complete(self) -> None:
        """Forget the save in flight, which was committed on one rank."""
        self._status, self._must_wait = SaveStatus(SavePhase.IDLE), False

    def cancel(self) -> None:
        """Abandon the save in flight, if any, and remove the files that this rank wrote; nothing more is written. When
        one rank fails, all ranks call this."""
        self._cancelled.set()
        state = self.poll_when_idle()
        if state.phase in (SavePhase.WRITTEN, SavePhase.FAILED):
            self._destination.remove_own(state.step)
        self.complete()

    def _get_file_spec(self, shards: Sequence[TensorShard]) -> ShardFileSpec:
        key = [(p.name, p.tensor.dtype, p.tensor.shape, p.shape, p.offset, p.is_frozen) for p in shards]
        if key != self._file_spec_key:
            self._file_spec, self._file_spec_key = plan_shard_file(shards, rank_file_name(self._destination.rank)), key
        return self._file_spec

    def _copy_and_write(
        self, staging: StagingBuffer, file_spec: ShardFileSpec, shards: list[TensorShard], copy_now: Collection[str]
    ) -> SaveStatus:
        """Copy the snapshot, then write it to the destination. Runs on the background thread."""
        try:
            staging.copy_from_cpu(file_spec, shards, copy_now)
        finally:
            self._copied.set()
        staging.wait_gpu_copies()
        shards.clear()  # frees before the long write what only this save holds
        step, destination = self._status.step, self._destination
        try:
            lower_thread_priority()
            destination.write(step, staging.bytes[: file_spec.nbytes], file_spec, self._meta, self._cancelled)
        except OSError as error:
            destination.remove_own(step)
            reason = _describe_error(error, destination.shard_path(step))
            return self._make_status(SavePhase.FAILED, step, reason=reason)
        return self._make_status(SavePhase.WRITTEN, step, size_bytes=file_spec.nbytes)

    def _commit(self, step: int, meta: dict[str, Any]) -> SaveStatus:
        try:
            path, nbytes = self._destination.commit(step, meta)
        except OSError as error:
            where = self._destination.shard_path(step).parent
            return self._make_status(SavePhase.FAILED, step, reason=_describe_error(error, where))
        return self._make_status(SavePhase.COMMITTED, step, path=path, size_bytes=nbytes)

    def _make_status(self, phase: SavePhase, step: int, **facts: Any) -> SaveStatus:
        return SaveStatus(phase, step, duration_s=time.perf_counter() - self._start_time, **facts)


@dataclass
class SaveInFlight:
    """A worker's part in the save in flight: at most one at a time, of the same step and to the same destination on all
    workers. `in_memory`: to the memory of the nodes, and not to disk. `best_loss`: the validation loss, if this state
    is the best so far. `failure`: why the save failed, if this worker knows, else ""."""

    step: int
    saver: CheckpointSaver
    in_memory: bool = False
    best_loss: float | None = None
    failure: str = ""

    def local_flags(self) -> tuple[bool, bool, bool]:
        """Return whether this worker has written its part, has failed, and has committed."""
        status = self.saver.poll()
        if status.phase is SavePhase.FAILED:
            self.failure = status.reason
        return (status.phase is SavePhase.WRITTEN, bool(self.failure), status.phase is SavePhase.COMMITTED)


def _find_gpu(shards: Sequence[TensorShard]) -> torch.device | None:
    """Return the GPU that holds tensors of the shards, if any."""
    devices = (shard.tensor.device for shard in shards)
    return next((device for device in devices if device_kind_of(device.type).is_gpu), None)


def _run_in_background(work: Callable[[], SaveStatus]) -> "Future[SaveStatus]":
    """Run `work` in a new thread. Threads are not reused: one that has lowered its priority cannot raise it again."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future


def lower_thread_priority() -> None:
    """Lower this thread's priority below training's; on Linux each thread has its own niceness."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WRITER_NICENESS)


def _describe_error(error: OSError, path: Path | StoreUrl) -> str:
    return f"{error.filename or path}: {error.strerror or error}"


@dataclass(frozen=True)
class SaveContext:
    """Where one worker saves its part of the state, and how it reports.

    `common_meta`: entries of the meta that are equal in all checkpoints of a run. `report_event` receives events on
    every worker; RunWarning on rank 0 only. `flush` sends the events reported so far: a run that dies resumes from the
    last commit, so the events of the steps before it must have been sent. `environment` names the folder of in-memory
    checkpoints, the node, and the network for replicas. All saves copy their snapshots to `staging`. `record_progress`
    is called now and then while a worker waits for the last upload."""

    run: Run
    dist_env: DistEnv
    mesh: Mesh
    common_meta: dict[str, Any]
    report_event: ReportEventFn
    flush: Callable[[], None] = lambda: None
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    staging: SharedStaging = field(default_factory=SharedStaging)
    record_progress: Callable[[], None] = lambda: None


PositionFn = Callable[[tuple[str, ...]], tuple[int, int]]
"""Returns, for tensors that are replicated along these axes, this worker's index among the workers that divide them,
and their number."""


class OwnedTensors:
    """The tensors that this worker saves of those it holds."""

    def __init__(self, position: PositionFn):
        self._position = position
        self._sizes: dict[str, int] = {}
        self.names: set[str] = set()

    @property
    def size_bytes(self) -> int:
        return sum(self._sizes[name] for name in self.names)

    def update(self, state: Mapping[str, LocalTensor]) -> bool:
        """Divide the tensors again if their names or sizes have changed, as when an optimizer gets its state at its
        first update. Return whether they have; it is the same on every worker."""
        sizes = {name: each.tensor.numel() * each.tensor.element_size() for name, each in state.items()}
        if sizes == self._sizes:
            return False
        self._sizes, self.names = sizes, set()
        for axes in {each.replicated_axes for each in state.values()}:
            divided = {name: sizes[name] for name, each in state.items() if each.replicated_axes == axes}
            index, count = self._position(axes)
            self.names.update(assign_to_ranks(divided, count)[index])
        return True

    def select(self, names: Iterable[str]) -> list[str]:
        """Return those of the names that this worker saves."""
        return [name for name in names if name in self.names]

    def make_shards(self, state: Mapping[str, LocalTensor]) -> list[TensorShard]:
        """Return the blocks that this worker saves, by name."""
        shards = []
        for name in sorted(self.names):
            held, shape = state[name], state[name].global_blocks.global_shape
            for block in held.global_blocks.blocks:
                part = block.slice_local(held.tensor)
                shards.append(TensorShard(name, part, shape, block.global_offset, held.is_frozen))
        return shards


class _Claim(BaseModel):
    """What one worker holds (dtype and shape of each logical tensor), and what it would save of it."""

    held: dict[str, str]
    share: RankManifest


def check_all_saved(dist_env: DistEnv, step: int, state: Mapping[str, LocalTensor], share: RankManifest) -> None:
    """Check that the workers, of which each would save its `share` of the `state` that it holds, save everything once:
    a user's optimizer or module may hold different state on each worker. Every worker calls it, after an update. Raises
    UsageError on every worker if they do not."""
    held = {
        name: f"{format_dtype(each.tensor.dtype)}{list(each.global_blocks.global_shape)}"
        for name, each in state.items()
    }
    claim = _Claim(held=held, share=share)
    if not dist_env.is_rank_zero:
        send_json(0, claim.model_dump(mode="json"), None)
    problem = _find_problem(claim, dist_env.world_size) if dist_env.is_rank_zero else None
    if dist_env.world_size > 1:
        problem = broadcast_json_from_rank_zero(dist_env, problem)
    if problem:
        raise UsageError(
            f"step {step}: a checkpoint would not hold the state of all workers: {problem}; let the model and the "
            "optimizer hold tensors of the same names, shapes and dtypes on every worker"
        )


def _find_problem(claim: _Claim, world_size: int) -> str:
    """Return, on rank 0, what is wrong with the state that all workers would save; "" if nothing is."""
    others = (_Claim.model_validate(recv_json(rank, None)) for rank in range(1, world_size))
    claims = [claim, *others]
    first: dict[str, tuple[int, str]] = {}
    for rank, each in enumerate(claims):
        for name, what in each.held.items():
            before, known = first.setdefault(name, (rank, what))
            if known != what:
                return f"{name} is {known} on worker {before} and {what} on worker {rank}"
    try:
        left = first.keys() - merge_rank_manifests((each.share for each in claims), {}).tensors.keys()
    except ValueError as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    else:
        if not left:
            return ""
        problem = f"no worker would save {min(left)}"
    if lone := sorted(name for name in first if sum(name in each.held for each in claims) == 1):
        problem += f", and one worker alone holds {lone[0]}"
    return problem
