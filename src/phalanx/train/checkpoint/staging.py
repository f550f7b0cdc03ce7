"""Copy a rank's tensors into one reusable host buffer: a snapshot that is byte for byte the file to write.

This module does not access the disk. CPU tensors are copied by numpy, which releases the GIL and uses one thread;
torch's copy would start a second OpenMP thread pool that competes with training. GPU tensors are copied on a separate
stream into page-locked memory.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from phalanx.errors import UsageError
from phalanx.train.checkpoint.format import FileRecord, RankManifest, ShardRecord, TensorRecord, make_safetensors_header
from phalanx.train.checkpoint.pinned_buffer import Bytes, PinnedBuffer
from phalanx.train.checkpoint.shard_file import RankRecord
from phalanx.train.distributed.module_state import DTYPE_NAMES

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


class StagingBuffer:
    """A buffer of at least `nbytes`, used by every save that fits; for a GPU's tensors with its `device`."""

    def __init__(self, nbytes: int, device: torch.device | None):
        self.device = device
        self._gpu = None if device is None else torch.get_device_module(device)
        self._stream = None if self._gpu is None else self._gpu.Stream(device)
        self._done: torch.Event | None = None
        self._memory = PinnedBuffer(nbytes, device)
        self._buffer = self._memory.bytes

    @property
    def is_pinned(self) -> bool:
        """Whether copies from the GPU need no host to wait; known once a save has begun."""
        return self._memory.is_pinned

    @property
    def is_ready(self) -> bool:
        """Whether a copy to it starts at once."""
        return self._memory.is_ready

    def fits_bytes(self, nbytes: int, device: torch.device | None) -> bool:
        return len(self._buffer) >= nbytes and (device is None or self.device == device)

    def file_bytes(self, file_spec: ShardFileSpec) -> Bytes:
        """The file's bytes."""
        return self._buffer[: file_spec.nbytes]

    def start_copy(self, file_spec: ShardFileSpec, shards: Sequence[TensorShard], copy_now: Collection[str]) -> None:
        """Called by the training thread: copy what cannot wait, and start the copies from the GPU, which from here on
        are ordered after what training has queued. It waits where the buffer is not there yet."""
        self._memory.wait()
        self._buffer[: len(file_spec.header)] = np.frombuffer(file_spec.header, dtype=np.uint8)
        self._copy_shards(
            file_spec, shards, [i for i, shard in enumerate(shards) if _is_on_cpu(shard) and shard.name in copy_now]
        )
        if self._stream is None or self._gpu is None:
            return
        self._stream.wait_stream(self._gpu.current_stream())
        with self._gpu.stream(self._stream):
            for shard, (start, end) in zip(shards, file_spec.spans, strict=True):
                if not _is_on_cpu(shard):
                    source = shard.tensor.detach().contiguous().view(-1).view(torch.uint8)
                    for low, high in self._memory.blocks(start, end):
                        target = torch.from_numpy(self._buffer[low:high])
                        target.copy_(source[low - start : high - start], non_blocking=True)
                    shard.tensor.record_stream(self._stream)
            self._done = self._stream.record_event()
        if any(shard.name in copy_now and not _is_on_cpu(shard) for shard in shards):
            self.make_stream_wait()

    def copy_from_cpu(self, file_spec: ShardFileSpec, shards: Sequence[TensorShard], copy_now: Collection[str]) -> None:
        """Called by the background thread: copy the rest of the CPU's tensors."""
        self._copy_shards(
            file_spec, shards, [i for i, shard in enumerate(shards) if _is_on_cpu(shard) and shard.name not in copy_now]
        )

    def make_stream_wait(self) -> None:
        """Let what the training thread queues on the GPU from now on wait for the copies; the thread does not."""
        if self._done is not None and self._gpu is not None:
            self._gpu.current_stream().wait_event(self._done)

    def wait_gpu_copies(self) -> None:
        """Wait until the copies from the GPU have arrived."""
        if self._done is not None and self._gpu is not None:
            with self._gpu.device(self.device):  # a thread begins with device 0, and would make a context there
                self._done.synchronize()

    def _copy_shards(self, file_spec: ShardFileSpec, shards: Sequence[TensorShard], chosen: Sequence[int]) -> None:
        for i in chosen:
            start, end = file_spec.spans[i]
            source = as_array(shards[i].tensor)
            np.copyto(self._buffer[start:end].view(source.dtype).reshape(source.shape), source)


def _is_on_cpu(shard: TensorShard) -> bool:
    return shard.tensor.device.type == "cpu"
