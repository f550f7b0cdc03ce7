# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""RMSNorm of each head and its rotation by position, in one kernel forward and one backward.

What torch.compile makes of the same operations reads each pair of features as two values with a stride of two: for
GPT-2 on an H200 these kernels took 33 of 264 ms a step, five times what their bytes need (docs/benchmarks/gpu.md). Here
a program holds whole heads in registers and splits the pairs there.

Letters: b batch, s sequence, h heads, d features of a head (a power of two), r = b s h rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

FEATURES_PER_PROGRAM = 2048
"""Features that a program holds at a time: enough to have loads in flight, few enough for its registers."""
MAX_BACKWARD_PROGRAMS = 1024
"""Programs of the backward at most: each sums the weight's gradient over its rows, and these sums are added
afterwards."""


@triton.jit
def _load_heads(pointer, rows, inside, D: tl.constexpr, ROWS: tl.constexpr):
    columns = tl.arange(0, D)
    values = tl.load(pointer + rows[:, None] * D + columns[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    return tl.split(tl.reshape(values, (ROWS, D // 2, 2)))


@triton.jit
def _load_rotations(cos, sin, rows, inside, heads, length, HALF: tl.constexpr):
    at = ((rows // heads) % length)[:, None] * HALF + tl.arange(0, HALF)[None, :]
    return tl.load(cos + at, mask=inside[:, None], other=0.0), tl.load(sin + at, mask=inside[:, None], other=0.0)


@triton.jit
def _load_weight(weight, HALF: tl.constexpr):
    return tl.split(tl.reshape(tl.load(weight + tl.arange(0, 2 * HALF)), (HALF, 2)))


@triton.jit
def _store_heads(pointer, even, odd, rows, inside, D: tl.constexpr, ROWS: tl.constexpr):
    values = tl.reshape(tl.join(even, odd), (ROWS, D)).to(pointer.dtype.element_ty)
    tl.store(pointer + rows[:, None] * D + tl.arange(0, D)[None, :], values, mask=inside[:, None])


@triton.jit
def _forward_kernel(
    x, weight, cos, sin, out, count, heads, length, EPS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < count
    even, odd = _load_heads(x, rows, inside, D, ROWS)
    c, s = _load_rotations(cos, sin, rows, inside, heads, length, D // 2)
    weight_even, weight_odd = _load_weight(weight, D // 2)
    scale = tl.rsqrt((tl.sum(even * even, 1) + tl.sum(odd * odd, 1)) / D + EPS)[:, None]
    even, odd = even * scale * weight_even[None, :], odd * scale * weight_odd[None, :]
    _store_heads(out, even * c - odd * s, even * s + odd * c, rows, inside, D, ROWS)


@triton.jit
def _backward_kernel(
    grad,
    x,
    weight,
    cos,
    sin,
    grad_x,
    grad_weight,
    count,
    heads,
    length,
    EPS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    weight_even, weight_odd = _load_weight(weight, D // 2)
    sum_even, sum_odd = tl.zeros((D // 2,), tl.float32), tl.zeros((D // 2,), tl.float32)
    first = tl.program_id(0)
    for block in range(BLOCKS):
        rows = (first + block * tl.num_programs(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = rows < count
        c, s = _load_rotations(cos, sin, rows, inside, heads, length, D // 2)
        grad_even, grad_odd = _load_heads(grad, rows, inside, D, ROWS)
        grad_even, grad_odd = grad_even * c + grad_odd * s, grad_odd * c - grad_even * s  # turned back
        even, odd = _load_heads(x, rows, inside, D, ROWS)
        scale = tl.rsqrt((tl.sum(even * even, 1) + tl.sum(odd * odd, 1)) / D + EPS)[:, None]
        even, odd = even * scale, odd * scale
        sum_even += tl.sum(grad_even * even, 0)
        sum_odd += tl.sum(grad_odd * odd, 0)
        grad_even, grad_odd = grad_even * weight_even[None, :], grad_odd * weight_odd[None, :]
        mean = ((tl.sum(grad_even * even, 1) + tl.sum(grad_odd * odd, 1)) / D)[:, None]
        even, odd = scale * (grad_even - even * mean), scale * (grad_odd - odd * mean)
        _store_heads(grad_x, even, odd, rows, inside, D, ROWS)
    tl.store(grad_weight + first * D + tl.arange(0, D), tl.reshape(tl.join(sum_even, sum_odd), (D,)))


def _kernel_sizes(x: Tensor, cos: Tensor) -> tuple[int, int, int, int]:
    """Rows, heads, positions in `cos` [.., s, 1, d/2] (of one sequence, or of all), and d."""
    return x.numel() // x.shape[-1], x.shape[-2], cos.numel() // cos.shape[-1], x.shape[-1]


@torch.library.triton_op("phalanx::norm_rotate", mutates_args={})
def _norm_rotate_op(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    count, heads, length, dim = _kernel_sizes(x, cos)
    out = torch.empty_like(x)
    rows = FEATURES_PER_PROGRAM // dim
    torch.library.wrap_triton(_forward_kernel)[(triton.cdiv(count, rows),)](
        x, weight, cos, sin, out, count, heads, length, EPS=eps, D=dim, ROWS=rows
    )
    return out


@torch.library.triton_op("phalanx::norm_rotate_backward", mutates_args={})
def _norm_rotate_backward_op(
    grad: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    count, heads, length, dim = _kernel_sizes(x, cos)
    rows = FEATURES_PER_PROGRAM // dim
    blocks = triton.cdiv(count, rows)
    programs = min(MAX_BACKWARD_PROGRAMS, blocks)
    grad_x = torch.empty_like(x)
    grad_weight = torch.empty((programs, dim), dtype=torch.float32, device=x.device)
    torch.library.wrap_triton(_backward_kernel)[(programs,)](
        grad,
        x,
        weight,
        cos,
        sin,
        grad_x,
        grad_weight,
        count,
        heads,
        length,
        EPS=eps,
        D=dim,
        ROWS=rows,
        BLOCKS=triton.cdiv(blocks, programs),
    )
    return grad_x, grad_weight.sum(0)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward_op(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, cos, sin = ctx.saved_tensors
    grad_x, grad_weight = _norm_rotate_backward_op(grad.contiguous(), x, weight, cos, sin, ctx.eps)
    return grad_x, grad_weight, None, None, None


_norm_rotate_op.register_autograd(_backward_op, setup_context=_save_for_backward)


def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """x [b, s, h, d] on a GPU, in any float dtype -> the same shape and dtype: each head divided by its root mean
    square, times weight [d], and each pair of features turned by cos and sin [s, 1, d/2] or [b, s, 1, d/2]. Computed in
    fp32."""
    out: Tensor = _norm_rotate_op(x.contiguous(), weight.float(), cos.contiguous(), sin.contiguous(), eps)
    return out
