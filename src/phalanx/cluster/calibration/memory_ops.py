"""Memory-bound operations of a training step that calibration measures, with their shapes and bytes.

A kind is the name of the operation in torch's dispatcher ("native_layer_norm_backward"), as in a trace of a training
step. `moved_bytes` is the size of all inputs and outputs, unless the table says otherwise.

| kind | shape | bytes, where they are not those of all inputs and outputs |
|---|---|---|
| `clone`, `zeros`, `add`, `mul`, `pow`, `gelu`, `silu`, `relu` and their `_backward` | rows, columns | |
| `add_`: into a gradient; `mul_`: a gradient by a number; `fill_` | rows, columns | read and written counted |
| `_to_copy`: a cast between fp32 and `precision`, counted as that of the result | rows, columns | |
| `sum`: over columns; `sum_first`: over rows | rows, columns | |
| `_softmax`, `_log_softmax` and their `_backward_data` | rows, columns | |
| `native_layer_norm`, `native_layer_norm_backward` | rows, columns | |
| `native_group_norm`, `native_group_norm_backward` | n, channels, h, w | |
| `transposed`: heads out of a row; `matrix_transposed` | b, s, h, d; rows, columns | |
| `mul_complex`: rotary positions | b, s, h, d | |
| `embedding`, `embedding_dense_backward` | tokens, vocabulary, width | forward: rows read and written only |
| `_fused_adamw_` | parameters | 28 a parameter: 16 read, 12 written |
| `clip_norm`: norm of all gradients | parameters | |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.cluster.calibration.cold_buffers import ColdBufferPool

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NUM_COLUMNS = 1024
NUM_HEADS, HEAD_DIM = 8, 64
HIDDEN_SIZE, VOCAB_SIZE = 512, 8192
NUM_CHANNELS, IMAGE_SIDE, NUM_NORM_GROUPS = 64, 16, 32
GRAD_NORM_ROW = 4096
"""Elements per row; the squares of a row are added in fp32 (train/ops/grad_norm.py)."""
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
    keep_alive: list[Any] = field(default_factory=list)
    """Objects that must not be freed during the measurement."""


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
        "sum_first": (1, lambda x: x.sum(0)),
        "_softmax": (1, lambda x: aten._softmax(x, -1, False)),
        "_softmax_backward_data": (2, lambda g, y: aten._softmax_backward_data(g, y, -1, y.dtype)),
        "_log_softmax": (1, lambda x: aten._log_softmax(x, -1, False)),
        "_log_softmax_backward_data": (2, lambda g, y: aten._log_softmax_backward_data(g, y, -1, y.dtype)),
        "matrix_transposed": (1, lambda x: x.t().contiguous()),
    }
    found: dict[str, MakeOpCase] = {name: _make_row_op(count, do) for name, (count, do) in rows_of.items()}
    found |= {
        "zeros": _make_zeros,
        "fill_": lambda pool, size, sets, dtype: _make_in_place(
            pool, size, sets, dtype, lambda x: x.fill_(0.5), reads=0
        ),
        "mul_": lambda pool, size, sets, dtype: _make_in_place(pool, size, sets, dtype, lambda x: x.mul_(1.0), reads=1),
        "add_": _make_accumulate,
        "_to_copy": _make_cast,
        "native_layer_norm": _make_layer_norm,
        "native_layer_norm_backward": _make_layer_norm_backward,
        "native_group_norm": _make_group_norm,
        "native_group_norm_backward": _make_group_norm_backward,
        "transposed": _make_transpose_heads,
        "embedding": _make_embedding,
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


def _make_row_op(count: int, do: Callable[..., Any]) -> MakeOpCase:
    """Operations on `count` equal matrices."""

    def make(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
        shape = (_num_rows(size, dtype), NUM_COLUMNS)
        return OpCase(
            do, [tuple(pool.take_tensor(*shape, dtype=dtype) for _ in range(count)) for _ in range(sets)], shape
        )

    return make


def _make_zeros(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    import torch

    shape = (_num_rows(size, dtype), NUM_COLUMNS)
    return OpCase(lambda: torch.zeros(shape, dtype=dtype, device=pool.device), [()] * sets, shape)


def _make_in_place(
    pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype, do: Callable[[Tensor], object], reads: int
) -> OpCase:
    """`run_op` changes a copy: the data of the pool must stay unchanged."""
    shape = (_num_rows(size, dtype), NUM_COLUMNS)
    owned = [(pool.take_tensor(*shape, dtype=dtype).clone(),) for _ in range(sets)]
    nbytes = float(shape[0] * shape[1] * dtype.itemsize)

    def work(x: Tensor) -> None:
        do(x)

    return OpCase(work, owned, shape, moved_bytes=nbytes * (1 + reads))


def _make_accumulate(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    shape = (_num_rows(size, dtype), NUM_COLUMNS)
    # the sum grows by one term each time: far from overflow, and not a constant that a cache could know
    owned = [
        (pool.take_tensor(*shape, dtype=dtype).clone(), pool.take_tensor(*shape, dtype=dtype)) for _ in range(sets)
    ]

    def work(total: Tensor, x: Tensor) -> None:
        total.add_(x)

    return OpCase(work, owned, shape, moved_bytes=3.0 * shape[0] * shape[1] * dtype.itemsize)


def _make_cast(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    """Cast to `dtype` from the other dtype of mixed precision."""
    import torch

    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    shape = (_num_rows(size, torch.float32), NUM_COLUMNS)
    return OpCase(lambda x: x.to(dtype), [(pool.take_tensor(*shape, dtype=other),) for _ in range(sets)], shape)


def _make_layer_norm(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    import torch

    rows = _num_rows(size, dtype)
    weight, bias = pool.take_tensor(NUM_COLUMNS, dtype=dtype), pool.take_tensor(NUM_COLUMNS, dtype=dtype)

    def work(x: Tensor) -> Any:
        return torch.ops.aten.native_layer_norm(x, [NUM_COLUMNS], weight, bias, 1e-5)

    return OpCase(work, [(pool.take_tensor(rows, NUM_COLUMNS, dtype=dtype),) for _ in range(sets)], (rows, NUM_COLUMNS))


def _make_layer_norm_backward(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    import torch

    rows = _num_rows(size, dtype)
    weight, bias = pool.take_tensor(NUM_COLUMNS, dtype=dtype), pool.take_tensor(NUM_COLUMNS, dtype=dtype)
    # kept by forward in fp32 on a CPU as on a GPU, where the input has fewer bits
    of = torch.ops.aten.native_layer_norm(
        pool.take_tensor(rows, NUM_COLUMNS, dtype=dtype), [NUM_COLUMNS], weight, bias, 1e-5
    )
    mean, deviation = of[1], of[2]

    def work(gradient: Tensor, x: Tensor) -> Any:
        backward = torch.ops.aten.native_layer_norm_backward
        return backward(gradient, x, [NUM_COLUMNS], mean, deviation, weight, bias, [True, True, True])

    pairs = [tuple(pool.take_tensor(rows, NUM_COLUMNS, dtype=dtype) for _ in range(2)) for _ in range(sets)]
    return OpCase(work, pairs, (rows, NUM_COLUMNS))


def _image_shape(size: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    return (_num_rows(size, dtype, NUM_CHANNELS * IMAGE_SIDE * IMAGE_SIDE), NUM_CHANNELS, IMAGE_SIDE, IMAGE_SIDE)


def _make_group_norm(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    import torch

    shape = _image_shape(size, dtype)
    weight, bias = pool.take_tensor(NUM_CHANNELS, dtype=dtype), pool.take_tensor(NUM_CHANNELS, dtype=dtype)

    def work(x: Tensor) -> Any:
        return torch.ops.aten.native_group_norm(
            x, weight, bias, shape[0], NUM_CHANNELS, IMAGE_SIDE * IMAGE_SIDE, NUM_NORM_GROUPS, 1e-5
        )

    return OpCase(work, [(pool.take_tensor(*shape, dtype=dtype),) for _ in range(sets)], shape)


def _make_group_norm_backward(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    import torch

    shape, aten = _image_shape(size, dtype), torch.ops.aten
    weight, bias = pool.take_tensor(NUM_CHANNELS, dtype=dtype), pool.take_tensor(NUM_CHANNELS, dtype=dtype)
    numbers = (shape[0], NUM_CHANNELS, IMAGE_SIDE * IMAGE_SIDE, NUM_NORM_GROUPS)
    _, mean, deviation = aten.native_group_norm(pool.take_tensor(*shape, dtype=dtype), weight, bias, *numbers, 1e-5)

    def work(gradient: Tensor, x: Tensor) -> Any:
        return aten.native_group_norm_backward(gradient, x, mean, deviation, weight, *numbers, [True, True, True])

    return OpCase(work, [tuple(pool.take_tensor(*shape, dtype=dtype) for _ in range(2)) for _ in range(sets)], shape)


def _make_transpose_heads(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    """Copy [b, s, h, d] to contiguous [b, h, s, d]."""
    tokens = _num_rows(size, dtype, NUM_HEADS * HEAD_DIM)
    batch = max(1, tokens // 256)
    shape = (batch, tokens // batch, NUM_HEADS, HEAD_DIM)
    return OpCase(
        lambda x: x.transpose(1, 2).contiguous(), [(pool.take_tensor(*shape, dtype=dtype),) for _ in range(sets)], shape
    )


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


def _random_token_ids(tokens: int, device: str) -> Tensor:
    import torch

    return torch.randint(0, VOCAB_SIZE, (tokens,), device=device)


def _make_embedding(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    import torch

    tokens, table = _num_rows(size, dtype, HIDDEN_SIZE), pool.take_tensor(VOCAB_SIZE, HIDDEN_SIZE, dtype=dtype)
    nbytes = 2.0 * tokens * HIDDEN_SIZE * dtype.itemsize + 8 * tokens
    found = [(_random_token_ids(tokens, pool.device),) for _ in range(sets)]
    return OpCase(
        lambda at: torch.ops.aten.embedding(table, at), found, (tokens, VOCAB_SIZE, HIDDEN_SIZE), moved_bytes=nbytes
    )


def _make_embedding_backward(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    import torch

    tokens = _num_rows(size, dtype, HIDDEN_SIZE)
    pairs = [
        (pool.take_tensor(tokens, HIDDEN_SIZE, dtype=dtype), _random_token_ids(tokens, pool.device))
        for _ in range(sets)
    ]

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

    def work() -> None:
        optimizer.step()

    return OpCase(
        work, [()], (each * len(parameters),), moved_bytes=float(ADAMW_BYTES_PER_PARAMETER * each * len(parameters))
    )


def _make_grad_norm(pool: ColdBufferPool, size: int, sets: int, dtype: torch.dtype) -> OpCase:
    """Squares are added up as training does it: on a CPU in rows (train/ops/grad_norm.py)."""
    import torch

    count = max(GRAD_NORM_ROW, size // dtype.itemsize // GRAD_NORM_ROW * GRAD_NORM_ROW)
    shape = (-1, GRAD_NORM_ROW) if pool.device == "cpu" else (-1,)

    def work(x: Tensor) -> Any:
        return torch.linalg.vector_norm(x.view(shape), dim=-1)

    return OpCase(
        work, [(pool.take_tensor(count),) for _ in range(sets)], (count,), moved_bytes=float(count * dtype.itemsize)
    )
