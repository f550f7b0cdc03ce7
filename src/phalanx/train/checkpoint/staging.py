"""The snapshot: a rank's tensors copied into one reusable buffer that is, byte for byte, the file to be written.

No disk here. Tensors on the CPU are copied by numpy, which lets go of the interpreter lock and stays on one thread
(torch's own copy would start a second team of OpenMP threads beside the one that trains); tensors on a GPU are copied
by a stream of their own into page-locked memory.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from phalanx.errors import UsageError
from phalanx.train.checkpoint.buffer import Buffer, Bytes
from phalanx.train.checkpoint.format import DTYPE_NAMES, PieceRecord, TensorRecord, safetensors_header

# numpy knows no bfloat16 and no float8: elements are moved as integers of the same width.
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Piece:
    """What this rank writes of a logical tensor: `tensor` is the block at `offset` of a tensor of `shape`."""

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> "Piece":
        return cls(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The elements of a CPU tensor as integers of their width, in its shape, sharing its memory."""
    return tensor.detach().view(_RAW[tensor.dtype.itemsize]).numpy()


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """The bytes of a contiguous CPU tensor, sharing its memory."""
    return as_array(tensor).reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class Layout:
    """Where each piece lies in the file: `header`, then the piece i in the bytes `spans[i]`."""

    header: bytes
    spans: tuple[tuple[int, int], ...]
    tensors: dict[str, TensorRecord]
    nbytes: int


def lay_out(pieces: Sequence[Piece], file: str) -> Layout:
    """Place the pieces in a safetensors file: the widest elements first, so that all are aligned, then by name."""
    for piece in pieces:
        if piece.tensor.dtype not in DTYPE_NAMES:
            raise UsageError(f"tensor {piece.name}: a checkpoint cannot hold {piece.tensor.dtype}")
    order = sorted(
        range(len(pieces)), key=lambda i: (-pieces[i].tensor.dtype.itemsize, pieces[i].name, pieces[i].offset)
    )
    spans = [(0, 0)] * len(pieces)
    entries, end = [], 0
    for i in order:
        piece, tensor = pieces[i], pieces[i].tensor
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        spans[i] = (start, end)
        key = piece.name if tuple(tensor.shape) == piece.shape else f"{piece.name}@{','.join(map(str, piece.offset))}"
        entries.append((key, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), start, end))
    header = safetensors_header(entries)
    shift = len(header)
    tensors: dict[str, TensorRecord] = {}
    for i in order:
        piece, (start, end) = pieces[i], spans[i]
        spans[i] = (start + shift, end + shift)
        record = PieceRecord(file=file, bytes=spans[i], offset=piece.offset, extent=tuple(piece.tensor.shape))
        known = tensors[piece.name].pieces if piece.name in tensors else ()
        tensors[piece.name] = TensorRecord(
            dtype=DTYPE_NAMES[piece.tensor.dtype], shape=piece.shape, pieces=(*known, record)
        )
    return Layout(header, tuple(spans), tensors, shift + sum(end - start for start, end in spans))


class Staging:
    """A buffer of at least `nbytes`, allocated once, then used by every save; for a GPU's tensors with its `device`."""

    def __init__(self, nbytes: int, device: torch.device | None):
        self.device = device
        self._gpu = None if device is None else torch.get_device_module(device)
        self._stream = None if self._gpu is None else self._gpu.Stream(device)
        self._done: torch.Event | None = None
        self._memory = Buffer(nbytes, device)
        self._buffer = self._memory.bytes

    @property
    def locked(self) -> bool:
        """Whether copies from the GPU need no host to wait; known once a save has begun."""
        return self._memory.locked

    def fits(self, nbytes: int, device: torch.device | None) -> bool:
        return len(self._buffer) >= nbytes and (device is None or self.device == device)

    def image(self, layout: Layout) -> Bytes:
        """The file's bytes."""
        return self._buffer[: layout.nbytes]

    def begin(self, layout: Layout, pieces: Sequence[Piece], eager: Collection[str]) -> None:
        """Called by the training thread: copy what cannot wait, and start the copies from the GPU, which from here on
        are ordered after what training has queued. It waits where the buffer is not there yet."""
        self._memory.wait()
        self._buffer[: len(layout.header)] = np.frombuffer(layout.header, dtype=np.uint8)
        self._copy(layout, pieces, [i for i, piece in enumerate(pieces) if _on_cpu(piece) and piece.name in eager])
        if self._stream is None or self._gpu is None:
            return
        self._stream.wait_stream(self._gpu.current_stream())
        with self._gpu.stream(self._stream):
            for piece, (start, end) in zip(pieces, layout.spans, strict=True):
                if not _on_cpu(piece):
                    source = piece.tensor.detach().contiguous().view(-1).view(torch.uint8)
                    for low, high in self._memory.blocks(start, end):
                        target = torch.from_numpy(self._buffer[low:high])
                        target.copy_(source[low - start : high - start], non_blocking=True)
                    piece.tensor.record_stream(self._stream)
            self._done = self._stream.record_event()
        if any(piece.name in eager and not _on_cpu(piece) for piece in pieces):
            self.order_after()

    def copy(self, layout: Layout, pieces: Sequence[Piece], eager: Collection[str]) -> None:
        """Called by the background thread: copy the rest of the CPU's tensors."""
        self._copy(layout, pieces, [i for i, piece in enumerate(pieces) if _on_cpu(piece) and piece.name not in eager])

    def order_after(self) -> None:
        """Let what the training thread queues on the GPU from now on wait for the copies; the thread does not."""
        if self._done is not None and self._gpu is not None:
            self._gpu.current_stream().wait_event(self._done)

    def complete(self) -> None:
        """Wait until the copies from the GPU have arrived."""
        if self._done is not None and self._gpu is not None:
            with self._gpu.device(self.device):  # a thread begins with device 0, and would make a context there
                self._done.synchronize()

    def _copy(self, layout: Layout, pieces: Sequence[Piece], chosen: Sequence[int]) -> None:
        for i in chosen:
            start, end = layout.spans[i]
            source = as_array(pieces[i].tensor)
            np.copyto(self._buffer[start:end].view(source.dtype).reshape(source.shape), source)


def _on_cpu(piece: Piece) -> bool:
    return piece.tensor.device.type == "cpu"
