"""The snapshot: a rank's tensors copied into one reusable buffer that is, byte for byte, the file to be written.

No disk here. Tensors on the CPU are copied by numpy, which lets go of the interpreter lock and stays on one thread
(torch's own copy would start a second team of OpenMP threads beside the one that trains); tensors on a GPU are copied
by a stream of their own into pinned memory.
"""

import math
import mmap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from phalanx.errors import UsageError
from phalanx.train.checkpoint.format import DTYPE_NAMES, PieceRecord, TensorRecord, safetensors_header

Bytes = npt.NDArray[np.uint8]

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
    """A page-aligned buffer of at least `nbytes`, allocated and touched once, then used by every save."""

    def __init__(self, nbytes: int, pinned: bool):
        self.pinned = pinned
        self._stream = torch.cuda.Stream() if pinned else None
        self._done: torch.cuda.Event | None = None
        if pinned:
            self._buffer: Bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        else:
            memory = mmap.mmap(-1, math.ceil(nbytes / mmap.PAGESIZE) * mmap.PAGESIZE)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._buffer = np.frombuffer(memory, dtype=np.uint8)
        self._buffer[:] = 0  # the pages come now, not during the first save

    def fits(self, nbytes: int, pinned: bool) -> bool:
        return len(self._buffer) >= nbytes and self.pinned >= pinned

    def image(self, layout: Layout) -> Bytes:
        """The file's bytes."""
        return self._buffer[: layout.nbytes]

    def begin(self, layout: Layout, pieces: Sequence[Piece], eager: Collection[str]) -> None:
        """Called by the training thread: copy what cannot wait, and start the copies from the GPU, which from here on
        are ordered after what training has queued."""
        self._buffer[: len(layout.header)] = np.frombuffer(layout.header, dtype=np.uint8)
        self._copy(layout, pieces, [i for i, piece in enumerate(pieces) if _on_cpu(piece) and piece.name in eager])
        if self._stream is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for piece, (start, end) in zip(pieces, layout.spans, strict=True):
                if not _on_cpu(piece):
                    target = torch.from_numpy(self._buffer[start:end]).view(piece.tensor.dtype).view(piece.tensor.shape)
                    target.copy_(piece.tensor.detach(), non_blocking=True)
                    piece.tensor.record_stream(self._stream)
            self._done = self._stream.record_event()
        if any(piece.name in eager and not _on_cpu(piece) for piece in pieces):
            self.order_after()

    def copy(self, layout: Layout, pieces: Sequence[Piece], eager: Collection[str]) -> None:
        """Called by the background thread: copy the rest of the CPU's tensors."""
        self._copy(layout, pieces, [i for i, piece in enumerate(pieces) if _on_cpu(piece) and piece.name not in eager])

    def order_after(self) -> None:
        """Let what the training thread queues on the GPU from now on wait for the copies; the thread does not."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)

    def complete(self) -> None:
        """Wait until the copies from the GPU have arrived."""
        if self._done is not None:
            self._done.synchronize()

    def _copy(self, layout: Layout, pieces: Sequence[Piece], chosen: Sequence[int]) -> None:
        for i in chosen:
            start, end = layout.spans[i]
            source = as_array(pieces[i].tensor)
            np.copyto(self._buffer[start:end].view(source.dtype).reshape(source.shape), source)


def _on_cpu(piece: Piece) -> bool:
    return piece.tensor.device.type == "cpu"
