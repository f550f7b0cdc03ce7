"""Memory-bound operations of a training step that calibration measures, with their shapes and bytes.

A kind is the name of the operation in torch's dispatcher ("native_layer_norm_backward"), as in a trace of a training
step. `moved_bytes` is the size of all inputs and outputs; what is read and written in place counts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.cluster.calibration.timing import ColdBufferPool

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NUM_COLUMNS = 1024
NUM_HEADS, HEAD_DIM = 8, 64
HIDDEN_SIZE, VOCAB_SIZE = 512, 8192
NUM_CHANNELS, IMAGE_SIDE, NUM_NORM_GROUPS = 64, 16, 32
GRAD_NORM_ROW = 4096
"""Elements per row; the squares of a row are added in fp32 (`dtensor_utils.total_norm`)."""
ADAMW_BYTES_PER_PARAMETER = 28


@dataclass
class OpCase:
    """One operation with several sets of arguments, each in its own memory."""

    run_op: Callable[..., Any]
    argument_sets: Sequence[tuple[Any, ...]]
    shape: tuple[int, ...]
    moved_bytes: float | None = None
    """None: the size of all inputs and outputs."""
    flops: float = 0.0


MakeOpCase = Callable[[ColdBufferPool, int, int, "torch.dtype"], OpCase]
"""Arguments: a pool, the bytes of the largest tensor, the number of argument sets, and a dtype."""


def memory_op_cases(dtype: torch.dtype) -> dict[str, MakeOpCase]:
    """Return a factory of cases for each kind that is measured with this dtype."""
    import torch
    from torch.nn import functional as F

    aten = torch.ops.aten
    rows_of: dict[str, tuple[int, Callable[..., Any]]] = {
        "clone": (1, torch.clone),
        "add": (2, torch.add),
        "mul": (2, torch.mul),
        "pow": (1, lambda x: x.pow(2)),
        "gelu": (1, F.gelu),
        "gelu_backward": (2, aten.gelu_backward),
        "silu": (1, F.silu),
        "silu_backward": (2, aten.silu_backward),
        "relu": (1, torch.relu),
        "threshold_backward": (2, lambda g, x: aten.threshold_backward(g, x, 0)),
        "sum": (1, lambda x: x.sum(-1)),
    }
    found: dict[str, MakeOpCase] = {name: _make_row_op(count, do) for name, (count, do) in rows_of.items()}
    found |= {
        "mul_": _make_scale,
        "add_": _make_accumulate,
        "_to_copy": _make_cast,
        "native_layer_norm": _make_layer_norm,
        "native_layer_norm_backward": _make_layer_norm_backward,
        "native_group_norm_backward": _make_group_norm_backward,
        "embedding_dense_backward": _make_embedding_backward,
    }
    if dtype == torch.float32:
        found |= {"mul_complex": _make_rotary, "_fused_adamw_": _make_adamw, "clip_norm": _make_grad_norm}
    return found


def count_moved_bytes(arguments: Sequence[Any], result: Any) -> float:
    """Return the bytes of all inputs and outputs. An expanded tensor counts as its storage."""
    import torch

    results = result if isinstance(result, tuple | list) else (result,)
    tensors = [each for each in (*arguments, *results) if isinstance(each, torch.Tensor)]
    return float(sum(min(each.numel() * each.element_size(), each.untyped_storage().nbytes()) for each in tensors))


def _num_rows(size: int, dtype: torch.dtype, columns: int = NUM_COLUMNS) -> int:
    return max(1, size // (dtype.itemsize * columns))


def _take_sets(
    pool: ColdBufferPool, sets: int, count: int, shape: tuple[int, ...], dtype: torch.dtype
) -> list[tuple[Tensor, ...]]:
    """Take `count` equal tensors for each set of arguments."""
    return [tuple(pool.take_tensor(*shape, dtype=dtype) for _ in range(count)) for _ in range(sets)]


def _make_row_op(count: int, do: Callable[..., Any]) -> MakeOpCase:
    """Operations on `count` equal matrices."""

    def make(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
        shape = (_num_rows(size, dtype), NUM_COLUMNS)
        return OpCase(do, _take_sets(pool, sets, count, shape, dtype), shape)

    return make


def _make_scale(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    """`run_op` changes a copy: the data of the pool must stay unchanged."""
    shape = (_num_rows(size, dtype), NUM_COLUMNS)
    owned = [(pool.take_tensor(*shape, dtype=dtype).clone(),) for _ in range(sets)]
    return OpCase(lambda x: x.mul_(1.0), owned, shape, moved_bytes=2.0 * shape[0] * shape[1] * dtype.itemsize)


def _make_accumulate(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    shape = (_num_rows(size, dtype), NUM_COLUMNS)
    # the sum grows by one term each time: far from overflow, and not a constant that a cache could know
    owned = [(total.clone(), x) for total, x in _take_sets(pool, sets, 2, shape, dtype)]
    return OpCase(lambda total, x: total.add_(x), owned, shape, moved_bytes=3.0 * shape[0] * shape[1] * dtype.itemsize)


def _make_cast(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    """Cast to `dtype` from the other dtype of mixed precision."""
    import torch

    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    shape = (_num_rows(size, torch.float32), NUM_COLUMNS)
    return OpCase(lambda x: x.to(dtype), _take_sets(pool, sets, 1, shape, other), shape)


def _make_layer_norm(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    import torch

    shape = (_num_rows(size, dtype), NUM_COLUMNS)
    weight, bias = (pool.take_tensor(NUM_COLUMNS, dtype=dtype) for _ in range(2))

    def work(x: Tensor) -> Any:
        return torch.ops.aten.native_layer_norm(x, [NUM_COLUMNS], weight, bias, 1e-5)

    return OpCase(work, _take_sets(pool, sets, 1, shape, dtype), shape)


def _make_layer_norm_backward(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    import torch

    shape = (_num_rows(size, dtype), NUM_COLUMNS)
    weight, bias = (pool.take_tensor(NUM_COLUMNS, dtype=dtype) for _ in range(2))
    x = pool.take_tensor(*shape, dtype=dtype)
    # kept by forward in fp32 on a CPU as on a GPU, where the input has fewer bits
    _, mean, deviation = torch.ops.aten.native_layer_norm(x, [NUM_COLUMNS], weight, bias, 1e-5)

    def work(gradient: Tensor, x: Tensor) -> Any:
        backward = torch.ops.aten.native_layer_norm_backward
        return backward(gradient, x, [NUM_COLUMNS], mean, deviation, weight, bias, [True, True, True])

    return OpCase(work, _take_sets(pool, sets, 2, shape, dtype), shape)


def _make_group_norm_backward(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    import torch

    aten = torch.ops.aten
    images = _num_rows(size, dtype, NUM_CHANNELS * IMAGE_SIDE * IMAGE_SIDE)
    shape = (images, NUM_CHANNELS, IMAGE_SIDE, IMAGE_SIDE)
    weight, bias = (pool.take_tensor(NUM_CHANNELS, dtype=dtype) for _ in range(2))
    numbers = (shape[0], NUM_CHANNELS, IMAGE_SIDE * IMAGE_SIDE, NUM_NORM_GROUPS)
    _, mean, deviation = aten.native_group_norm(pool.take_tensor(*shape, dtype=dtype), weight, bias, *numbers, 1e-5)

    def work(gradient: Tensor, x: Tensor) -> Any:
        return aten.native_group_norm_backward(gradient, x, mean, deviation, weight, *numbers, [True, True, True])

    return OpCase(work, _take_sets(pool, sets, 2, shape, dtype), shape)


def _make_rotary(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    """Multiply pairs of features, as complex numbers, by rotations that all samples share."""
    import torch

    tokens = _num_rows(size, dtype, NUM_HEADS * HEAD_DIM)
    batch = max(1, tokens // 256)
    shape = (batch, tokens // batch, NUM_HEADS, HEAD_DIM)
    angles = pool.take_tensor(shape[1], 1, HEAD_DIM // 2)
    rotations = torch.polar(torch.ones_like(angles), angles)
    pairs = [(torch.view_as_complex(pool.take_tensor(*shape[:-1], HEAD_DIM // 2, 2)), rotations) for _ in range(sets)]
    return OpCase(torch.mul, pairs, shape)


def _make_embedding_backward(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    import torch

    tokens = _num_rows(size, dtype, HIDDEN_SIZE)
    gradients = _take_sets(pool, sets, 1, (tokens, HIDDEN_SIZE), dtype)
    pairs = [(gradient, torch.randint(0, VOCAB_SIZE, (tokens,))) for (gradient,) in gradients]

    def work(gradient: Tensor, at: Tensor) -> Any:
        return torch.ops.aten.embedding_dense_backward(gradient, at, VOCAB_SIZE, -1, False)

    return OpCase(work, pairs, (tokens, VOCAB_SIZE, HIDDEN_SIZE))


def _make_adamw(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    """A step over `size` bytes of parameters in matrices of up to a million elements."""
    import torch

    count = size // dtype.itemsize
    each = min(count, 1 << 20)
    parameters = [torch.nn.Parameter(pool.take_tensor(each).clone()) for _ in range(count // each)]
    for parameter in parameters:
        parameter.grad = pool.take_tensor(each).clone()
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    optimizer.step()  # makes its state

    num_elements = each * len(parameters)
    return OpCase(optimizer.step, [()], (num_elements,), moved_bytes=float(ADAMW_BYTES_PER_PARAMETER * num_elements))


def _make_grad_norm(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    """Squares are added up as training does it on a CPU, in rows (`dtensor_utils.total_norm`)."""
    import torch

    count = max(GRAD_NORM_ROW, size // dtype.itemsize // GRAD_NORM_ROW * GRAD_NORM_ROW)

    def work(x: Tensor) -> Any:
        return torch.linalg.vector_norm(x.view(-1, GRAD_NORM_ROW), dim=-1)

    tensors = _take_sets(pool, sets, 1, (count,), torch.float32)
    return OpCase(work, tensors, (count,), moved_bytes=float(count * dtype.itemsize))
