"""Operations that torch takes apart differently on each device, measured whole and through autograd: forward, and
backward with a fresh gradient. Attention, convolutions, RMSNorm, cross-entropy, rotary positions.

Each gives two figures: kind `attention` for forward and `attention_backward`. Shapes, and FLOPs where it computes:

| kind | shape | FLOPs of forward; of backward | bytes |
|---|---|---|---|
| `attention`: causal | b, heads, s, d | 2 b heads s^2 d; 2.5 times that (Dao 2023, section 4.1) | q, k, v, result |
| `convolution` | n, channels in, h, w, channels out, kernel | 2 n h w in out kernel^2; twice that | all three |
| `rms_norm` | rows, columns | | input, result |
| `cross_entropy` | tokens, vocabulary | | logits |
| `rotary` | b, s, h, d | | input, result |

Bytes of backward are those of forward and of the gradients of the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.cluster.probe.pool import Pool

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Case:
    """What is to be measured: `kind` with a `shape` as in the table above."""

    kind: str
    shape: tuple[int, ...]


@dataclass
class Trained:
    """A forward ready to be done: `leaves` of several sets get gradients, `do` gives the result from one set."""

    do: Callable[..., Tensor]
    leaves: Sequence[tuple[Tensor, ...]]
    gradient: Tensor | None
    """Of the result; None where that is a loss."""
    bytes: float
    flops: float = 0.0
    back_flops: float = 0.0


SMALL = {
    "cpu": [
        Case("attention", (4, 4, 256, 64)),
        Case("attention", (2, 8, 512, 64)),
        Case("convolution", (8, 64, 16, 16, 64, 3)),
        Case("rms_norm", (4096, 256)),
        Case("cross_entropy", (2048, 256)),
        Case("cross_entropy", (512, 8192)),
        Case("rotary", (8, 256, 4, 64)),
    ],
    "cuda": [
        Case("attention", (8, 12, 1024, 64)),
        Case("attention", (1, 32, 4096, 128)),
        Case("convolution", (64, 64, 56, 56, 64, 3)),
        Case("rms_norm", (16384, 2048)),
        Case("cross_entropy", (8192, 50304)),
        Case("rotary", (4, 2048, 16, 128)),
    ],
}
"""For a quick look; a full one has `MORE` beside."""
MORE = {
    "cpu": [
        Case("attention", (1, 2, 64, 32)),
        Case("attention", (16, 4, 256, 64)),
        Case("attention", (8, 8, 128, 32)),
        Case("attention", (1, 8, 1024, 128)),
        Case("attention", (1, 12, 2048, 64)),
        Case("convolution", (16, 3, 32, 32, 64, 3)),
        Case("convolution", (16, 64, 32, 32, 64, 3)),
        Case("convolution", (16, 128, 16, 16, 256, 1)),
        Case("convolution", (4, 256, 14, 14, 256, 3)),
        Case("rms_norm", (256, 256)),
        Case("rms_norm", (2048, 1024)),
        Case("rms_norm", (8192, 2048)),
        Case("cross_entropy", (4096, 256)),
        Case("cross_entropy", (2048, 8192)),
        Case("cross_entropy", (1024, 50304)),
        Case("rotary", (1, 128, 4, 64)),
        Case("rotary", (16, 256, 4, 64)),
        Case("rotary", (2, 1024, 16, 128)),
    ],
    "cuda": [
        Case("attention", (1, 4, 256, 64)),
        Case("attention", (32, 16, 512, 64)),
        Case("attention", (2, 32, 2048, 128)),
        Case("attention", (1, 16, 8192, 128)),
        Case("attention", (1, 8, 16384, 128)),
        Case("convolution", (64, 3, 224, 224, 64, 7)),
        Case("convolution", (64, 256, 14, 14, 1024, 1)),
        Case("convolution", (64, 512, 7, 7, 512, 3)),
        Case("convolution", (256, 64, 32, 32, 64, 3)),
        Case("rms_norm", (2048, 1024)),
        Case("rms_norm", (8192, 4096)),
        Case("rms_norm", (32768, 8192)),
        Case("cross_entropy", (16384, 256)),
        Case("cross_entropy", (4096, 128256)),
        Case("rotary", (1, 512, 8, 64)),
        Case("rotary", (2, 4096, 32, 128)),
    ],
}


def largest(case: Case) -> int:
    """Elements of its largest tensor."""
    if case.kind == "convolution":
        n, into, h, w, out, _ = case.shape
        return n * h * w * max(into, out)
    found = 1
    for side in case.shape:
        found *= side
    return found


def prepare(case: Case, pool: Pool, sets: int, dtype: torch.dtype) -> Trained:
    """The case with tensors from the pool."""
    return _PREPARE[case.kind](case.shape, pool, sets, dtype)


def _leaf(pool: Pool, *shape: int, dtype: torch.dtype) -> Tensor:
    return pool.take(*shape, dtype=dtype).detach().requires_grad_()


def _attention(shape: tuple[int, ...], pool: Pool, sets: int, dtype: torch.dtype) -> Trained:
    from torch.nn import functional as F

    b, heads, s, d = shape

    def work(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # laid out as a projection leaves them, [b, s, h, d]
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    leaves = [tuple(_leaf(pool, b, s, heads, d, dtype=dtype) for _ in range(3)) for _ in range(sets)]
    flops = 2.0 * b * heads * s * s * d
    gradient = pool.take(b, s, heads, d, dtype=dtype).transpose(1, 2)
    nbytes = 4.0 * b * s * heads * d * dtype.itemsize
    return Trained(work, leaves, gradient, nbytes, flops, 2.5 * flops)


def _convolution(shape: tuple[int, ...], pool: Pool, sets: int, dtype: torch.dtype) -> Trained:
    from torch.nn import functional as F

    n, into, h, w, out, kernel = shape
    leaves = [
        (_leaf(pool, n, into, h, w, dtype=dtype), _leaf(pool, out, into, kernel, kernel, dtype=dtype))
        for _ in range(sets)
    ]
    flops = 2.0 * n * h * w * into * out * kernel**2
    nbytes = float((n * h * w * (into + out) + into * out * kernel**2) * dtype.itemsize)
    gradient = pool.take(n, out, h, w, dtype=dtype)
    return Trained(lambda x, k: F.conv2d(x, k, padding=kernel // 2), leaves, gradient, nbytes, flops, 2 * flops)


def _rms_norm(shape: tuple[int, ...], pool: Pool, sets: int, dtype: torch.dtype) -> Trained:
    from torch.nn import functional as F

    rows, columns = shape
    leaves = [(_leaf(pool, rows, columns, dtype=dtype), _leaf(pool, columns, dtype=dtype)) for _ in range(sets)]

    def work(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (columns,), weight, 1e-6)

    return Trained(work, leaves, pool.take(rows, columns, dtype=dtype), 2.0 * rows * columns * dtype.itemsize)


def _cross_entropy(shape: tuple[int, ...], pool: Pool, sets: int, dtype: torch.dtype) -> Trained:
    import torch
    from torch.nn import functional as F

    tokens, vocab = shape
    targets = torch.randint(0, vocab, (tokens,), device=pool.device)
    leaves = [(_leaf(pool, tokens, vocab, dtype=dtype),) for _ in range(sets)]

    def work(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, reduction="sum")

    return Trained(work, leaves, None, float(tokens * vocab * dtype.itemsize))


def _rotary(shape: tuple[int, ...], pool: Pool, sets: int, dtype: torch.dtype) -> Trained:
    import torch

    b, s, heads, d = shape
    angles = pool.take(s, 1, d // 2)
    turns = torch.polar(torch.ones_like(angles), angles)

    def work(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().view(b, s, heads, d // 2, 2))
        return torch.view_as_real(pairs * turns).flatten(-2).to(dtype)

    leaves = [(_leaf(pool, b, s, heads, d, dtype=dtype),) for _ in range(sets)]
    return Trained(work, leaves, pool.take(b, s, heads, d, dtype=dtype), 2.0 * b * s * heads * d * dtype.itemsize)


_PREPARE: dict[str, Callable[[tuple[int, ...], Pool, int, Any], Trained]] = {
    "attention": _attention,
    "convolution": _convolution,
    "rms_norm": _rms_norm,
    "cross_entropy": _cross_entropy,
    "rotary": _rotary,
}
