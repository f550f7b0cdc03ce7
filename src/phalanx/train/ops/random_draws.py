"""Random numbers of a forward, keyed by what they act on: dropout, noise, stochastic depth.

A micro-batch's generator is seeded with the run's seed, the step and the index of the micro-batch, and after each block
with the seed before. So a pipeline stage has the numbers of its blocks without those of the blocks before, and a
checkpoint's recomputation, which restores the generator, has those of its forward.

Where ranks hold slices of a tensor (tensor and context parallelism), each draws for the whole tensor and takes its
part. For this, torch's functions are replaced by name: F.dropout and its relatives, torch.rand, randn,
randint, their `_like`, normal and bernoulli; and Tensor's methods such as `uniform_`. What a draw acts on is found from
its shape and place:

    [b, s, ...], [.., s, ..], [b x s, ...]   the sequence, of which context parallelism, and tensor parallelism between
                                             regions, holds a part
    [b, s, f], [b, h, s, s], [b x h, s, s]   features or heads, between a layer cut by columns and one cut by rows
    [b], [b, 1, 1], scalars, vectors         whole on every rank

Any other shape, and draws of experts, raise RecipeError where ranks hold slices.
"""

import functools
import math
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.compat import attend_with_bias, call_after, is_attention_bias
from phalanx.errors import RecipeError

Runs = tuple[tuple[int, int], ...]
"""Runs [start, end) of positions along a dimension, in the order in which a rank holds them."""
Place = tuple[tuple[int, ...], tuple[tuple[int, Runs], ...]]
"""The shape of a whole tensor, and the runs that a rank holds along some of its dimensions."""
SDPA_NAME = "scaled_dot_product_attention"
SELU_ALPHA = 1.7580993408473766  # of torch's alpha_dropout: SELU's scale times its alpha


def derive_seed(*components: object) -> int:
    """Return a 63-bit seed that is a pure function of its components."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, components)).encode()) >> 1


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed the generators that modules use: those of the CPU and of this device."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed also visits every other backend: 100 times slower
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).manual_seed(seed)


def seed_after_blocks(blocks: Iterable[nn.Module]) -> None:
    """Seed the generators after each training forward of each block, outside of what is compiled. The new seed follows
    from the last, so a recomputation that contains blocks repeats it."""

    def seed_next(block: nn.Module) -> None:
        if block.training:
            seed_everything(derive_seed(torch.default_generator.initial_seed()), _state.device)
            _state.widths = frozenset()

    for block in blocks:
        call_after(block, seed_next)


@dataclass(frozen=True)
class HeldSlices:
    """Which slices of a forward's tensors this rank holds. `length` is that of whole sequences, if the data have any,
    of which the rank holds `positions`; in hidden states between tensor-parallel regions only its part of these."""

    batch: int
    length: int | None = None
    positions: Runs = ()
    tensor_rank: int = 0
    tensor_size: int = 1

    def sequence_parts(self, in_region: bool) -> list[Runs]:
        """Return the parts of a sequence that a tensor may have here, the smallest first."""
        found: list[Runs] = []
        count = sum(end - start for start, end in self.positions)
        if self.tensor_size > 1 and not in_region and count % self.tensor_size == 0:
            size = count // self.tensor_size
            found.append(_select_runs(self.positions, self.tensor_rank * size, (self.tensor_rank + 1) * size))
        return [*found, self.positions] if count else []


def _select_runs(runs: Runs, start: int, end: int) -> Runs:
    """Return elements [start, end) of what the runs list."""
    found, offset = [], 0
    for first, last in runs:
        low, high = max(start - offset, 0) + first, min(end - offset, last - first) + first
        if low < high:
            found.append((low, high))
        offset += last - first
    return tuple(found)


Function = TypeVar("Function", bound=Callable[..., Any])


def _trace_as_constant(function: Function) -> Function:
    """Decorate what reads or writes `_state`: torch.compile runs it while it traces, and takes its result for a
    constant without guards."""
    decorated: Function = torch.compiler.assume_constant_result(function)
    return decorated


@dataclass
class _State:
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    slices: HeldSlices | None = None  # None: every tensor is whole
    widths: frozenset[int] = frozenset()  # of features that are cut, from a layer cut by columns to one cut by rows
    widths_before: frozenset[int] = frozenset()
    experts: str = ""  # name of the expert module that is computed


_state = _State()


class MicroBatchSeeds:
    """Random numbers of a run's forwards: a pure function of seed, step and micro-batch, independent of the worker."""

    def __init__(self, seed: int, device: torch.device):
        self._seed, self._device = seed, device
        self._step = 0
        self._micro_batch_indices = range(1 << 62)
        self.slices: HeldSlices | None = None
        """The slices that this rank holds, if tensors are cut."""
        _replace_functions()

    def start_step(self, step: int, micro_batch_indices: range) -> None:
        """Start a step in which this worker computes these micro-batches."""
        self.end_step()
        self._step, self._micro_batch_indices = step, micro_batch_indices

    def seed_micro_batch(self, micro_batch: int) -> None:
        """Seed the forward of this worker's micro-batch with this number within the step."""
        seed_everything(derive_seed(self._seed, self._step, self._micro_batch_indices[micro_batch]), self._device)
        _state.device, _state.slices, _state.widths = self._device, self.slices, frozenset()
        if self.slices is not None:
            _replace_for_slices()

    def end_step(self) -> None:
        """End the step: what draws between steps has whole tensors."""
        _state.slices = None


@_trace_as_constant
def locate(shape: Sequence[int]) -> Place | None:
    """Return the whole tensor of which this rank draws a part of this shape; None if the part is the whole. RecipeError
    if unknown."""
    slices, widths = _state.slices, _state.widths
    thread = threading.current_thread()
    if thread is not threading.main_thread() and not thread.name.startswith("Dummy"):
        return None  # a thread that reads data; those of autograd, which recomputes forwards, are no Python threads
    if _state.experts:
        raise RecipeError(
            f"parallelism: {_state.experts} draws random numbers (dropout, noise) for rows in the order of experts, "
            "which depends on the parallelism; draw them outside of the experts, or use tensor, context and expert 1"
        )
    if slices is None or math.prod(shape) <= 1:
        return None
    whole, parts = list(shape), []
    candidates = slices.sequence_parts(in_region=bool(widths))
    sequence = _find_sequence(shape, slices, candidates)
    if sequence is not None:
        dim, runs, folded = sequence
        whole[dim : dim + 1] = [slices.batch, slices.length or 0] if folded else [slices.length or 0]
        parts.append((dim - len(shape), runs))  # from the end: dimensions that are unfolded come before
    elif len(shape) > 1 and shape[0] not in (1, slices.batch) and candidates[:1] not in ([], [((0, slices.length),)]):
        raise RecipeError(
            f"parallelism: the model draws random numbers of shape {list(shape)}, and it is unknown which part of the "
            f"sequence they are for; draw them for [batch, sequence, ...] (here {slices.batch} x "
            f"{sum(end - start for start, end in slices.positions)} positions), or use tensor and context 1"
        )
    features = _find_features(shape, slices, widths, None if sequence is None else sequence[0]) if widths else None
    if features is not None:
        if features == 0:  # heads in the first dimension, with the batch
            whole[:1] = [slices.batch, shape[0] // slices.batch]
        cut = features or -len(shape)
        size = whole[cut]
        whole[cut] = size * slices.tensor_size
        parts.append((cut, ((slices.tensor_rank * size, (slices.tensor_rank + 1) * size),)))
    kept = tuple((dim, runs) for dim, runs in parts if runs != ((0, whole[dim]),))
    return (tuple(whole), kept) if kept else None


def _find_sequence(
    shape: Sequence[int], slices: HeldSlices, candidates: Sequence[Runs]
) -> tuple[int, Runs, bool] | None:
    """Return the dimension of the sequence, its part here, and whether the batch is folded into it."""
    for runs in candidates:
        count = sum(end - start for start, end in runs)
        if count == 1:
            continue
        if shape[0] == slices.batch * count and (len(shape) > 1 or slices.batch > 1):
            return 0, runs, True
        for dim in range(len(shape) > 1, len(shape)):
            if shape[dim] == count:
                return dim, runs, False
    return None


def _find_features(
    shape: Sequence[int], slices: HeldSlices, widths: frozenset[int], sequence: int | None
) -> int | None:
    """Return the dimension of features or heads, from the end; 0 for heads that are folded into the batch."""
    if len(shape) <= 3:
        if shape[-1] in widths:
            return -1
        heads, rest = divmod(shape[0], slices.batch)
        return 0 if len(shape) == 3 and sequence != 0 and heads > 1 and not rest else None
    lengths = {1, slices.length, sum(end - start for start, end in slices.positions)}
    return next((dim - len(shape) for dim in range(1, len(shape)) if shape[dim] not in lengths), None)


def _take(whole: Tensor, place: Place, shape: Sequence[int]) -> Tensor:
    """Return this rank's part."""
    for dim, runs in place[1]:
        pieces = [whole.narrow(dim, start, end - start) for start, end in runs]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return whole.reshape(shape)


@_trace_as_constant
def enter_columns() -> None:
    """Note that a layer cut by columns begins: its input has whole features."""
    _state.widths_before, _state.widths = _state.widths, frozenset()


@_trace_as_constant
def leave_columns(width: int, parts: int) -> None:
    """Note that features are cut from here on, besides those that were: `width` of them here, in `parts` fused ones."""
    _state.widths = _state.widths_before | {width, width // parts}


@_trace_as_constant
def leave_rows() -> None:
    """Note that what follows a layer cut by rows has whole features."""
    _state.widths = frozenset()


@_trace_as_constant
def _set_experts(name: str) -> None:
    _state.experts = name


def refuse_draws(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of the expert module `name` so that random draws in it raise RecipeError."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        _set_experts(name)
        try:
            return forward(*args, **kwargs)
        finally:
            _set_experts("")

    return checked


class WholeFeatures(AbstractContextManager[None]):
    """A context that begins with whole features. It can be entered twice."""

    def __init__(self) -> None:
        self._before: list[frozenset[int]] = []

    def __enter__(self) -> None:
        self._before.append(_state.widths)
        _state.widths = frozenset()

    def __exit__(self, *error: object) -> None:
        _state.widths = self._before.pop()


def draw_kept(shape: Sequence[int], p: float, like: Tensor, place: Place | None) -> Tensor:
    """Return which elements dropout keeps, in the order of a contiguous tensor: bool of this shape."""
    whole = torch_dropout(torch.ones(shape if place is None else place[0], dtype=like.dtype, device=like.device), p)
    return (whole if place is None else _take(whole, place, shape)) != 0


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Drop out elements as F.dropout does, but those of the whole tensor, in the order of a contiguous one."""
    if not training or not 0 < p < 1:
        return torch_dropout(input, p, training, inplace)
    place = locate(tuple(input.shape))
    if place is None and input.is_contiguous():
        return torch_dropout(input, p, True, inplace)
    kept = draw_kept(input.shape, p, input, place)
    return input.mul_(kept).mul_(1 / (1 - p)) if inplace else input * kept * (1 / (1 - p))


def _replace_dropout(
    original: Callable[..., Tensor], features: bool, alpha: bool, unbatched_dims: int = 0
) -> Callable[..., Tensor]:
    """Make the replacement of a relative of F.dropout: one that drops out whole features (channels), or keeps mean and
    deviation (alpha)."""

    def replacement(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        channels = 1 if input.dim() == unbatched_dims else 2
        shape = (*input.shape[:channels], *[1] * (input.dim() - channels)) if features else tuple(input.shape)
        place = locate(shape) if training and 0 < p < 1 else None
        if place is None:
            return original(input, p, training, inplace)
        kept = draw_kept(shape, p, input, place)
        if not alpha:
            return input * kept * (1 / (1 - p))
        a = ((SELU_ALPHA**2 * p + 1) * (1 - p)) ** -0.5
        result: Tensor = torch.where(kept, input, -SELU_ALPHA) * a + SELU_ALPHA * a * p
        return result

    return replacement


def _unless_keyed(original: Callable[..., Tensor], replacement: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Leave draws from a generator of the caller's own as they are: data sets key their samples so."""

    def chosen(*args: Any, **kwargs: Any) -> Tensor:
        own = kwargs.get("generator") is not None
        return original(*args, **kwargs) if own else replacement(*args, **kwargs)

    return chosen


def _replace_factory(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make the replacement of torch.rand, randn or randint, which take the size last."""

    def replacement(*args: Any, size: Any = None, **kwargs: Any) -> Tensor:
        if size is None:
            is_last = original is torch_randint or (len(args) == 1 and not isinstance(args[0], int))
            size = args[-1] if is_last else args
            args = args[:-1] if original is torch_randint else ()
        place = locate(tuple(size))
        whole = original(*args, size if place is None else place[0], **kwargs)
        return whole if place is None else _take(whole, place, size)

    return _unless_keyed(original, replacement)


def _replace_like(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make the replacement of torch.rand_like, randn_like or randint_like."""

    def replacement(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        place = locate(tuple(input.shape))
        if place is None:
            return original(input, *args, **{"memory_format": torch.contiguous_format, **kwargs})
        return _take(original(input.new_empty(place[0]), *args, **kwargs), place, input.shape)

    return _unless_keyed(original, replacement)


def _replace_normal(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make the replacement of torch.normal."""

    def replacement(mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
        shape = (mean + std if isinstance(mean, Tensor) else std).shape if size is None else size
        place = locate(tuple(shape))
        if place is None:
            return original(mean, std, **kwargs) if size is None else original(mean, std, size, **kwargs)
        noise = original(0.0, 1.0, place[0], device=std.device if isinstance(std, Tensor) else None, **kwargs)
        result: Tensor = mean + std * _take(noise, place, shape)
        return result

    return _unless_keyed(original, replacement)


def _replace_bernoulli(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make the replacement of torch.bernoulli, and of the method."""

    def replacement(input: Tensor, p: float | None = None, **kwargs: Any) -> Tensor:
        place = locate(tuple(input.shape))
        if place is None:
            return original(input, **kwargs) if p is None else original(input, p, **kwargs)
        drawn = _take(torch_rand(place[0], device=input.device, **kwargs), place, input.shape)
        return (drawn < (input if p is None else p)).to(input.dtype)

    return _unless_keyed(original, replacement)


def _replace_in_place(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make the replacement of a method that fills a tensor with random numbers."""

    def replacement(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        place = locate(tuple(self.shape))
        if place is None:
            return original(self, *args, **kwargs)
        if any(isinstance(value, Tensor) and value.dim() for value in (*args, *kwargs.values())):
            probability, *_ = (*args, *kwargs.values())  # only `bernoulli_` takes one
            return self.copy_(_take(torch_rand(place[0], device=self.device), place, self.shape) < probability)
        return self.copy_(_take(original(self.new_empty(place[0]), *args, **kwargs), place, self.shape))

    return _unless_keyed(original, replacement)


def _refuse_cut(
    original: Callable[..., Tensor], name: str, draws: Callable[..., bool] = lambda *args, **kwargs: True
) -> Callable[..., Tensor]:
    """Make the replacement of a function that cannot draw for a whole tensor, and `draws` with some arguments only."""

    def replacement(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if draws(*args, **kwargs) and locate(tuple(input.shape)) is not None:
            raise RecipeError(
                f"parallelism: the model calls {name} on {list(input.shape)}, a part of a tensor, and it cannot draw "
                "for the whole; draw by torch.rand, or use tensor and context 1"
            )
        return original(input, *args, **kwargs)

    return replacement


@_trace_as_constant
def cut_heads(heads: int) -> tuple[int, int]:
    """Return the first of this rank's `heads` heads here, and the number of all."""
    slices = _state.slices
    if slices is None or not _state.widths:
        return 0, heads
    return slices.tensor_rank * heads, slices.tensor_size * heads


def draw_kept_scores(query: Tensor, first_head: int, num_heads: int, length: int, p: float) -> Tensor:
    """Return which scores of attention are kept: bool [b, h, s, s] for the heads of `query` [b, h, ..., d] from
    `first_head` on, of `num_heads`, over whole sequences of `length`."""
    batch, heads = query.shape[:2]
    kept = draw_kept((batch, num_heads, length, length), p, query, None)
    return kept[:, first_head : first_head + heads]


def attend_dropping(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: Tensor,
    p: float,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention in which the scores that are not `kept` [b, h, q, k] are dropped out. All scores are in memory."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1) * kept * (1 / (1 - p))).to(value.dtype) @ value


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention, with the dropout of all heads where ranks hold some of them."""
    if is_attention_bias(attn_mask):
        return attend_with_bias(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    first, heads = cut_heads(query.shape[1]) if dropout_p > 0 else (0, 0)
    if dropout_p == 0 or heads == query.shape[1] or query.shape[2] != key.shape[2]:
        return torch_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    kept = draw_kept_scores(query, first, heads, query.shape[2], dropout_p)
    return attend_dropping(query, key, value, kept, dropout_p, mask=attn_mask, causal=is_causal, scale=scale)


torch_dropout = F.dropout
torch_attention = F.scaled_dot_product_attention
torch_rand = torch.rand
torch_randint = torch.randint
_FUNCTION_REPLACEMENTS: dict[tuple[Any, str], Callable[..., Any]] = {
    (F, "dropout"): dropout,
    (F, "dropout1d"): _replace_dropout(F.dropout1d, features=True, alpha=False, unbatched_dims=2),
    (F, "dropout2d"): _replace_dropout(F.dropout2d, features=True, alpha=False),
    (F, "dropout3d"): _replace_dropout(F.dropout3d, features=True, alpha=False, unbatched_dims=4),
    (F, "alpha_dropout"): _replace_dropout(F.alpha_dropout, features=False, alpha=True),
    (F, "feature_alpha_dropout"): _replace_dropout(F.feature_alpha_dropout, features=True, alpha=True),
    (F, "rrelu"): _refuse_cut(F.rrelu, "rrelu", lambda lower=0.0, upper=0.0, training=False, inplace=False: training),
    (torch, "dropout"): lambda input, p, train: dropout(input, p, train),
    **{(torch, name): _replace_factory(getattr(torch, name)) for name in ("rand", "randn", "randint")},
    **{(torch, name): _replace_like(getattr(torch, name)) for name in ("rand_like", "randn_like", "randint_like")},
    (torch, "normal"): _replace_normal(torch.normal),
    (torch, "bernoulli"): _replace_bernoulli(torch.bernoulli),
    **{(torch, name): _refuse_cut(getattr(torch, name), name) for name in ("multinomial", "poisson", "binomial")},
}
"""Replacements by owner and name, from the first run in a process on."""
_FILLING_METHODS = ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
_METHOD_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    **{f"{name}_": _replace_in_place(getattr(Tensor, f"{name}_")) for name in _FILLING_METHODS},
    "bernoulli": _replace_bernoulli(Tensor.bernoulli),
    "multinomial": _refuse_cut(Tensor.multinomial, "multinomial"),
}
"""Replacements of methods."""


@functools.cache  # once: Python slows down a class that changes often, and callbacks may wrap what they find
def _replace_functions() -> None:
    """Replace torch's functions."""
    _replace_everywhere(_FUNCTION_REPLACEMENTS)


def _replace_everywhere(functions: Mapping[tuple[Any, str], Callable[..., Any]]) -> None:
    """Replace functions by owner and name, also where modules of others have imported them by a name of their own."""
    replacements = {id(getattr(owner, name)): replacement for (owner, name), replacement in functions.items()}
    for package, module in list(sys.modules.items()):
        if package.partition(".")[0] not in ("torch", "phalanx") and hasattr(module, "__dict__"):
            for name, value in list(vars(module).items()):
                if id(value) in replacements:
                    setattr(module, name, replacements[id(value)])
    for (owner, name), replacement in functions.items():
        setattr(owner, name, replacement)


@functools.cache
def _replace_for_slices() -> None:
    """Replace what matters only in a process that holds slices."""
    for name, replacement in _METHOD_REPLACEMENTS.items():
        setattr(Tensor, name, replacement)
    _replace_everywhere({(F, SDPA_NAME): attention})
