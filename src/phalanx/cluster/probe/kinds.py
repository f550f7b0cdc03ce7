"""The operations of a training step that are bound by memory: which are measured, with what shapes and bytes.

A kind is the name that torch's dispatcher has for it ("native_layer_norm_backward"): what one sees when one follows a
training step operation by operation, forward and backward. `bytes` are those of all tensors that go in and come out,
and where the table says so, of less or more.

| kind | shape | bytes, where they are not all of what goes in and out |
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

from phalanx.cluster.probe.pool import Pool

if TYPE_CHECKING:
    import torch
    from torch import Tensor

COLUMNS = 1024
HEADS, HEAD_DIM = 8, 64
WIDTH, VOCAB = 512, 8192
CHANNELS, SIDE, GROUPS = 64, 16, 32
NORM_ROW = 4096
"""Elements whose squares are added up in fp32 (train/norms.py)."""
ADAMW_BYTES = 28


@dataclass
class Work:
    """One operation ready to be done on several sets of arguments, each in memory of its own."""

    do: Callable[..., Any]
    sets: Sequence[tuple[Any, ...]]
    shape: tuple[int, ...]
    bytes: float | None = None
    """None: of all tensors that go in and come out."""
    flops: float = 0.0
    alive: list[Any] = field(default_factory=list)
    """What must not be freed meanwhile."""


Make = Callable[[Pool, int, int, "torch.dtype"], Work]
"""From a pool, the bytes of the largest tensor, how many sets of arguments, and a dtype."""


def kinds(dtype: torch.dtype) -> dict[str, Make]:
    """How each kind is made that is measured with tensors of this dtype."""
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
    found: dict[str, Make] = {name: _rows(count, do) for name, (count, do) in rows_of.items()}
    found |= {
        "zeros": _zeros,
        "fill_": lambda pool, size, sets, dtype: _in_place(pool, size, sets, dtype, lambda x: x.fill_(0.5), reads=0),
        "mul_": lambda pool, size, sets, dtype: _in_place(pool, size, sets, dtype, lambda x: x.mul_(1.0), reads=1),
        "add_": _accumulate,
        "_to_copy": _cast,
        "native_layer_norm": _layer_norm,
        "native_layer_norm_backward": _layer_norm_backward,
        "native_group_norm": _group_norm,
        "native_group_norm_backward": _group_norm_backward,
        "transposed": _transposed,
        "embedding": _embedding,
        "embedding_dense_backward": _embedding_backward,
    }
    if dtype == torch.float32:
        found |= {"mul_complex": _rotary, "_fused_adamw_": _adamw, "clip_norm": _clip_norm}
    return found


def moved(arguments: Sequence[Any], result: Any) -> float:
    """Bytes of all tensors that go in and come out; one that repeats itself counts as its storage."""
    import torch

    results = result if isinstance(result, tuple | list) else (result,)
    tensors = [each for each in (*arguments, *results) if isinstance(each, torch.Tensor)]
    return float(sum(min(each.numel() * each.element_size(), each.untyped_storage().nbytes()) for each in tensors))


def _lines(size: int, dtype: torch.dtype, columns: int = COLUMNS) -> int:
    return max(1, size // (dtype.itemsize * columns))


def _rows(count: int, do: Callable[..., Any]) -> Make:
    """Operations on `count` equal matrices."""

    def make(pool: Pool, size: int, sets: int, dtype: torch.dtype) -> Work:
        shape = (_lines(size, dtype), COLUMNS)
        return Work(do, [tuple(pool.take(*shape, dtype=dtype) for _ in range(count)) for _ in range(sets)], shape)

    return make


def _zeros(pool: Pool, size: int, sets: int, dtype: torch.dtype) -> Work:
    import torch

    shape = (_lines(size, dtype), COLUMNS)
    return Work(lambda: torch.zeros(shape, dtype=dtype, device=pool.device), [()] * sets, shape)


def _in_place(pool: Pool, size: int, sets: int, dtype: torch.dtype, do: Callable[[Tensor], object], reads: int) -> Work:
    """`do` changes a tensor of its own: the pool's data must stay what they are."""
    shape = (_lines(size, dtype), COLUMNS)
    owned = [(pool.take(*shape, dtype=dtype).clone(),) for _ in range(sets)]
    nbytes = float(shape[0] * shape[1] * dtype.itemsize)

    def work(x: Tensor) -> None:
        do(x)

    return Work(work, owned, shape, bytes=nbytes * (1 + reads))


def _accumulate(pool: Pool, size: int, sets: int, dtype: torch.dtype) -> Work:
    shape = (_lines(size, dtype), COLUMNS)
    # the sum grows by one term each time: far from overflow, and not a constant that a cache could know
    owned = [(pool.take(*shape, dtype=dtype).clone(), pool.take(*shape, dtype=dtype)) for _ in range(sets)]

    def work(total: Tensor, x: Tensor) -> None:
        total.add_(x)

    return Work(work, owned, shape, bytes=3.0 * shape[0] * shape[1] * dtype.itemsize)


def _cast(pool: Pool, size: int, sets: int, dtype: torch.dtype) -> Work:
    """Into `dtype`, from the one that mixed precision has beside it."""
    import torch

    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    shape = (_lines(size, torch.float32), COLUMNS)
    return Work(lambda x: x.to(dtype), [(pool.take(*shape, dtype=other),) for _ in range(sets)], shape)


def _layer_norm(pool: Pool, size: int, sets: int, dtype: torch.dtype) -> Work:
    import torch

    rows = _lines(size, dtype)
    weight, bias = pool.take(COLUMNS, dtype=dtype), pool.take(COLUMNS, dtype=dtype)

    def work(x: Tensor) -> Any:
        return torch.ops.aten.native_layer_norm(x, [COLUMNS], weight, bias, 1e-5)

    return Work(work, [(pool.take(rows, COLUMNS, dtype=dtype),) for _ in range(sets)], (rows, COLUMNS))


def _layer_norm_backward(pool: Pool, size: int, sets: int, dtype: torch.dtype) -> Work:
    import torch

    rows = _lines(size, dtype)
    weight, bias = pool.take(COLUMNS, dtype=dtype), pool.take(COLUMNS, dtype=dtype)
    # kept by forward in fp32 on a CPU as on a GPU, where the input has fewer bits
    of = torch.ops.aten.native_layer_norm(pool.take(rows, COLUMNS, dtype=dtype), [COLUMNS], weight, bias, 1e-5)
    mean, deviation = of[1], of[2]

    def work(gradient: Tensor, x: Tensor) -> Any:
        backward = torch.ops.aten.native_layer_norm_backward
        return backward(gradient, x, [COLUMNS], mean, deviation, weight, bias, [True, True, True])

    pairs = [tuple(pool.take(rows, COLUMNS, dtype=dtype) for _ in range(2)) for _ in range(sets)]
    return Work(work, pairs, (rows, COLUMNS))


def _images(size: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    return (_lines(size, dtype, CHANNELS * SIDE * SIDE), CHANNELS, SIDE, SIDE)


def _group_norm(pool: Pool, size: int, sets: int, dtype: torch.dtype) -> Work:
    import torch

    shape = _images(size, dtype)
    weight, bias = pool.take(CHANNELS, dtype=dtype), pool.take(CHANNELS, dtype=dtype)

    def work(x: Tensor) -> Any:
        return torch.ops.aten.native_group_norm(x, weight, bias, shape[0], CHANNELS, SIDE * SIDE, GROUPS, 1e-5)

    return Work(work, [(pool.take(*shape, dtype=dtype),) for _ in range(sets)], shape)


def _group_norm_backward(pool: Pool, size: int, sets: int, dtype: torch.dtype) -> Work:
    import torch

    shape, aten = _images(size, dtype), torch.ops.aten
    weight, bias = pool.take(CHANNELS, dtype=dtype), pool.take(CHANNELS, dtype=dtype)
    numbers = (shape[0], CHANNELS, SIDE * SIDE, GROUPS)
    _, mean, deviation = aten.native_group_norm(pool.take(*shape, dtype=dtype), weight, bias, *numbers, 1e-5)

    def work(gradient: Tensor, x: Tensor) -> Any:
        return aten.native_group_norm_backward(gradient, x, mean, deviation, weight, *numbers, [True, True, True])

    return Work(work, [tuple(pool.take(*shape, dtype=dtype) for _ in range(2)) for _ in range(sets)], shape)


def _transposed(pool: Pool, size: int, sets: int, dtype: torch.dtype) -> Work:
    """[b, s, h, d] laid out anew as [b, h, s, d]."""
    tokens = _lines(size, dtype, HEADS * HEAD_DIM)
    batch = max(1, tokens // 256)
    shape = (batch, tokens // batch, HEADS, HEAD_DIM)
    return Work(
        lambda x: x.transpose(1, 2).contiguous(), [(pool.take(*shape, dtype=dtype),) for _ in range(sets)], shape
    )


def _rotary(pool: Pool, size: int, sets: int, dtype: torch.dtype) -> Work:
    """Pairs of features as complex numbers, turned by angles that all samples share."""
    import torch

    tokens = _lines(size, dtype, HEADS * HEAD_DIM)
    batch = max(1, tokens // 256)
    shape = (batch, tokens // batch, HEADS, HEAD_DIM)
    angles = pool.take(shape[1], 1, HEAD_DIM // 2)
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = [(torch.view_as_complex(pool.take(*shape[:-1], HEAD_DIM // 2, 2)), turns) for _ in range(sets)]
    return Work(torch.mul, pairs, shape)


def _indices(tokens: int, device: str) -> Tensor:
    import torch

    return torch.randint(0, VOCAB, (tokens,), device=device)


def _embedding(pool: Pool, size: int, sets: int, dtype: torch.dtype) -> Work:
    import torch

    tokens, table = _lines(size, dtype, WIDTH), pool.take(VOCAB, WIDTH, dtype=dtype)
    nbytes = 2.0 * tokens * WIDTH * dtype.itemsize + 8 * tokens
    found = [(_indices(tokens, pool.device),) for _ in range(sets)]
    return Work(lambda at: torch.ops.aten.embedding(table, at), found, (tokens, VOCAB, WIDTH), bytes=nbytes)


def _embedding_backward(pool: Pool, size: int, sets: int, dtype: torch.dtype) -> Work:
    import torch

    tokens = _lines(size, dtype, WIDTH)
    pairs = [(pool.take(tokens, WIDTH, dtype=dtype), _indices(tokens, pool.device)) for _ in range(sets)]

    def work(gradient: Tensor, at: Tensor) -> Any:
        return torch.ops.aten.embedding_dense_backward(gradient, at, VOCAB, -1, False)

    return Work(work, pairs, (tokens, VOCAB, WIDTH))


def _adamw(pool: Pool, size: int, sets: int, dtype: torch.dtype) -> Work:
    """A step over `size` bytes of parameters in matrices of up to a million elements."""
    import torch

    count = size // dtype.itemsize
    each = min(count, 1 << 20)
    parameters = [torch.nn.Parameter(pool.take(each).clone()) for _ in range(count // each)]
    for parameter in parameters:
        parameter.grad = pool.take(each).clone()
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    optimizer.step()  # makes its state

    def work() -> None:
        optimizer.step()

    return Work(work, [()], (each * len(parameters),), bytes=float(ADAMW_BYTES * each * len(parameters)))


def _clip_norm(pool: Pool, size: int, sets: int, dtype: torch.dtype) -> Work:
    """Squares are added up as training does it: on a CPU in rows (train/norms.py)."""
    import torch

    count = max(NORM_ROW, size // dtype.itemsize // NORM_ROW * NORM_ROW)
    shape = (-1, NORM_ROW) if pool.device == "cpu" else (-1,)

    def work(x: Tensor) -> Any:
        return torch.linalg.vector_norm(x.view(shape), dim=-1)

    return Work(work, [(pool.take(count),) for _ in range(sets)], (count,), bytes=float(count * dtype.itemsize))
