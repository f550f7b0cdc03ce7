"""Checkpoints below a URL: files as blocks that are named by their content, records, and the manifest, last.

A block is written by one request, whole or not at all, and one that is there is not written again: state that does not
change, such as a frozen base model, is stored once. `storage/run_objects.py` shows the names.

Only one save of a run is in flight, and old checkpoints are removed inside its commit, when no rank writes blocks.
A block is removed if no manifest that is kept names it and if it is older than the newest manifest: a copy that another
process makes meanwhile keeps its blocks.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from phalanx.errors import PhalanxError, UsageError
from phalanx.safe_files import read_bytes
from phalanx.storage.errors import NotFound, StoreUnavailable
from phalanx.storage.run_objects import BLOCK_BYTES, BLOCKS_NAME, StoredSteps, split_checkpoint_url
from phalanx.storage.url import StoreUrl, parse_url
from phalanx.train.checkpoint.format import (
    CHUNK_BYTES,
    MANIFEST_HASH_NAME,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Bytes,
    CheckpointManifest,
    CorruptCheckpointError,
    encode_manifest,
    merge_rank_manifests,
    parse_manifest,
    parse_step,
    rank_file_name,
)
from phalanx.train.checkpoint.save import lower_thread_priority
from phalanx.train.checkpoint.shard_file import RankRecord, ShardFileSpec, decode_record, encode_record

logger = logging.getLogger(__name__)

PARALLEL_BLOCKS = 8
"""Blocks that a rank writes or reads at once; with BLOCK_BYTES they bound its memory."""
ReadFn = Callable[[int, int], memoryview]
"""Returns the bytes [start, stop) of a file."""


class StoredRecord(RankRecord):
    """The record of a rank, and the names of the blocks of its file, each of `block_bytes` but the last."""

    block_bytes: int
    blocks: tuple[str, ...]


class Block(NamedTuple):
    """The bytes [start, stop) of a file."""

    file: str
    start: int
    stop: int
    name: str


@dataclass(frozen=True)
class StoredCheckpoint:
    """The manifest of a checkpoint in a store, and the blocks of all its files in their order. `objects`: the bytes of
    manifest and records by name."""

    url: StoreUrl
    objects: Mapping[str, bytes]
    manifest: CheckpointManifest
    blocks: Sequence[Block]


def parse_stored(url: StoreUrl, objects: Mapping[str, bytes]) -> StoredCheckpoint:
    """Parse the manifest and records of the checkpoint at `url`. Raises CorruptCheckpointError for one that is damaged
    or of another checkpoint."""
    manifest = parse_manifest(url, objects[MANIFEST_NAME], objects.get(MANIFEST_HASH_NAME, b""))
    blocks: list[Block] = []
    for name, file in manifest.files.items():
        record_name = record_name_of(name)
        if record_name not in objects:
            raise CorruptCheckpointError(url / record_name, "missing")
        record = decode_record(objects[record_name], url / record_name, StoredRecord)
        starts = range(0, file.bytes, record.block_bytes)
        if record.files.get(name) != file or len(record.blocks) != len(starts):
            raise CorruptCheckpointError(url / record_name, f"does not fit {MANIFEST_NAME}")
        for start, block in zip(starts, record.blocks, strict=True):
            blocks.append(Block(name, start, min(start + record.block_bytes, file.bytes), block))
    return StoredCheckpoint(url, objects, manifest, blocks)


def find_best_step(losses: Mapping[int, float | None]) -> int | None:
    """Return the first step with the lowest validation loss; None where none has one."""
    scored = [(loss, step) for step, loss in losses.items() if loss is not None]
    return min(scored)[1] if scored else None


def record_name_of(file: str) -> str:
    """Return the name of the record of a rank's file."""
    return f"{file.partition('.')[0]}.json"


@dataclass
class KnownBlocks:
    """Blocks that need not be written. `names` are in a whole checkpoint. Others may be left of a save that was cut:
    those that are in the store and newer than `since` (seconds since 1970; None: none are)."""

    names: set[str] = field(default_factory=set)
    since: float | None = None


class Pace:
    """Limits the bytes that all threads of a rank send in a second."""

    def __init__(self, bytes_per_s: float):
        self._bytes_per_s, self._lock, self._free_at = bytes_per_s, threading.Lock(), 0.0

    def wait(self, nbytes: int, cancelled: threading.Event) -> None:
        """Wait until `nbytes` may be sent, or `cancelled` is set."""
        with self._lock:
            start = max(self._free_at, time.monotonic())
            self._free_at = start + nbytes / self._bytes_per_s
        cancelled.wait(start - time.monotonic())


class WrittenBlocks(NamedTuple):
    """The blocks of a file that was written."""

    names: tuple[str, ...]
    sent_bytes: int
    skipped_bytes: int


class CheckpointStore(StoredSteps):
    """The checkpoints below a URL. Methods raise OSError if the store fails; a store that refuses raises UsageError
    where it is read, and OSError where it is written, because a save must not end a run."""

    def __init__(self, url: StoreUrl | str, block_bytes: int | None = None):
        super().__init__(parse_url(url) if isinstance(url, str) else url)
        self.block_bytes = block_bytes or BLOCK_BYTES

    def block_url(self, name: str) -> StoreUrl:
        """The URL of a block."""
        return self.url / BLOCKS_NAME / name

    def read(self, step: int) -> StoredCheckpoint:
        """Read the manifest and records of a checkpoint. Raises NotFound if it is not whole, and
        CorruptCheckpointError if one of them is damaged."""
        url = self.step_url(step)
        objects = {MANIFEST_NAME: self.store.read((url / MANIFEST_NAME).key)}
        names = [each.key.rpartition("/")[2] for each in self.store.list_objects(url.key)]
        wanted = [name for name in names if name != MANIFEST_NAME]
        with ThreadPoolExecutor(PARALLEL_BLOCKS, thread_name_prefix="store") as pool:
            objects |= zip(wanted, pool.map(lambda name: self.store.read((url / name).key), wanted), strict=True)
        return parse_stored(url, objects)

    def holds(self, directory: Path) -> bool:
        """Whether the checkpoint at `directory` is whole in the store, and not another one of its step."""
        step, sidecar = parse_step(directory), read_bytes(directory / MANIFEST_HASH_NAME, MAX_MANIFEST_BYTES)
        try:
            return self.is_whole(step) and self.store.read((self.step_url(step) / MANIFEST_HASH_NAME).key) == sidecar
        except NotFound:
            return False

    def read_manifest(self, step: int) -> CheckpointManifest:
        """Read the manifest of a checkpoint, as `read` does."""
        return self.read(step).manifest

    def list_blocks_before(self, step: int) -> set[str]:
        """The blocks that are older than the manifest of a step."""
        written_at = self._written_at(step)
        blocks = self.store.list_objects((self.url / BLOCKS_NAME).key)
        return {each.key.rpartition("/")[2] for each in blocks if each.modified < written_at}

    def _written_at(self, step: int) -> float:
        """When the manifest of a step was written."""
        return self.store.head((self.step_url(step) / MANIFEST_NAME).key).modified

    def read_block(self, name: str) -> bytes:
        """Read a block. Raises CorruptCheckpointError unless its bytes are those that its name says."""
        url = self.block_url(name)
        try:
            for _ in range(2):  # bytes may also change on their way
                data = self.store.read(url.key)
                if xxhash.xxh3_128_hexdigest(data) == name:
                    return data
        except NotFound:
            raise CorruptCheckpointError(url, "missing") from None
        raise CorruptCheckpointError(url, "damaged (its bytes are not those that its name says)")

    def known_blocks(self, step: int | None, rank: int) -> KnownBlocks:
        """The blocks that a rank need not write: those of its file in the checkpoint of `step`, and what a save that
        was cut has written since the newest manifest. Those of later checkpoints may be damaged: they were not
        resumed from."""
        newest = next(self.whole_steps(), None)
        since = 0.0 if newest is None else self._written_at(newest)
        names: set[str] = set()
        if step is not None and self.is_whole(step):
            url = self.step_url(step) / record_name_of(rank_file_name(rank))
            with suppress(NotFound, CorruptCheckpointError):
                names.update(decode_record(self.store.read(url.key), url, StoredRecord).blocks)
        return KnownBlocks(names, since)

    def write_blocks(
        self, nbytes: int, read: ReadFn, known: KnownBlocks, cancelled: threading.Event, pace: Pace | None = None
    ) -> WrittenBlocks:
        """Write the blocks of a file of `nbytes` that are not known. Raises OSError once `cancelled` is set."""

        def write(start: int) -> tuple[str, int]:
            if cancelled.is_set():
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED), str(self.url))
            data = read(start, min(start + self.block_bytes, nbytes))
            name = xxhash.xxh3_128_hexdigest(data)
            if name in known.names or (known.since is not None and self._is_newer(name, len(data), known.since)):
                return name, 0
            if pace is not None:
                pace.wait(len(data), cancelled)
            self.store.write(self.block_url(name).key, data)
            return name, len(data)

        threads = ThreadPoolExecutor(PARALLEL_BLOCKS, "store", initializer=lower_thread_priority)
        with _raising_os_errors(self.url), threads as pool:
            written = list(pool.map(write, range(0, nbytes, self.block_bytes)))
        sent = sum(size for _, size in written)
        return WrittenBlocks(tuple(name for name, _ in written), sent, nbytes - sent)

    def _is_newer(self, name: str, nbytes: int, since: float) -> bool:
        try:
            info = self.store.head(self.block_url(name).key)
        except NotFound:
            return False
        return info.size == nbytes and info.modified > since

    def write_record(self, record: RankRecord, blocks: Sequence[str]) -> None:
        """Write a rank's record, after its blocks. A manifest of the same step, of other records, is removed before."""
        stored = StoredRecord(**dict(record), block_bytes=self.block_bytes, blocks=tuple(blocks))
        with _raising_os_errors(self.url):
            self.store.delete([(self.step_url(record.step) / MANIFEST_NAME).key])
            self.store.write((self.step_url(record.step) / record_name_of(record.file_name)).key, encode_record(stored))

    def read_record(self, step: int, rank: int) -> StoredRecord:
        """Read the record that a rank wrote. Raises OSError if it is not what was written."""
        url = self.step_url(step) / record_name_of(rank_file_name(rank))
        try:
            with _raising_os_errors(url):
                return decode_record(self.store.read(url.key), url, StoredRecord)
        except CorruptCheckpointError:
            raise OSError(errno.ENODATA, "a record that was written is damaged", str(url)) from None

    def write_manifest(self, step: int, files: Mapping[str, object], content: bytes, sidecar: bytes) -> None:
        """Make a checkpoint of the records of `files`: write its manifest, after removing other objects of the step."""
        url = self.step_url(step)
        kept = {(url / record_name_of(name)).key for name in files}
        with _raising_os_errors(url):
            self.store.delete([each.key for each in self.store.list_objects(url.key) if each.key not in kept])
            self.store.write((url / MANIFEST_HASH_NAME).key, sidecar)
            self.store.write((url / MANIFEST_NAME).key, content)

    def remove(self, steps: Sequence[int], blocks: Iterable[str]) -> None:
        """Remove the manifests of checkpoints, then their records, then blocks."""
        self.store.delete([(self.step_url(step) / MANIFEST_NAME).key for step in steps])
        for step in steps:
            self.store.delete([each.key for each in self.store.list_objects(self.step_url(step).key)])
        self.store.delete([self.block_url(name).key for name in sorted(blocks)])


def select_stored_step(url: StoreUrl, step: int | None) -> tuple[CheckpointStore, int]:
    """The store of a run's URL, and the step: as given, else that of a checkpoint's URL, else the newest. Raises
    UsageError unless this checkpoint is whole."""
    run_url, own_step = split_checkpoint_url(url)
    checkpoints, asked = CheckpointStore(run_url), own_step if step is None else step
    whole = list(checkpoints.whole_steps())
    if not whole:
        raise UsageError(f"{url}: no checkpoint here; name the URL of a run or of a checkpoint")
    if asked is not None and asked not in whole:
        raise UsageError(f"{run_url}: no checkpoint of step {asked}; there are {', '.join(map(str, sorted(whole)))}")
    return checkpoints, whole[0] if asked is None else asked


def remove_stored(url: StoreUrl, step: int | None = None) -> StoreUrl:
    """Remove a checkpoint from a store, and the blocks that no other one has; return its URL."""
    checkpoints, step = select_stored_step(url, step)
    unused = {block.name for block in checkpoints.read(step).blocks}
    for other in checkpoints.whole_steps():
        if other != step:
            unused.difference_update(block.name for block in checkpoints.read(other).blocks)
    checkpoints.remove([step], unused)
    return checkpoints.step_url(step)


@contextmanager
def _raising_os_errors(url: StoreUrl) -> Iterator[None]:
    """Raise what a store refuses as an error of storage."""
    try:
        yield
    except CorruptCheckpointError:
        raise
    except PhalanxError as error:
        raise StoreUnavailable(str(url), str(error)) from None


class _KeptCheckpoint(NamedTuple):
    best_loss: float | None
    blocks: frozenset[str]


class StoreRetention:
    """Removes old checkpoints of a store, on the worker that commits: all but the `keep` newest (None: all stay) and
    the best, which is the first with the lowest validation loss, and those `in_use`. Then the blocks that no other
    checkpoint has."""

    def __init__(
        self, checkpoints: CheckpointStore, keep: int | None, in_use: Callable[[], Collection[int]] = lambda: ()
    ):
        self._checkpoints, self._keep, self._in_use = checkpoints, keep, in_use
        self._whole: dict[int, _KeptCheckpoint | None] = {}
        self.must_sweep = True
        """Whether a save was cut, so that there may be blocks of no checkpoint."""

    def apply(self, committed: int) -> None:
        """Remove what is not kept, after the commit of a step and before the next save. A store that fails is logged;
        the next call tries again."""
        if self._keep is None:
            return
        try:
            self._remove_old(committed, self._keep)
        except OSError as error:
            self.must_sweep = True
            logger.warning("an old checkpoint could not be removed: %s", error)

    def _remove_old(self, committed: int, keep: int) -> None:
        steps = self._checkpoints.steps()
        self._whole.pop(committed, None)
        self._whole = {step: self._whole.get(step) or self._describe(step) for step in steps}
        whole = {step: each for step, each in self._whole.items() if each is not None}
        kept = {committed, *list(whole)[:keep], *self._in_use()}
        if (best := find_best_step({step: each.best_loss for step, each in whole.items()})) is not None:
            kept.add(best)
        doomed = [step for step in steps if step not in kept and (step in whole or step < committed)]
        if self.must_sweep:
            unused = self._checkpoints.list_blocks_before(committed)
        else:
            unused = {name for step in doomed if step in whole for name in whole[step].blocks}
        unused.difference_update(*(whole[step].blocks for step in kept if step in whole))
        self._checkpoints.remove(doomed, unused)
        self.must_sweep = False

    def _describe(self, step: int) -> _KeptCheckpoint | None:
        """None for a checkpoint that is not whole, or damaged."""
        try:
            checkpoint = self._checkpoints.read(step)
        except (NotFound, CorruptCheckpointError):
            return None
        loss = checkpoint.manifest.meta.get("best_loss")
        return _KeptCheckpoint(loss, frozenset(block.name for block in checkpoint.blocks))


class StoreDestination:
    """The destination of one rank's shards at a URL. `attempt`, the same on all ranks, separates its records from
    those of an earlier attempt."""

    def __init__(
        self,
        checkpoints: CheckpointStore,
        rank: int,
        world_size: int,
        attempt: int,
        keep: int,
        in_use: Callable[[], Collection[int]] = lambda: (),
    ):
        self.rank = rank
        self._checkpoints, self._world_size, self._attempt = checkpoints, world_size, attempt
        self._retention = StoreRetention(checkpoints, keep, in_use)
        self._good_step: int | None = None
        self._known: KnownBlocks | None = None
        self._written: set[str] | None = None

    def continue_from(self, step: int) -> None:
        """The checkpoint of `step` was resumed from: its blocks are good, those of later ones may not be."""
        self._good_step, self._known, self._written = step, None, None

    def check_space(self, nbytes: int) -> None:
        """A store does not say how much fits."""

    def shard_path(self, step: int) -> StoreUrl:
        return self._checkpoints.step_url(step) / rank_file_name(self.rank)

    def write(
        self, step: int, image: Bytes, file_spec: ShardFileSpec, meta: dict[str, Any], cancelled: threading.Event
    ) -> None:
        """Write the blocks of this rank's file that the store lacks, then its record."""
        if self._written is not None:  # the last save was committed
            self._known = KnownBlocks(self._written)
        elif self._known is None:
            self._known = self._checkpoints.known_blocks(self._good_step, self.rank)
        content = image.data
        size = len(content)
        written = self._checkpoints.write_blocks(size, lambda a, b: content[a:b], self._known, cancelled)
        chunks = [xxhash.xxh3_64_hexdigest(content[a : a + CHUNK_BYTES]) for a in range(0, size, CHUNK_BYTES)]
        record = file_spec.make_record(chunks, step, str(self._attempt), self.rank, meta)
        self._checkpoints.write_record(record, written.names)
        self._written = set(written.names)
        logger.info("step %d: %d bytes sent, %d skipped", step, written.sent_bytes, written.skipped_bytes)

    def commit(self, step: int, meta: dict[str, Any]) -> tuple[StoreUrl, int]:
        """Make a checkpoint of what all ranks wrote, and remove old ones, before any rank writes again; return its URL
        and bytes."""
        records = [self._checkpoints.read_record(step, rank) for rank in range(self._world_size)]
        manifest = merge_rank_manifests(records, meta)
        content, sidecar = encode_manifest(manifest)
        self._checkpoints.write_manifest(step, manifest.files, content, sidecar)
        self._retention.apply(step)
        return self._checkpoints.step_url(step), manifest.nbytes + len(content) + len(sidecar)

    def remove_own(self, step: int) -> None:
        """Leave what was written of a save that is abandoned to a later retention: without a manifest it is no
        checkpoint, and the store may have failed."""
        self._written, self._retention.must_sweep = None, True
