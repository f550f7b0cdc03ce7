"""One rank's shards of a checkpoint: the plan of their file, the snapshot of the tensors in memory, the file, written
with direct I/O where possible, and the record that makes it valid.

The snapshot is one reusable host buffer, byte for byte the file to write. CPU tensors are copied by numpy, which
releases the GIL and uses one thread; torch's copy would start a second OpenMP thread pool that competes with training.
GPU tensors are copied on a separate stream into page-locked memory (cudaHostRegister). torch's pinned allocator would
use up to twice the size and stall training. Page-locking takes a large part of a second per GB, so a thread does it, in
blocks: CUDA's lock is held for one block at a time.

The record is written after the file, on disk as in memory. It lists the contents and checksums of the file and the
run's progress, and carries its own hash. The records of all ranks are merged into the manifest of a checkpoint.
"""

import errno
import fcntl
import itertools
import json
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from pydantic import Field, StringConstraints, ValidationError, model_validator

from phalanx.errors import UsageError
from phalanx.run.directory import fsync_if_supported
from phalanx.storage.url import StoreUrl
from phalanx.train.checkpoint.format import (
    CHUNK_BYTES,
    Bytes,
    CorruptCheckpointError,
    FileRecord,
    RankManifest,
    ShardRecord,
    TensorRecord,
    make_safetensors_header,
    rank_file_name,
)
from phalanx.train.distributed.module_state import DTYPE_NAMES

_WRITE_BLOCK_BYTES = 8 * CHUNK_BYTES  # bytes of one write: large enough to keep a disk busy, small enough to fail early
_DIRECT_IO_ALIGNMENT_BYTES = 4096


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
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | (os.O_DIRECT if wanted else 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False  # this file system does not support direct I/O
    return wanted


class RankRecord(RankManifest):
    """What one rank wrote for the save of `step`.

    `token` distinguishes saves of one step: the attempt on disk, the epoch of the run's history in memory. `meta` is as
    in a checkpoint's manifest."""

    format: Literal[1] = 1
    step: Annotated[int, Field(ge=0)]
    token: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]+$", max_length=64)]
    rank: Annotated[int, Field(ge=0)]
    meta: dict[str, Any]

    @model_validator(mode="after")
    def _check_own_file(self) -> Self:
        if set(self.files) != {rank_file_name(self.rank)}:
            raise ValueError("it names other files than its rank's")
        return self

    @property
    def file_name(self) -> str:
        """Return the name of its one file."""
        (name,) = self.files
        return name


def encode_record(record: RankRecord) -> bytes:
    """Return the bytes of a record: its own hash, then the record as JSON."""
    text = json.dumps(record.model_dump(mode="json")).encode()
    return xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text


RecordT = TypeVar("RecordT", bound=RankRecord)


def decode_record(content: bytes, path: Path | StoreUrl, kind: type[RecordT]) -> RecordT:
    """Parse a record that was read from `path`. Raises CorruptCheckpointError if it is damaged."""
    digest, _, text = content.partition(b"\n")
    if xxhash.xxh3_128_hexdigest(text).encode() != digest:
        raise CorruptCheckpointError(path, "damaged (its own checksum differs)")
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise CorruptCheckpointError(path, f"malformed record: {error.errors()[0]['msg']}") from None


def write_record(copy: Path, record: RankRecord) -> None:
    """Write a record atomically, after its file is complete."""
    path = (copy / record.file_name).with_suffix(".json")
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(encode_record(record))
    os.replace(temporary, path)


PIN_BLOCK_BYTES = 64 * 2**20
"""Bytes that one call page-locks. A copy from a GPU must not cross the border of two blocks."""
CUDA_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class PinnedBuffer:
    """`nbytes` of touched host memory, page-aligned, and in huge pages if the system supports them. If a GPU `device`
    is given, it is page-locked for it in the background: call `wait` before using the bytes."""

    def __init__(self, nbytes: int, device: torch.device | None = None):
        memory = mmap.mmap(-1, max(1, math.ceil(nbytes / mmap.PAGESIZE)) * mmap.PAGESIZE)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: Bytes = np.frombuffer(memory, dtype=np.uint8)
        self.is_pinned = True
        """Whether all of it is page-locked, if requested; otherwise copies from the GPU block the host."""
        self._pinning: Future[None] | None = None
        if device is None:
            self.bytes[:] = 0  # touch the pages now and not during the first save
            return
        registered: list[int] = []
        weakref.finalize(self, _unpin, registered, device, self.bytes).atexit = False
        executor = ThreadPoolExecutor(1, thread_name_prefix="pinning")
        self._pinning = executor.submit(self._pin, device, registered)
        executor.shutdown(wait=False)

    @property
    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._pinning is None or self._pinning.done()

    def wait(self) -> None:
        """Wait until the memory is ready."""
        if self._pinning is not None:
            self._pinning.result()
            self._pinning = None

    def blocks(self, start: int, end: int) -> list[tuple[int, int]]:
        """Split the bytes from `start` to `end` at the borders of blocks."""
        cuts = [start, *range((start // PIN_BLOCK_BYTES + 1) * PIN_BLOCK_BYTES, end, PIN_BLOCK_BYTES), end]
        return list(itertools.pairwise(cuts))

    def _pin(self, device: torch.device, registered: list[int]) -> None:
        cudart = torch.cuda.cudart()
        address = self.bytes.ctypes.data
        with torch.cuda.device(device):
            for start, end in self.blocks(0, len(self.bytes)):
                self.bytes[start:end] = 0
                place = (address + start, end - start, CUDA_HOST_REGISTER_PORTABLE)
                self.is_pinned = self.is_pinned and int(cudart.cudaHostRegister(*place)) == 0
                if self.is_pinned:
                    registered.append(address + start)


def _unpin(registered: list[int], device: torch.device, memory: Bytes) -> None:
    """Unlock the blocks at these addresses; `memory` is referenced until then."""
    cudart = torch.cuda.cudart()
    with torch.cuda.device(device):
        for address in registered:
            cudart.cudaHostUnregister(address)


# numpy knows no bfloat16 and no float8: elements are moved as integers of the same width.
_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorShard:
    """What this rank writes of a logical tensor: `tensor` is the block at `offset` of a tensor of `shape`. `is_frozen`:
    training does not change it."""

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    is_frozen: bool = False

    @classmethod
    def full_tensor(cls, name: str, tensor: torch.Tensor) -> "TensorShard":
        return cls(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The elements of a CPU tensor as integers of their width, in its shape, sharing its memory."""
    return tensor.detach().view(_INTEGER_DTYPES[tensor.dtype.itemsize]).numpy()


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """The bytes of a contiguous CPU tensor, sharing its memory."""
    return as_array(tensor).reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class ShardFileSpec:
    """Where each piece lies in `file`: `header`, then the piece i in the bytes `spans[i]`."""

    file: str
    header: bytes
    spans: tuple[tuple[int, int], ...]
    tensors: dict[str, TensorRecord]
    nbytes: int

    def make_manifest(self, chunks: Sequence[str]) -> RankManifest:
        """Return the rank's manifest, given the checksums of the file's chunks."""
        files = {self.file: FileRecord(bytes=self.nbytes, chunks=tuple(chunks))}
        return RankManifest(files=files, tensors=self.tensors)

    def make_record(self, chunks: Sequence[str], step: int, token: str, rank: int, meta: dict[str, Any]) -> RankRecord:
        """Return the rank's record, given the checksums of the file's chunks."""
        written = self.make_manifest(chunks)
        return RankRecord(files=written.files, tensors=written.tensors, step=step, token=token, rank=rank, meta=meta)


def plan_shard_file(shards: Sequence[TensorShard], file: str) -> ShardFileSpec:
    """Place the pieces in a safetensors file: the widest elements first, so that all are aligned; of one width what is
    frozen, so that its bytes lie together and a store keeps their blocks once; then by name."""
    for shard in shards:
        if shard.tensor.dtype not in DTYPE_NAMES:
            raise UsageError(f"tensor {shard.name}: a checkpoint cannot hold {shard.tensor.dtype}")

    def position(i: int) -> tuple[int, bool, str, tuple[int, ...]]:
        shard = shards[i]
        return -shard.tensor.dtype.itemsize, not shard.is_frozen, shard.name, shard.offset

    order = sorted(range(len(shards)), key=position)
    spans = [(0, 0)] * len(shards)
    entries, end = [], 0
    for i in order:
        shard, tensor = shards[i], shards[i].tensor
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        spans[i] = (start, end)
        key = shard.name if tuple(tensor.shape) == shard.shape else f"{shard.name}@{','.join(map(str, shard.offset))}"
        entries.append((key, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), start, end))
    header = make_safetensors_header(entries)
    shift = len(header)
    tensors: dict[str, TensorRecord] = {}
    for i in order:
        shard, (start, end) = shards[i], spans[i]
        spans[i] = (start + shift, end + shift)
        record = ShardRecord(file=file, bytes=spans[i], offset=shard.offset, extent=tuple(shard.tensor.shape))
        known = tensors[shard.name].pieces if shard.name in tensors else ()
        tensors[shard.name] = TensorRecord(
            dtype=DTYPE_NAMES[shard.tensor.dtype], shape=shard.shape, pieces=(*known, record)
        )
    return ShardFileSpec(file, header, tuple(spans), tensors, shift + sum(end - start for start, end in spans))


class SharedStaging:
    """The one staging buffer of a worker, for saves to every destination, of which one at a time is in flight.

    It grows to the largest save. A GPU's buffer is used until a larger one is page-locked, so that no save waits."""

    def __init__(self) -> None:
        self._buffers: list[StagingBuffer] = []

    def reserve(self, nbytes: int, device: torch.device | None) -> None:
        """Allocate the buffer for saves of `nbytes`; for tensors on a GPU `device`, in the background."""
        if not any(buffer.fits_bytes(nbytes, device) for buffer in self._buffers):
            if device is None:
                self._buffers.clear()  # free the old one first
            self._buffers.append(StagingBuffer(nbytes, device))

    def take(self, nbytes: int, device: torch.device | None) -> "StagingBuffer":
        """Return the buffer for a save of `nbytes`."""
        self.reserve(nbytes, device)
        fitting = [buffer for buffer in self._buffers if buffer.fits_bytes(nbytes, device)]
        chosen = next((buffer for buffer in reversed(fitting) if buffer.is_ready), fitting[0])
        self._buffers = self._buffers[self._buffers.index(chosen) :]
        return chosen


class StagingBuffer(PinnedBuffer):
    """A buffer of at least `nbytes`, used by every save that fits; for a GPU's tensors with its `device`."""

    def __init__(self, nbytes: int, device: torch.device | None):
        super().__init__(nbytes, device)
        self.device = device
        self._gpu = None if device is None else torch.get_device_module(device)
        self._stream = None if self._gpu is None else self._gpu.Stream(device)
        self._done: torch.Event | None = None

    def fits_bytes(self, nbytes: int, device: torch.device | None) -> bool:
        return len(self.bytes) >= nbytes and (device is None or self.device == device)

    def start_copy(self, file_spec: ShardFileSpec, shards: Sequence[TensorShard], copy_now: Collection[str]) -> None:
        """Called by the training thread: copy what cannot wait, and start the copies from the GPU, which from here on
        are ordered after what training has queued. It waits where the buffer is not there yet."""
        self.wait()
        self.bytes[: len(file_spec.header)] = np.frombuffer(file_spec.header, dtype=np.uint8)
        self._copy_cpu_shards(file_spec, shards, lambda shard: shard.name in copy_now)
        if self._stream is None or self._gpu is None:
            return
        self._stream.wait_stream(self._gpu.current_stream())
        with self._gpu.stream(self._stream):
            for shard, (start, end) in zip(shards, file_spec.spans, strict=True):
                if not _is_on_cpu(shard):
                    source = shard.tensor.detach().contiguous().view(-1).view(torch.uint8)
                    for low, high in self.blocks(start, end):
                        target = torch.from_numpy(self.bytes[low:high])
                        target.copy_(source[low - start : high - start], non_blocking=True)
                    shard.tensor.record_stream(self._stream)
            self._done = self._stream.record_event()
        if any(shard.name in copy_now and not _is_on_cpu(shard) for shard in shards):
            self.make_stream_wait()

    def copy_from_cpu(self, file_spec: ShardFileSpec, shards: Sequence[TensorShard], copy_now: Collection[str]) -> None:
        """Called by the background thread: copy the rest of the CPU's tensors."""
        self._copy_cpu_shards(file_spec, shards, lambda shard: shard.name not in copy_now)

    def make_stream_wait(self) -> None:
        """Let what the training thread queues on the GPU from now on wait for the copies; the thread does not."""
        if self._done is not None and self._gpu is not None:
            self._gpu.current_stream().wait_event(self._done)

    def wait_gpu_copies(self) -> None:
        """Wait until the copies from the GPU have arrived."""
        if self._done is not None and self._gpu is not None:
            with self._gpu.device(self.device):  # a thread begins with device 0, and would make a context there
                self._done.synchronize()

    def _copy_cpu_shards(
        self, file_spec: ShardFileSpec, shards: Sequence[TensorShard], is_chosen: Callable[[TensorShard], bool]
    ) -> None:
        for shard, (start, end) in zip(shards, file_spec.spans, strict=True):
            if _is_on_cpu(shard) and is_chosen(shard):
                source = as_array(shard.tensor)
                np.copyto(self.bytes[start:end].view(source.dtype).reshape(source.shape), source)


def _is_on_cpu(shard: TensorShard) -> bool:
    return shard.tensor.device.type == "cpu"
