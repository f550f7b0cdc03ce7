"""Saving: a rank's part in a checkpoint, done in the background while training goes on.

    saver.start(step, pieces, meta)     after the optimizer's step; returns at once
    ... forward, backward ...           meanwhile a thread copies the snapshot
    saver.wait_copied()                 before the optimizer changes the tensors: the only wait
    ... more steps ...                  meanwhile the thread hashes, writes and fsyncs
    saver.poll()                        when it is `written` on every rank, one of them calls commit_async

How the ranks tell each other is the engine's business. One save is in flight at a time. When ranks are lost the others
may go on with it: whoever commits finds out whether these had done their part.
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
from phalanx.recipe.devices import kind_of
from phalanx.run.directory import sync
from phalanx.train.checkpoint.buffer import Bytes
from phalanx.train.checkpoint.format import (
    CHUNK,
    CorruptError,
    FileRecord,
    Share,
    checkpoint_name,
    list_checkpoints,
    rank_file,
    read_manifest,
)
from phalanx.train.checkpoint.publish import publish, sync_directory, temporary_name, write_synced
from phalanx.train.checkpoint.staging import Layout, Piece, Staging, lay_out

_BLOCK = 8 * CHUNK  # bytes of one write: long enough to keep a disk busy, short enough to fail early
_ALIGNMENT = 4096
_NICENESS = 10


class Phase(StrEnum):
    IDLE = "idle"
    WRITING = "writing"  # the snapshot is being copied, hashed, written
    WRITTEN = "written"  # this rank's file is on disk; the checkpoint does not exist yet
    COMMITTING = "committing"
    COMMITTED = "committed"  # the checkpoint exists (known to the rank that committed it only)
    FAILED = "failed"


@dataclass(frozen=True)
class SaveState:
    """How far a save is. `bytes` are this rank's when written, the checkpoint's when committed; `seconds` is the
    background's time since `start`."""

    phase: Phase
    step: int = 0
    reason: str = ""
    path: Path | None = None
    bytes: int = 0
    seconds: float = 0.0

    @property
    def busy(self) -> bool:
        return self.phase in (Phase.WRITING, Phase.COMMITTING)


def share_out(sizes: Mapping[str, int], world: int) -> list[list[str]]:
    """Which rank writes which of the tensors that every rank holds: for each rank their names, sorted. Balanced by
    bytes (the largest first, to the least loaded) and the same on every rank."""
    ranks: list[list[str]] = [[] for _ in range(world)]
    load = [(0, rank) for rank in range(world)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        total, rank = load[0]
        heapq.heapreplace(load, (total + sizes[name], rank))
        ranks[rank].append(name)
    return [sorted(names) for names in ranks]


class Saver:
    """One rank's saver of checkpoints into `directory`. `attempt`, the same on all ranks, keeps the temporary files of
    a process that was thought dead apart from ours."""

    def __init__(
        self, directory: Path, rank: int, world: int, attempt: int = 0, clock: Callable[[], float] = time.perf_counter
    ):
        self._directory = directory
        self._rank, self._world, self._attempt, self._clock = rank, world, attempt, clock
        self._file = rank_file(rank)
        self._layout_key: object = None
        self._layout = Layout(b"", (), {}, 0)
        self._staging: Staging | None = None
        self._has_room = False  # it was looked for
        self._copied = threading.Event()
        self._copied.set()
        self._given_up = threading.Event()
        self._job: Future[SaveState] | None = None
        self._state = SaveState(Phase.IDLE)
        self._meta: dict[str, Any] = {}
        self._began = 0.0
        self._left: set[int] = set()  # steps of which something is left that could not be removed

    def share(self, pieces: Sequence[Piece]) -> Share:
        """What a save of `pieces` would write; the hashes of its content are empty."""
        layout = self._laid_out(pieces)
        return self._written(layout, [""] * math.ceil(layout.nbytes / CHUNK))

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """Allocate the staging buffer before the first save; for a GPU's tensors in the background."""
        layout = self._laid_out(pieces)
        device = next((piece.tensor.device for piece in pieces if kind_of(piece.tensor.device.type).is_gpu), None)
        if self._staging is None or not self._staging.fits(layout.nbytes, device):
            self._staging = None  # let go of the old one first
            self._staging = Staging(layout.nbytes, device)

    def reserve(self, pieces: Sequence[Piece]) -> int:
        """Allocate the staging buffer and see that the disk has room, before training starts; return the bytes that
        this rank will write. `start` does it by itself when it was not done. UsageError when there is no room."""
        nbytes = self._laid_out(pieces).nbytes
        if not self._has_room:
            self._check_room(nbytes)
            self._has_room = True
        self.prepare(pieces)
        return nbytes

    @property
    def holds_up(self) -> bool:
        """Whether saves hold up the host, because the buffer could not be page-locked; known once one has begun."""
        return self._staging is not None and not self._staging.locked

    def start(self, step: int, pieces: Sequence[Piece], meta: dict[str, Any], eager: Collection[str] = ()) -> None:
        """Begin to save `pieces` as they are now. The tensors must not change before `wait_copied`, except those named
        in `eager` (buffers that forward changes): these are copied before this returns. `meta` is anything JSON can
        hold, the same on all ranks; `step` and `samples` belong into it. UsageError when there is no room; OSError
        when that cannot be known, because storage fails."""
        if self.poll().busy or self._state.phase is Phase.WRITTEN:
            raise RuntimeError(f"step {step}: the save of step {self._state.step} is neither committed nor given up")
        self._given_up.clear()
        self._began = self._clock()
        self.sweep()
        self.reserve(pieces)
        assert self._staging is not None
        self._meta, pieces = dict(meta), list(pieces)
        self._state = SaveState(Phase.WRITING, step)
        self._staging.begin(self._layout, pieces, eager)
        self._copied.clear()
        self._job = _in_background(partial(self._write, self._staging, self._layout, pieces, eager))

    def wait_copied(self) -> float:
        """Wait until the snapshot is taken; return the seconds waited. On a GPU only the GPU waits."""
        began = self._clock()
        self._copied.wait()
        if self._staging is not None:
            self._staging.order_after()
        return self._clock() - began

    def poll(self) -> SaveState:
        """How far the save is, at once. An error that is no fault of the disk is raised here."""
        if self._job is not None and self._job.done():
            self._state, self._job = self._job.result(), None
        return self._state

    def wait(self, seconds: float | None = None) -> SaveState:
        """`poll` when there is nothing left to wait for: written, committed, failed or idle; or after so long."""
        if self._job is not None:
            wait([self._job], seconds)
        return self.poll()

    def commit_async(self) -> None:
        """One rank, when every rank that is left has written: make the checkpoint in the background; `poll` tells when
        it stands. It fails where a lost rank's part is missing."""
        if self.poll().phase is not Phase.WRITTEN:
            raise RuntimeError(f"rank {self._rank} cannot commit a save that is {self._state.phase}")
        self._state = replace(self._state, phase=Phase.COMMITTING)
        self._job = _in_background(partial(self._commit, self._state.step, self._meta))

    def commit(self) -> SaveState:
        """`commit_async`, and wait: committed with the checkpoint's path, bytes, seconds, or failed with a reason."""
        self.commit_async()
        return self.wait()

    def abandon(self) -> None:
        """Give up the save in flight, if there is one, and remove what this rank wrote of it: what is not written yet
        never is. When a rank failed, all ranks call this."""
        self._given_up.set()
        state = self.wait()
        if state.phase in (Phase.WRITTEN, Phase.FAILED):
            self._remove_own(state.step)
        self._settle()

    def sweep(self) -> None:
        """Try again to remove what failing storage would not let go of. Call when nothing is in flight."""
        for step in sorted(self._left):
            if self._rank == 0:
                self._remove_all(step)
            else:
                self._remove_own(step)

    def _settle(self) -> None:
        self._state = SaveState(Phase.IDLE)

    def _laid_out(self, pieces: Sequence[Piece]) -> Layout:
        key = [(p.name, p.tensor.dtype, p.tensor.shape, p.shape, p.offset) for p in pieces]
        if key != self._layout_key:
            self._layout, self._layout_key = lay_out(pieces, self._file), key
        return self._layout

    def _final(self, step: int) -> Path:
        return self._directory / checkpoint_name(step)

    def _folder(self, step: int) -> Path:
        """Where ranks write."""
        return temporary_name(self._final(step), str(self._attempt))

    def _share(self, step: int, rank: int) -> Path:
        return self._folder(step) / f"rank-{rank:05d}.json"

    def _check_room(self, nbytes: int) -> None:
        copies = 1 if list_checkpoints(self._directory) else 2
        check_space(self._directory, nbytes * self._world, copies)

    def _write(self, staging: Staging, layout: Layout, pieces: list[Piece], eager: Collection[str]) -> SaveState:
        """The background thread's work: snapshot, then file, then this rank's share of the manifest."""
        try:
            staging.copy(layout, pieces, eager)
        finally:
            self._copied.set()
        staging.complete()
        pieces.clear()  # a model that was rebuilt meanwhile needs the memory of the one before
        step = self._state.step
        try:
            _step_aside()
            self._store(step, staging.image(layout), layout)
        except OSError as error:
            self._remove_own(step)
            return self._ended(Phase.FAILED, step, reason=_reason(error, self._folder(step) / self._file))
        return self._ended(Phase.WRITTEN, step, bytes=layout.nbytes)

    def _store(self, step: int, image: Bytes, layout: Layout) -> None:
        """Put the snapshot where it lasts. OSError when that fails."""
        share = self._share(step, self._rank)
        share.parent.mkdir(parents=True, exist_ok=True)
        share.unlink(missing_ok=True)
        chunks = write_image(share.parent / self._file, image, self._given_up)
        write_synced(share, self._written(layout, chunks).model_dump_json().encode())
        sync_directory(share.parent)

    def _written(self, layout: Layout, chunks: Sequence[str]) -> Share:
        files = {self._file: FileRecord(bytes=layout.nbytes, chunks=tuple(chunks))}
        return Share(files=files, tensors=layout.tensors)

    def _commit(self, step: int, meta: dict[str, Any]) -> SaveState:
        temporary, final = self._folder(step), self._final(step)
        try:
            if not _stands(temporary) and _bears(final, meta):  # the rank that was lost had come so far
                nbytes = sum(path.stat().st_size for path in final.iterdir())
                return self._ended(Phase.COMMITTED, step, path=final, bytes=nbytes)
            nbytes = publish(temporary, final, [self._share(step, rank) for rank in range(self._world)], meta)
        except OSError as error:
            self._remove_all(step)
            return self._ended(Phase.FAILED, step, reason=_reason(error, temporary))
        return self._ended(Phase.COMMITTED, step, path=final, bytes=nbytes)

    def _ended(self, phase: Phase, step: int, **facts: Any) -> SaveState:
        return SaveState(phase, step, seconds=self._clock() - self._began, **facts)

    def _remove_own(self, step: int) -> None:
        """Remove this rank's files; the last rank to do so removes the directory. What failing storage will not let go
        of is tried again before the next save and at the end, and is then left to `clean`."""
        share = self._share(step, self._rank)
        self._left.discard(step)
        try:
            share.unlink(missing_ok=True)
            (share.parent / self._file).unlink(missing_ok=True)
            share.parent.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):  # gone, or another rank is the last
                self._left.add(step)

    def _remove_all(self, step: int) -> None:
        """The rank that commits: remove what all ranks wrote of a save that is given up; see `_remove_own`."""
        self._left.discard(step)
        folder = self._folder(step)
        try:
            while _stands(folder):
                with suppress(FileNotFoundError):  # others remove their own meanwhile: there is less each time
                    shutil.rmtree(folder)
        except OSError:
            self._left.add(step)


def _stands(path: Path) -> bool:
    """Whether it is there. OSError where storage fails, of which `Path.exists` says that nothing is there."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def check_space(directory: Path, nbytes: int, copies: int) -> None:
    """UsageError unless the file system of `directory`, which need not exist, has room for `copies` checkpoints."""
    place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < nbytes * copies:
        beside = ", and each is written before the one before it is removed" if copies > 1 else ""
        raise UsageError(
            f"{directory}: no room: a checkpoint takes {nbytes / 1e6:,.1f} MB{beside}; {free / 1e6:,.1f} MB are free, "
            f"so {(nbytes * copies - free) / 1e6:,.1f} MB more are needed there"
        )


def write_image(path: Path, image: Bytes, given_up: threading.Event | None = None) -> list[str]:
    """Write the bytes to a file, fsync it, and return the xxh3 of each chunk. OSError once it is `given_up`.

    Where the file system can, the bytes go to the disk without a copy into the page cache: that spares training a
    quarter of a core and a second gigabyte for every gigabyte saved.
    """
    chunks: list[str] = []
    content = image.data
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        direct = _bypass_cache(fd, True)
        for start in range(0, len(content), _BLOCK):
            if given_up is not None and given_up.is_set():
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED), str(path))
            block = content[start : start + _BLOCK]
            chunks += (xxhash.xxh3_64_hexdigest(block[i : i + CHUNK]) for i in range(0, len(block), CHUNK))
            while block:
                if direct and len(block) % _ALIGNMENT:
                    direct = _bypass_cache(fd, False)  # the last block, or the rest of a short write
                try:
                    written = os.write(fd, block)
                except OSError as error:
                    if not direct or error.errno != errno.EINVAL:
                        raise
                    direct = _bypass_cache(fd, False)
                    continue
                block = block[written:]
        sync(fd)
    finally:
        os.close(fd)
    return chunks


def _bypass_cache(fd: int, wanted: bool) -> bool:
    """Switch direct I/O on or off; return whether it is on."""
    if not hasattr(os, "O_DIRECT"):
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | (os.O_DIRECT if wanted else 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False  # this file system has no direct I/O
    return wanted


def _in_background(work: Callable[[], SaveState]) -> "Future[SaveState]":
    """Run `work` in a thread of its own, new each time because a thread that gave way cannot take it back."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future


def _step_aside() -> None:
    """Let training go first from here on: on Linux a thread has its own niceness."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _bears(path: Path, meta: dict[str, Any]) -> bool:
    """Whether a checkpoint is there, whole as far as its manifest tells, and this is its meta."""
    try:
        return read_manifest(path).meta == meta
    except CorruptError:
        return False


def _reason(error: OSError, path: Path) -> str:
    return f"{error.filename or path}: {error.strerror or error}"
