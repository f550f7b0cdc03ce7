"""Read tensors, or blocks of them, from a checkpoint under any parallelism, and verify every byte that is read.

Files are read chunk by chunk directly into the memory of the tensors. Each chunk is hashed while it is still in the
CPU's cache: verification adds up to 25 % to a read from memory, and almost nothing to a read from disk. A chunk with a
wrong hash raises CorruptCheckpointError, which names the file; `find_newest_good` then tries the next older checkpoint.
"""

import itertools
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import xxhash
from pydantic import ValidationError

from phalanx.errors import DataError, UsageError
from phalanx.recipe import ResolvedRecipe
from phalanx.run import Run
from phalanx.safe_files import open_regular
from phalanx.train.checkpoint.format import (
    Bytes,
    CheckpointManifest,
    CorruptCheckpointError,
    FileRecord,
    ShardRecord,
    TensorRecord,
    list_checkpoints,
    make_unreadable_error,
    read_manifest,
)
from phalanx.train.checkpoint.shard_file import as_bytes
from phalanx.train.distributed.module_state import DTYPE_NAMES

OnReject = Callable[[Path, str, str], None]
"""Called for each checkpoint that is not good, with its path, the file's name, and the reason."""

READ_THREADS = 2  # threads that read a checkpoint
_CHUNKS_PER_READ = 64  # chunks that one thread reads as one task
_PIECE_BYTES = 256 << 20  # maximum bytes in host memory on their way to another device
_HASH_BLOCK_BYTES = 256 << 10  # bytes that are read and hashed at once, so that they are still in the core's cache


ItemT = TypeVar("ItemT")


class _ByteSpan(NamedTuple):
    """The bytes [start, end) of a file and the memory of the same size that they are read into."""

    start: int
    end: int
    target: Bytes


def choose_weights(manifest: CheckpointManifest, weights: str | None, path: Path) -> CheckpointManifest:
    """Return the manifest with the moving averages in place of the weights that have one, if `weights` is `ema`; None:
    if the recipe evaluated those. Raises UsageError if there are none."""
    tensors, chosen = manifest.tensors, weights or manifest.meta.get("recipe", {}).get("evaluation", {}).get("weights")
    averages = {name: record for name in tensors if (record := tensors.get(f"optimizer/{name}/ema")) is not None}
    if chosen != "ema":
        return manifest
    if not averages:
        raise UsageError(f"{path}: has no moving average of the weights; train with optimizer.ema_decay, such as 0.999")
    return manifest.model_copy(update={"tensors": tensors | averages})


def load_tensors(
    path: Path, names: Iterable[str] | None = None, manifest: CheckpointManifest | None = None
) -> dict[str, torch.Tensor]:
    """Read and verify whole tensors of the checkpoint at `path` to the CPU: those of `names`, by default all, and then
    every byte of every file has been verified. `manifest`, if given, is not read again. Raises CorruptCheckpointError,
    which names the bad file, and DataError for a tensor that is missing."""
    manifest = manifest or read_manifest(path)
    records = {name: _get_record(path, manifest, name) for name in (manifest.tensors if names is None else names)}
    loaded = {name: torch.empty(record.shape, dtype=record.torch_dtype) for name, record in records.items()}
    load_blocks(path, [(name, (0,) * tensor.dim(), tensor) for name, tensor in loaded.items()], manifest)
    return loaded


def batch_by_bytes(
    items: Iterable[ItemT], count_bytes: Callable[[ItemT], int], max_bytes: int
) -> Iterator[list[ItemT]]:
    """Yield the items in order, in batches of at most `max_bytes`; a larger item has a batch of its own."""
    batch: list[ItemT] = []
    size = 0
    for item in items:
        nbytes = count_bytes(item)
        if batch and size + nbytes > max_bytes:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += nbytes
    if batch:
        yield batch


def load_blocks(
    path: Path, requested: Sequence[tuple[str, Sequence[int], torch.Tensor]], manifest: CheckpointManifest
) -> None:
    """Fill each tensor (any device, any strides) with a block of the named logical tensor: the block starts at the
    given offset and has the tensor's shape. Only chunks that overlap a block are read, and these are verified. Raises
    CorruptCheckpointError, which names the bad file, and DataError for a tensor that is missing or differs in dtype.
    The blocks must not overlap."""
    bounced: list[tuple[torch.Tensor, torch.Tensor]] = []
    spans: dict[str, list[_ByteSpan]] = {}

    def read() -> None:
        _read_files(path, manifest, spans)
        for tensor, arrived in bounced:
            tensor.copy_(arrived)
        spans.clear()
        bounced.clear()

    for name, offset, tensor in requested:
        record, extent = _get_record(path, manifest, name), tuple(tensor.shape)
        _check_block(path, name, record, offset, tensor)
        target = tensor = tensor.detach()
        if target.device.type != "cpu" or not target.is_contiguous():
            if sum(arrived.nbytes for _, arrived in bounced) + target.nbytes > _PIECE_BYTES:
                read()
            target = torch.empty(extent, dtype=record.torch_dtype)
            bounced.append((tensor, target))
        flat = as_bytes(target)
        for shard in record.pieces:
            spans.setdefault(shard.file, []).extend(
                _make_spans(shard, offset, extent, flat, record.torch_dtype.itemsize)
            )
    read()


def find_needed_files(
    manifest: CheckpointManifest, requested: Sequence[tuple[str, Sequence[int], torch.Tensor]]
) -> set[str]:
    """Return the files that `load_blocks` would read for `requested`."""
    found = set()
    for name, offset, tensor in requested:
        for shard in manifest.tensors[name].pieces if name in manifest.tensors else ():
            if any(True for _ in _overlapping_runs(shard.offset, shard.extent, offset, tensor.shape)):
                found.add(shard.file)
    return found


def _get_record(path: Path, manifest: CheckpointManifest, name: str) -> TensorRecord:
    record = manifest.tensors.get(name)
    if record is None:
        raise DataError(f"{path}: holds no tensor {name!r}")
    return record


def _check_block(path: Path, name: str, record: TensorRecord, offset: Sequence[int], block: torch.Tensor) -> None:
    """Raise DataError unless the tensor holds such a block."""
    if not len(offset) == block.dim() == len(record.shape) or any(
        a + n > full_size for a, n, full_size in zip(offset, block.shape, record.shape, strict=True)
    ):
        asked = f"{list(block.shape)} from {list(offset)} asked"
        raise DataError(f"{path}: tensor {name!r} has shape {list(record.shape)}, {asked}")
    if block.dtype != record.torch_dtype:
        here = DTYPE_NAMES.get(block.dtype, block.dtype)
        raise DataError(f"{path}: tensor {name!r} is {record.dtype} there, {here} here")


def _make_spans(
    shard: ShardRecord, offset: Sequence[int], extent: Sequence[int], target: Bytes, itemsize: int
) -> Iterator[_ByteSpan]:
    """Map the bytes of the shard's file to `target`, the bytes of the requested block."""
    for source, destination, count in _overlapping_runs(shard.offset, shard.extent, offset, extent):
        start = shard.bytes[0] + source * itemsize
        yield _ByteSpan(
            start, start + count * itemsize, target[destination * itemsize : (destination + count) * itemsize]
        )


def _overlapping_runs(
    a_offset: Sequence[int], a_extent: Sequence[int], b_offset: Sequence[int], b_extent: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield the overlap of blocks a and b of one tensor as runs of elements that are contiguous in both, in C order:
    (first element in a, first element in b, number of elements)."""
    low = [max(a, b) for a, b in zip(a_offset, b_offset, strict=True)]
    meet = [
        min(a + n, b + m) - first for a, n, b, m, first in zip(a_offset, a_extent, b_offset, b_extent, low, strict=True)
    ]
    if any(count <= 0 for count in meet):
        return
    # Dimensions from `split` on form one run: all of them but the first are whole in both blocks.
    split = len(meet)
    while split and meet[split - 1] == a_extent[split - 1] == b_extent[split - 1]:
        split -= 1
    split = max(split - 1, 0)
    count = math.prod(meet[split:])
    for index in itertools.product(*map(range, meet[:split])):
        position = [first + i for first, i in itertools.zip_longest(low, index, fillvalue=0)]
        yield _flat_index(position, a_offset, a_extent), _flat_index(position, b_offset, b_extent), count


def _flat_index(position: Sequence[int], offset: Sequence[int], extent: Sequence[int]) -> int:
    """Return the index, in C order, of the element at a global position within a block."""
    number = 0
    for at, first, length in zip(position, offset, extent, strict=True):
        number = number * length + at - first
    return number


def _read_files(path: Path, manifest: CheckpointManifest, spans: Mapping[str, list[_ByteSpan]]) -> None:
    """Read the spans of each file; verify each chunk that they overlap, and each file's header."""
    tasks = []
    heads: dict[str, int] = {}
    for shard in itertools.chain.from_iterable(tensor.pieces for tensor in manifest.tensors.values()):
        heads[shard.file] = min(shard.bytes[0], heads.get(shard.file, shard.bytes[0]))
    for name in spans:
        file, size = manifest.files[name], manifest.chunk_bytes
        ordered = sorted((span for span in spans[name] if span.end > span.start), key=lambda span: span.start)
        if any(after.start < before.end for before, after in itertools.pairwise(ordered)):
            raise ValueError(f"{path / name}: two of the blocks to be read hold the same elements")
        wanted = set(range(math.ceil(heads[name] / size)))
        for span in ordered:
            wanted.update(range(span.start // size, math.ceil(span.end / size)))
        chunks = sorted(wanted)
        runs = [chunks[i : i + _CHUNKS_PER_READ] for i in range(0, len(chunks), _CHUNKS_PER_READ)]
        tasks += [partial(_read_chunks, path / name, file, size, run, ordered) for run in runs]
    _run_in_threads(tasks)


def _read_chunks(path: Path, file: FileRecord, size: int, chunks: Sequence[int], spans: Sequence[_ByteSpan]) -> None:
    """Read some chunks of a file, in ascending order, into the spans, and verify each chunk."""
    unwanted = np.empty(min(size, file.bytes), dtype=np.uint8)
    try:
        fd = open_regular(path)
    except DataError as error:
        raise CorruptCheckpointError(path, str(error).partition(": ")[2]) from None
    except OSError as error:
        raise make_unreadable_error(path, error) from None
    try:
        actual = os.fstat(fd).st_size
        if actual != file.bytes:
            raise CorruptCheckpointError(path, f"has {actual:,} bytes, its manifest says {file.bytes:,}")
        for chunk in chunks:
            start, end = chunk * size, min((chunk + 1) * size, file.bytes)
            hasher, at = xxhash.xxh3_64(), start
            for part in _split_by_span(start, end, spans, unwanted):
                for first in range(0, len(part), _HASH_BLOCK_BYTES):
                    buffer = part.data[first : first + _HASH_BLOCK_BYTES]
                    _read_exactly(fd, buffer, at, path)
                    hasher.update(buffer)
                    at += len(buffer)
            if hasher.hexdigest() != file.chunks[chunk]:
                raise CorruptCheckpointError(
                    path, f"damaged between bytes {start:,} and {end:,} (their checksum differs)"
                )
    finally:
        os.close(fd)


def _split_by_span(start: int, end: int, spans: Sequence[_ByteSpan], unwanted: Bytes) -> Iterator[Bytes]:
    """Yield the memory for the bytes [start, end), part by part; bytes outside of all spans go to `unwanted`."""
    at = start
    for i in range(bisect_right(spans, start, key=lambda span: span.end), len(spans)):
        span = spans[i]
        if span.start >= end:
            break
        if at < span.start:
            yield unwanted[: span.start - at]
            at = span.start
        stop = min(span.end, end)
        yield span.target[at - span.start : stop - span.start]
        at = stop
    if at < end:
        yield unwanted[: end - at]


def _read_exactly(fd: int, buffer: memoryview, start: int, path: Path) -> None:
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(fd, [buffer[done:] if done else buffer], start + done)
        except OSError as error:
            raise make_unreadable_error(path, error, f"cannot be read at byte {start + done:,}: ") from None
        if count == 0:
            raise CorruptCheckpointError(path, f"ends at byte {start + done:,}")
        done += count


def verify_checkpoint(path: Path) -> CheckpointManifest:
    """Read and verify every byte of a checkpoint; return its manifest. Raises CorruptCheckpointError for a bad file."""
    manifest = read_manifest(path)
    verify_files(path, manifest.files, manifest.chunk_bytes)
    return manifest


def verify_files(folder: Path, files: Mapping[str, FileRecord], chunk: int, threads: int = READ_THREADS) -> None:
    """Verify every byte of `files`, in chunks of `chunk` bytes. Raises CorruptCheckpointError for a bad file."""
    tasks = [
        partial(
            _read_chunks, folder / name, file, chunk, range(first, min(first + _CHUNKS_PER_READ, len(file.chunks))), ()
        )
        for name, file in files.items()
        for first in range(0, len(file.chunks), _CHUNKS_PER_READ)
    ]
    _run_in_threads(tasks, threads)


def _run_in_threads(tasks: Sequence[Callable[[], None]], threads: int = READ_THREADS) -> None:
    """Run all tasks. The first error, in task order, is raised; tasks that have not started by then are skipped."""
    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(work) for work in tasks]
        try:
            for job in jobs:
                job.result()
        finally:
            for job in jobs:
                job.cancel()


def find_newest_good(directory: Path, on_reject: OnReject) -> Path | None:
    """Return the newest checkpoint of a directory in which every byte of every file is good; None if there is none.
    Raises OSError if none was found and one that may be good could not be read. Bad ones are passed to `on_reject`."""
    storage = None
    for path in list_checkpoints(directory):
        try:
            verify_checkpoint(path)
            return path
        except CorruptCheckpointError as error:
            on_reject(path, error.file.name, error.reason)
            storage = storage or error.storage_error
    if storage is not None:
        raise storage
    return None


def recipe_in(checkpoint: Path, manifest: CheckpointManifest) -> ResolvedRecipe:
    """Return the resolved recipe of a checkpoint. Raises DataError if its manifest holds none that Phalanx can read."""
    try:
        return ResolvedRecipe.model_validate(manifest.meta["recipe"])
    except (KeyError, ValidationError):
        raise DataError(f"{checkpoint}: holds no recipe of this Phalanx") from None


def newest_recipe(run: Run) -> ResolvedRecipe | None:
    """Return the resolved recipe of the newest checkpoint that has a readable one; None if the run has no checkpoint.
    Raises DataError if it has checkpoints but none has a readable recipe."""
    if not run.checkpoints.is_dir():
        return None
    wrong: list[str] = []
    for path in list_checkpoints(run.checkpoints):
        try:
            return recipe_in(path, read_manifest(path))
        except DataError as error:
            wrong.append(str(error))
    if wrong:
        raise DataError(f"{run.resolved}: is missing, and no checkpoint holds a readable recipe: {wrong[0]}")
    return None
