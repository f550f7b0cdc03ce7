"""Save one rank's shards of a checkpoint, in the background while training continues.

    saver.start(step, shards, meta)     after the optimizer step; returns at once
    ... forward, backward ...           meanwhile a thread copies the snapshot
    saver.wait_snapshot_copied()        before the optimizer changes the tensors: the only wait
    ... more steps ...                  meanwhile the thread hashes, writes and fsyncs
    saver.poll()                        when it is `written` on every rank, one of them calls commit_async

The caller exchanges the state of the save between ranks. One save is in flight at a time. When ranks are lost during a
save, the other ranks may continue it: the commit checks that the lost ranks had written their shards.
"""

import errno
import fcntl
import heapq
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from phalanx.errors import UsageError
from phalanx.formatting import format_bytes
from phalanx.recipe.devices import device_kind_of
from phalanx.run.directory import fsync_if_supported
from phalanx.train.checkpoint.commit import commit_checkpoint, make_temporary_path, sync_directory, write_synced
from phalanx.train.checkpoint.format import (
    CHUNK_BYTES,
    CorruptCheckpointError,
    FileRecord,
    RankManifest,
    format_checkpoint_name,
    list_checkpoints,
    rank_file_name,
    read_manifest,
)
from phalanx.train.checkpoint.pinned_buffer import Bytes
from phalanx.train.checkpoint.staging import ShardFileSpec, StagingBuffer, TensorShard, plan_shard_file

_WRITE_BLOCK_BYTES = 8 * CHUNK_BYTES  # bytes of one write: large enough to keep a disk busy, small enough to fail early
_DIRECT_IO_ALIGNMENT_BYTES = 4096
_WRITER_NICENESS = 10


class SavePhase(StrEnum):
    IDLE = "idle"
    WRITING = "writing"  # the snapshot is being copied, hashed, written
    WRITTEN = "written"  # this rank's file is on disk; the checkpoint does not exist yet
    COMMITTING = "committing"
    COMMITTED = "committed"  # the checkpoint exists (known to the rank that committed it only)
    FAILED = "failed"


@dataclass(frozen=True)
class SaveStatus:
    """Progress of a save. `size_bytes` is this rank's when written, the checkpoint's when committed; `seconds` is the
    time of the background work since `start`."""

    phase: SavePhase
    step: int = 0
    reason: str = ""
    path: Path | None = None
    size_bytes: int = 0
    duration_s: float = 0.0

    @property
    def is_busy(self) -> bool:
        return self.phase in (SavePhase.WRITING, SavePhase.COMMITTING)


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
    """Save the shards of one rank to `directory`. `attempt`, the same on all ranks, separates our temporary files from
    those of an earlier process that is not dead yet."""

    def __init__(
        self,
        directory: Path,
        rank: int,
        world_size: int,
        attempt: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._directory = directory
        self._rank, self._world_size, self._attempt, self._clock = rank, world_size, attempt, clock
        self._file = rank_file_name(rank)
        self._file_spec_key: object = None
        self._file_spec = ShardFileSpec(b"", (), {}, 0)
        self._staging: StagingBuffer | None = None
        self._space_checked = False  # whether free disk space was checked
        self._copied = threading.Event()
        self._copied.set()
        self._cancelled = threading.Event()
        self._job: Future[SaveStatus] | None = None
        self._status = SaveStatus(SavePhase.IDLE)
        self._meta: dict[str, Any] = {}
        self._start_time = 0.0
        self._steps_to_clean: set[int] = set()  # steps with files that could not be removed yet

    def share(self, pieces: Sequence[TensorShard]) -> RankManifest:
        """Return the manifest that a save of `pieces` would write, without content hashes."""
        layout = self._get_file_spec(pieces)
        return self._written(layout, [""] * math.ceil(layout.nbytes / CHUNK_BYTES))

    def allocate_buffer(self, shards: Sequence[TensorShard]) -> None:
        """Allocate the staging buffer before the first save; for tensors on a GPU, in the background."""
        file_spec = self._get_file_spec(shards)
        device = next(
            (shard.tensor.device for shard in shards if device_kind_of(shard.tensor.device.type).is_gpu), None
        )
        if self._staging is None or not self._staging.fits_bytes(file_spec.nbytes, device):
            self._staging = None  # free the old one first
            self._staging = StagingBuffer(file_spec.nbytes, device)

    def reserve_space(self, shards: Sequence[TensorShard]) -> int:
        """Allocate the staging buffer and check free disk space before training starts; return the bytes that this rank
        will write. `start` does this automatically if it was not called. Raises UsageError if the disk is too full."""
        nbytes = self._get_file_spec(shards).nbytes
        if not self._space_checked:
            self._check_free_space(nbytes)
            self._space_checked = True
        self.allocate_buffer(shards)
        return nbytes

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
        should hold `step` and `samples`. Raises UsageError if the disk is too full, OSError if storage fails when this
        is checked."""
        if self.poll().is_busy or self._status.phase is SavePhase.WRITTEN:
            raise RuntimeError(f"step {step}: the save of step {self._status.step} is neither committed nor given up")
        self._cancelled.clear()
        self._start_time = self._clock()
        self.retry_cleanup()
        self.reserve_space(shards)
        assert self._staging is not None
        self._meta, shards = dict(meta), list(shards)
        self._status = SaveStatus(SavePhase.WRITING, step)
        self._staging.start_copy(self._file_spec, shards, copy_now)
        self._copied.clear()
        self._job = _run_in_background(partial(self._copy_and_write, self._staging, self._file_spec, shards, copy_now))

    def wait_snapshot_copied(self) -> float:
        """Wait until the snapshot is copied; return the seconds waited. On a GPU only the GPU stream waits."""
        start_time = self._clock()
        self._copied.wait()
        if self._staging is not None:
            self._staging.make_stream_wait()
        return self._clock() - start_time

    def poll(self) -> SaveStatus:
        """Return the progress of the save without waiting. An error that storage did not cause is raised here."""
        if self._job is not None and self._job.done():
            self._status, self._job = self._job.result(), None
        return self._status

    def poll_when_idle(self, timeout_s: float | None = None) -> SaveStatus:
        """Wait, at most `timeout_s`, until the save is written, committed, failed or idle; then `poll`."""
        if self._job is not None:
            wait([self._job], timeout_s)
        return self.poll()

    def commit_async(self) -> None:
        """Create the checkpoint in the background; `poll` returns the result. Call it on one rank, when every surviving
        rank has written. It fails if the shards of a lost rank are missing."""
        if self.poll().phase is not SavePhase.WRITTEN:
            raise RuntimeError(f"rank {self._rank} cannot commit a save that is {self._status.phase}")
        self._status = replace(self._status, phase=SavePhase.COMMITTING)
        self._job = _run_in_background(partial(self._commit, self._status.step, self._meta))

    def commit(self) -> SaveStatus:
        """Call `commit_async` and wait; return the committed status with path, bytes and seconds, or a failed one."""
        self.commit_async()
        return self.poll_when_idle()

    def cancel(self) -> None:
        """Abandon the save in flight, if any, and remove the files that this rank wrote; nothing more is written. When
        one rank fails, all ranks call this."""
        self._cancelled.set()
        state = self.poll_when_idle()
        if state.phase in (SavePhase.WRITTEN, SavePhase.FAILED):
            self._remove_own(state.step)
        self._reset()

    def retry_cleanup(self) -> None:
        """Retry the removal of files that storage refused to remove. Call it when no save is in flight."""
        for step in sorted(self._steps_to_clean):
            if self._rank == 0:
                self._remove_all(step)
            else:
                self._remove_own(step)

    def _reset(self) -> None:
        self._status = SaveStatus(SavePhase.IDLE)

    def _get_file_spec(self, shards: Sequence[TensorShard]) -> ShardFileSpec:
        key = [(p.name, p.tensor.dtype, p.tensor.shape, p.shape, p.offset) for p in shards]
        if key != self._file_spec_key:
            self._file_spec, self._file_spec_key = plan_shard_file(shards, self._file), key
        return self._file_spec

    def _final_path(self, step: int) -> Path:
        return self._directory / format_checkpoint_name(step)

    def _write_dir(self, step: int) -> Path:
        """Return the directory that ranks write to."""
        return make_temporary_path(self._final_path(step), str(self._attempt))

    def _rank_manifest_path(self, step: int, rank: int) -> Path:
        return self._write_dir(step) / f"rank-{rank:05d}.json"

    def _check_free_space(self, nbytes: int) -> None:
        copies = 1 if list_checkpoints(self._directory) else 2
        check_free_space(self._directory, nbytes * self._world_size, copies)

    def _copy_and_write(
        self, staging: StagingBuffer, file_spec: ShardFileSpec, shards: list[TensorShard], copy_now: Collection[str]
    ) -> SaveStatus:
        """Copy the snapshot, write the file, then write this rank's manifest. Runs on the background thread."""
        try:
            staging.copy_from_cpu(file_spec, shards, copy_now)
        finally:
            self._copied.set()
        staging.wait_gpu_copies()
        shards.clear()  # the caller may rebuild the model meanwhile and needs the memory of the old one
        step = self._status.step
        try:
            _lower_thread_priority()
            self._write_durably(step, staging.file_bytes(file_spec), file_spec)
        except OSError as error:
            self._remove_own(step)
            return self._make_status(
                SavePhase.FAILED, step, reason=_describe_error(error, self._write_dir(step) / self._file)
            )
        return self._make_status(SavePhase.WRITTEN, step, size_bytes=file_spec.nbytes)

    def _write_durably(self, step: int, image: Bytes, file_spec: ShardFileSpec) -> None:
        """Write the snapshot durably. Raises OSError on failure."""
        rank_manifest_path = self._rank_manifest_path(step, self._rank)
        rank_manifest_path.parent.mkdir(parents=True, exist_ok=True)
        rank_manifest_path.unlink(missing_ok=True)
        chunks = write_with_checksums(rank_manifest_path.parent / self._file, image, self._cancelled)
        write_synced(rank_manifest_path, self._written(file_spec, chunks).model_dump_json().encode())
        sync_directory(rank_manifest_path.parent)

    def _written(self, layout: ShardFileSpec, chunks: Sequence[str]) -> RankManifest:
        files = {self._file: FileRecord(bytes=layout.nbytes, chunks=tuple(chunks))}
        return RankManifest(files=files, tensors=layout.tensors)

    def _commit(self, step: int, meta: dict[str, Any]) -> SaveStatus:
        temporary, final = self._write_dir(step), self._final_path(step)
        try:
            if not _path_exists(temporary) and _has_meta(final, meta):  # the lost rank had already committed
                nbytes = sum(path.stat().st_size for path in final.iterdir())
                return self._make_status(SavePhase.COMMITTED, step, path=final, size_bytes=nbytes)
            nbytes = commit_checkpoint(
                temporary, final, [self._rank_manifest_path(step, rank) for rank in range(self._world_size)], meta
            )
        except OSError as error:
            self._remove_all(step)
            return self._make_status(SavePhase.FAILED, step, reason=_describe_error(error, temporary))
        return self._make_status(SavePhase.COMMITTED, step, path=final, size_bytes=nbytes)

    def _make_status(self, phase: SavePhase, step: int, **facts: Any) -> SaveStatus:
        return SaveStatus(phase, step, duration_s=self._clock() - self._start_time, **facts)

    def _remove_own(self, step: int) -> None:
        """Remove this rank's files; the last rank removes the directory. If storage refuses, the removal is retried
        before the next save and at the end; then it is left to `clean_checkpoint_dir`."""
        rank_manifest_path = self._rank_manifest_path(step, self._rank)
        self._steps_to_clean.discard(step)
        try:
            rank_manifest_path.unlink(missing_ok=True)
            (rank_manifest_path.parent / self._file).unlink(missing_ok=True)
            rank_manifest_path.parent.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):  # removed already, or other ranks still have files
                self._steps_to_clean.add(step)

    def _remove_all(self, step: int) -> None:
        """Remove what all ranks wrote of an abandoned save, on the rank that commits; see `_remove_own`."""
        self._steps_to_clean.discard(step)
        folder = self._write_dir(step)
        try:
            while _path_exists(folder):
                with suppress(FileNotFoundError):  # other ranks remove their files at the same time
                    shutil.rmtree(folder)
        except OSError:
            self._steps_to_clean.add(step)


def _path_exists(path: Path) -> bool:
    """Return whether a path exists. Raises OSError if storage fails, for which `Path.exists` returns False."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def check_free_space(directory: Path, nbytes: int, copies: int) -> None:
    """Raise UsageError unless there is space for `copies` checkpoints in `directory`, which need not exist."""
    existing_parent = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing_parent).free
    if free < nbytes * copies:
        note = ", and each is written before the one before it is removed" if copies > 1 else ""
        raise UsageError(
            f"{directory}: no space: a checkpoint takes {format_bytes(nbytes)}{note}; {format_bytes(free)} are free, "
            f"so {format_bytes(nbytes * copies - free)} more are needed there"
        )


def write_with_checksums(path: Path, image: Bytes, cancelled: threading.Event | None = None) -> list[str]:
    """Write the bytes to a file, fsync it, and return the xxh3 of each chunk. Raises OSError once `cancelled` is set.

    Direct I/O is used where the file system supports it, which bypasses the page cache: it saves training 25 % of a
    core and 1 GB of memory per GB saved.
    """
    chunks: list[str] = []
    content = image.data
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        direct = _set_direct_io(fd, True)
        for start in range(0, len(content), _WRITE_BLOCK_BYTES):
            if cancelled is not None and cancelled.is_set():
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED), str(path))
            block = content[start : start + _WRITE_BLOCK_BYTES]
            chunks += (xxhash.xxh3_64_hexdigest(block[i : i + CHUNK_BYTES]) for i in range(0, len(block), CHUNK_BYTES))
            while block:
                if direct and len(block) % _DIRECT_IO_ALIGNMENT_BYTES:
                    direct = _set_direct_io(fd, False)  # the last block, or the remainder of a short write
                try:
                    written = os.write(fd, block)
                except OSError as error:
                    if not direct or error.errno != errno.EINVAL:
                        raise
                    direct = _set_direct_io(fd, False)
                    continue
                block = block[written:]
        fsync_if_supported(fd)
    finally:
        os.close(fd)
    return chunks


def _set_direct_io(fd: int, wanted: bool) -> bool:
    """Switch direct I/O on or off; return whether it is on."""
    if not hasattr(os, "O_DIRECT"):
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | (os.O_DIRECT if wanted else 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False  # this file system does not support direct I/O
    return wanted


def _run_in_background(work: Callable[[], SaveStatus]) -> "Future[SaveStatus]":
    """Run `work` in a new thread. Threads are not reused: one that has lowered its priority cannot raise it again."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future


def _lower_thread_priority() -> None:
    """Lower this thread's priority below training's; on Linux each thread has its own niceness."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WRITER_NICENESS)


def _has_meta(path: Path, meta: dict[str, Any]) -> bool:
    """Return whether `path` is a checkpoint with a valid manifest and this `meta`."""
    try:
        return read_manifest(path).meta == meta
    except CorruptCheckpointError:
        return False


def _describe_error(error: OSError, path: Path) -> str:
    return f"{error.filename or path}: {error.strerror or error}"
