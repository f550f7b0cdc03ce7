"""Benchmark operations that torch decomposes differently on each device, as a whole and through autograd: attention,
convolutions, RMSNorm, cross-entropy, rotary positions.

Each has two kinds, such as `attention` for forward and `attention_backward` for backward with a new gradient.

| kind | shape | FLOPs of forward; of backward | bytes |
|---|---|---|---|
| `attention`: causal | b, heads, s, d | 2 b heads s^2 d; 2.5 times that (Dao 2023, section 4.1) | q, k, v, result |
| `convolution` | n, channels in, h, w, channels out, kernel | 2 n h w in out kernel^2; twice that | all three |
| `rms_norm` | rows, columns | | input, result |
| `cross_entropy` | tokens, vocabulary | | logits |
| `rotary` | b, s, h, d | | input, result |

Backward counts the bytes of forward and those of the gradients of the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.cluster.calibration.cold_buffers import ColdBufferPool

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class AutogradCaseSpec:
    """A case to measure: `op_kind` with a `shape` as in the table above."""

    op_kind: str
    shape: tuple[int, ...]


@dataclass
class AutogradCase:
    """A forward ready to be done: `input_sets` of several sets get gradients, `run_forward` gives the result from one
    set."""

    run_forward: Callable[..., Tensor]
    input_sets: Sequence[tuple[Tensor, ...]]
    gradient: Tensor | None
    """Of the result; None where that is a loss."""
    bytes: float
    flops: float = 0.0
    backward_flops: float = 0.0


QUICK_CASES = {
    "cpu": [
        AutogradCaseSpec("attention", (4, 4, 256, 64)),
        AutogradCaseSpec("attention", (2, 8, 512, 64)),
        AutogradCaseSpec("convolution", (8, 64, 16, 16, 64, 3)),
        AutogradCaseSpec("rms_norm", (4096, 256)),
        AutogradCaseSpec("cross_entropy", (2048, 256)),
        AutogradCaseSpec("cross_entropy", (512, 8192)),
        AutogradCaseSpec("rotary", (8, 256, 4, 64)),
    ],
    "cuda": [
        AutogradCaseSpec("attention", (8, 12, 1024, 64)),
        AutogradCaseSpec("attention", (1, 32, 4096, 128)),
        AutogradCaseSpec("convolution", (64, 64, 56, 56, 64, 3)),
        AutogradCaseSpec("rms_norm", (16384, 2048)),
        AutogradCaseSpec("cross_entropy", (8192, 50304)),
        AutogradCaseSpec("rotary", (4, 2048, 16, 128)),
    ],
}
"""Cases of a quick calibration; a full one adds `EXTRA_CASES`."""
EXTRA_CASES = {
    "cpu": [
        AutogradCaseSpec("attention", (1, 2, 64, 32)),
        AutogradCaseSpec("attention", (16, 4, 256, 64)),
        AutogradCaseSpec("attention", (8, 8, 128, 32)),
        AutogradCaseSpec("attention", (1, 8, 1024, 128)),
        AutogradCaseSpec("attention", (1, 12, 2048, 64)),
        AutogradCaseSpec("convolution", (16, 3, 32, 32, 64, 3)),
        AutogradCaseSpec("convolution", (16, 64, 32, 32, 64, 3)),
        AutogradCaseSpec("convolution", (16, 128, 16, 16, 256, 1)),
        AutogradCaseSpec("convolution", (4, 256, 14, 14, 256, 3)),
        AutogradCaseSpec("rms_norm", (256, 256)),
        AutogradCaseSpec("rms_norm", (2048, 1024)),
        AutogradCaseSpec("rms_norm", (8192, 2048)),
        AutogradCaseSpec("cross_entropy", (4096, 256)),
        AutogradCaseSpec("cross_entropy", (2048, 8192)),
        AutogradCaseSpec("cross_entropy", (1024, 50304)),
        AutogradCaseSpec("rotary", (1, 128, 4, 64)),
        AutogradCaseSpec("rotary", (16, 256, 4, 64)),
        AutogradCaseSpec("rotary", (2, 1024, 16, 128)),
    ],
    "cuda": [
        AutogradCaseSpec("attention", (1, 4, 256, 64)),
        AutogradCaseSpec("attention", (32, 16, 512, 64)),
        AutogradCaseSpec("attention", (2, 32, 2048, 128)),
        AutogradCaseSpec("attention", (1, 16, 8192, 128)),
        AutogradCaseSpec("attention", (1, 8, 16384, 128)),
        AutogradCaseSpec("convolution", (64, 3, 224, 224, 64, 7)),
        AutogradCaseSpec("convolution", (64, 256, 14, 14, 1024, 1)),
        AutogradCaseSpec("convolution", (64, 512, 7, 7, 512, 3)),
        AutogradCaseSpec("convolution", (256, 64, 32, 32, 64, 3)),
        AutogradCaseSpec("rms_norm", (2048, 1024)),
        AutogradCaseSpec("rms_norm", (8192, 4096)),
        AutogradCaseSpec("rms_norm", (32768, 8192)),
        AutogradCaseSpec("cross_entropy", (16384, 256)),
        AutogradCaseSpec("cross_entropy", (4096, 128256)),
        AutogradCaseSpec("rotary", (1, 512, 8, 64)),
        AutogradCaseSpec("rotary", (2, 4096, 32, 128)),
    ],
}


def largest_tensor_elements(case: AutogradCaseSpec) -> int:
    """Elements of its largest tensor."""
    if case.op_kind == "convolution":
        n, into, h, w, out, _ = case.shape
        return n * h * w * max(into, out)
    found = 1
    for side in case.shape:
        found *= side
    return found


def prepare_case(case: AutogradCaseSpec, pool: ColdBufferPool, sets: int, dtype: torch.dtype) -> AutogradCase:
    """The case with tensors from the pool."""
    return _PREPARE_BY_OP[case.op_kind](case.shape, pool, sets, dtype)


def _make_input(pool: ColdBufferPool, *shape: int, dtype: torch.dtype) -> Tensor:
    return pool.take_tensor(*shape, dtype=dtype).detach().requires_grad_()


def _prepare_attention(shape: tuple[int, ...], pool: ColdBufferPool, sets: int, dtype: torch.dtype) -> AutogradCase:
    from torch.nn import functional as F

    b, heads, s, d = shape

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # laid out as a projection leaves them, [b, s, h, d]
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    leaves = [tuple(_make_input(pool, b, s, heads, d, dtype=dtype) for _ in range(3)) for _ in range(sets)]
    flops = 2.0 * b * heads * s * s * d
    gradient = pool.take_tensor(b, s, heads, d, dtype=dtype).transpose(1, 2)
    nbytes = 4.0 * b * s * heads * d * dtype.itemsize
    return AutogradCase(forward, leaves, gradient, nbytes, flops, 2.5 * flops)


def _prepare_convolution(shape: tuple[int, ...], pool: ColdBufferPool, sets: int, dtype: torch.dtype) -> AutogradCase:
    from torch.nn import functional as F

    n, into, h, w, out, kernel = shape
    leaves = [
        (_make_input(pool, n, into, h, w, dtype=dtype), _make_input(pool, out, into, kernel, kernel, dtype=dtype))
        for _ in range(sets)
    ]
    flops = 2.0 * n * h * w * into * out * kernel**2
    nbytes = float((n * h * w * (into + out) + into * out * kernel**2) * dtype.itemsize)
    gradient = pool.take_tensor(n, out, h, w, dtype=dtype)
    return AutogradCase(lambda x, k: F.conv2d(x, k, padding=kernel // 2), leaves, gradient, nbytes, flops, 2 * flops)


def _prepare_rms_norm(shape: tuple[int, ...], pool: ColdBufferPool, sets: int, dtype: torch.dtype) -> AutogradCase:
    from torch.nn import functional as F

    rows, columns = shape
    leaves = [
        (_make_input(pool, rows, columns, dtype=dtype), _make_input(pool, columns, dtype=dtype)) for _ in range(sets)
    ]

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (columns,), weight, 1e-6)

    return AutogradCase(
        forward, leaves, pool.take_tensor(rows, columns, dtype=dtype), 2.0 * rows * columns * dtype.itemsize
    )


def _prepare_cross_entropy(shape: tuple[int, ...], pool: ColdBufferPool, sets: int, dtype: torch.dtype) -> AutogradCase:
    import torch
    from torch.nn import functional as F

    tokens, vocab = shape
    targets = torch.randint(0, vocab, (tokens,), device=pool.device)
    leaves = [(_make_input(pool, tokens, vocab, dtype=dtype),) for _ in range(sets)]

    def forward(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, reduction="sum")

    return AutogradCase(forward, leaves, None, float(tokens * vocab * dtype.itemsize))


def _prepare_rotary(shape: tuple[int, ...], pool: ColdBufferPool, sets: int, dtype: torch.dtype) -> AutogradCase:
    import torch

    b, s, heads, d = shape
    angles = pool.take_tensor(s, 1, d // 2)
    rotations = torch.polar(torch.ones_like(angles), angles)

    def forward(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().view(b, s, heads, d // 2, 2))
        return torch.view_as_real(pairs * rotations).flatten(-2).to(dtype)

    leaves = [(_make_input(pool, b, s, heads, d, dtype=dtype),) for _ in range(sets)]
    return AutogradCase(
        forward, leaves, pool.take_tensor(b, s, heads, d, dtype=dtype), 2.0 * b * s * heads * d * dtype.itemsize
    )


_PREPARE_BY_OP: dict[str, Callable[[tuple[int, ...], ColdBufferPool, int, Any], AutogradCase]] = {
    "attention": _prepare_attention,
    "convolution": _prepare_convolution,
    "rms_norm": _prepare_rms_norm,
    "cross_entropy": _prepare_cross_entropy,
    "rotary": _prepare_rotary,
}
