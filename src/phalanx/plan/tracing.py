"""From an `nn.Module` to its `Profile`, without memory and without time: the model is followed on the meta device,
where tensors have shapes and nothing else, forward and backward.

Two micro-batches of different size are followed, and what differs between them grows with the samples. A block that is
repeated is followed once; the others of its shape are stepped over. Attention is caught before torch takes it apart,
since on the meta device it would choose the mathematical kernel, which stores s x s scores that no GPU stores.

How tensor parallelism divides a block follows from how its data flow (Shoeybi et al. 2019, Megatron-LM, section 3): a
product of a whole activation with a weight is divided by columns and leaves a divided activation; the next weight to
meet that is divided by rows, and a sum over ranks makes the result whole. What lies between inherits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from phalanx.compat import fake_tensors, handling, without_compiler
from phalanx.plan.experts import merged
from phalanx.plan.lifetimes import Trail, alive, fullest, fused, spans
from phalanx.plan.profile import (
    Attention,
    Divided,
    Kept,
    Move,
    Operation,
    Phase,
    Product,
    Profile,
    Reduce,
    Segment,
    Size,
    Weights,
)

Forward = Callable[[nn.Module, int], Tensor]
"""A loss of so many samples, as a tensor on the meta device."""
SAMPLES = (2, 3)
"""Micro-batches that are followed: from 2, since a dimension of 1 is often treated apart."""
NARROW = 16
"""A product whose result is so many times narrower than what it reads (a router, a gate) is not worth dividing."""
FREE = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias", "lift_fresh"}
)
"""Operations that cost nothing, beside views."""
RANDOM = frozenset(
    {"normal_", "uniform_", "fill_", "zero_", "trunc_normal_", "copy_", "mul_", "div_", "add_", "clamp_", "erfinv_"}
)
"""What initialisation does to weights: skipped, there is nothing to fill."""


def build(make: Callable[[], nn.Module], dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> nn.Module:
    """The module that `make` returns, on the meta device, in `dtype`, in training mode."""

    def handle(operation: Any, args: Any, kwargs: Any) -> Any:
        if _name(operation) in RANDOM and isinstance(args[0], nn.Parameter):
            return args[0]
        return operation(*args, **kwargs)

    with without_compiler(), torch.device(device), handling(handle):
        model = make()
        # tensors that only pretend to be on a device cannot be exchanged, so nothing is where nothing would change
        wrong = any(it.is_floating_point() and it.dtype != dtype for it in model.parameters())
        return (model.to(dtype) if wrong else model).train()


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def profile_mixed(make: Callable[[], nn.Module], forward: Forward, tokens: int) -> Profile:
    """The profile of a model with weights in fp32 that computes in bf16 on a CPU, as autocast has it: which operations
    are in which precision only that device's dispatcher knows, so tensors pretend to be on it."""

    def mixed(model: nn.Module, samples: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(model, samples)

    with fake_tensors(symbols=False):
        return profile(build(make, torch.float32, "cpu"), mixed, tokens)


def language_loss(vocab: int, sequence: int) -> Forward:
    """Cross-entropy in fp32 of a model from tokens [b, s] to logits [b, s, v]."""

    def forward(model: nn.Module, samples: int) -> Tensor:
        tokens = torch.zeros(samples, sequence, dtype=torch.int64, device=_device(model))
        logits = model(tokens)
        logits = getattr(logits, "logits", logits)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    return forward


def image_loss(channels: int, height: int, width: int) -> Forward:
    """Cross-entropy in fp32 of a model from images [b, c, h, w] to logits [b, classes]."""

    def forward(model: nn.Module, samples: int) -> Tensor:
        dtype = next(model.parameters()).dtype
        images = torch.zeros(samples, channels, height, width, dtype=dtype, device=_device(model))
        logits = model(images)
        return F.cross_entropy(logits.float(), torch.zeros(samples, dtype=torch.int64, device=_device(model)))

    return forward


def profile(model: nn.Module, forward: Forward, tokens: int) -> Profile:
    """The profile of a model on the meta device; `forward(model, samples)` gives its loss, a sample has `tokens`."""
    with without_compiler():
        few, more = (_follow(model, forward, samples) for samples in SAMPLES)
    if [len(each.operations) for each in few] != [len(each.operations) for each in more]:
        raise ValueError("the number of operations depends on the number of samples, so none can be foretold")
    segments = tuple(_segment(a, b) for a, b in zip(few, more, strict=True))
    used = [name for each in few for name in each.named]
    sizes = {name: each.named[name] for each in few for name in each.named}
    tied = sum(sizes[name] * (used.count(name) - 1) for name in sizes)
    return Profile(_untied(segments, few), tokens, tied)


# --- following one micro-batch ------------------------------------------------------------------------------------


@dataclass
class _Op:
    """An operation for one number of samples: its kind, numbers that may grow with them, and the rest."""

    kind: type
    sizes: dict[str, float]
    rest: dict[str, Any]


@dataclass
class _Part:
    """A segment as it is being followed."""

    name: str
    is_block: bool
    repeats: int = 1
    operations: list[_Op] = field(default_factory=list)
    named: dict[str, int] = field(default_factory=dict)
    """Elements of its parameters."""
    divided: dict[str, Divided] = field(default_factory=dict)
    """How tensor parallelism divides each of its parameters: by "n" columns, "k" rows."""
    experts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of its parameters that are stacks of experts' matrices."""
    frozen: set[str] = field(default_factory=set)
    kept: dict[int, tuple[float, bool]] = field(default_factory=dict)
    results: dict[int, tuple[float, bool]] = field(default_factory=dict)
    boundary: float = 0.0
    reads: list[tuple[int, dict[int, float], dict[int, float]]] = field(default_factory=list)
    """Of each operation bound by memory: its index, and bytes of storages read and written."""
    touched: dict[int, list[int]] = field(default_factory=dict)
    """Indices of operations that read a storage."""
    made: dict[int, int] = field(default_factory=dict)
    """Index of the operation that made a storage."""
    storages: dict[int, tuple[float, bool]] = field(default_factory=dict)
    """Bytes of what was made or read in forward, and whether it is divided."""
    sizes: dict[int, tuple[float, bool]] = field(default_factory=dict)
    """The same of both phases, without weights and their gradients."""

    @property
    def backward(self) -> set[int]:
        """Indices of the operations of backward."""
        return {index for index, each in enumerate(self.operations) if each.rest["phase"] == "backward"}


def _follow(model: nn.Module, forward: Forward, samples: int) -> list[_Part]:
    follower = _Follower(model)
    with _blocks_stepped_over(model, follower), _Catching(follower), handling(follower.handle), follower.keeping():
        loss = forward(model, samples)
        follower.phase = "backward"
        outside = {name for part in follower.course if not part.is_block for name in part.named}
        wanted: list[Tensor] = [
            follower.parameters[name] for name in outside if follower.parameters[name].requires_grad
        ]
        wanted += follower.anchors
        if wanted:
            torch.autograd.grad(loss, wanted, allow_unused=True)
    for part in follower.course:
        part.sizes = {
            key: (size, follower.divided.get(key, False))
            for key, (size, _) in part.sizes.items()
            if key not in follower.gradients and follower.keepers.get(key, part) is part
        }
    return _joined([part for part in follower.course if part.operations])


def _joined(course: list[_Part]) -> list[_Part]:
    """Parts in their order, where a block that comes several times in a row is one that is repeated."""
    found: list[_Part] = []
    for part in course:
        if found and part.is_block and found[-1].operations is part.operations:
            found[-1].repeats += 1
        else:
            found.append(replace(part))
    return found


class _Follower:
    """Records what is done, in the part that is being computed."""

    def __init__(self, model: nn.Module) -> None:
        self.phase: Phase = "forward"
        self.course = [_Part("before the blocks", False)]
        self.part = self.course[0]
        self.known: dict[tuple[Any, ...], tuple[_Part, Any]] = {}
        self.names: dict[int, str] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.divided: dict[int, bool] = {}
        self.partial: set[int] = set()
        """Storages of which each tensor-parallel rank has a term of a sum that has not been taken yet."""
        self.gradients: set[int] = set()
        """Storages that hold gradients of weights."""
        self.keepers: dict[int, _Part] = {}
        """Which part keeps a storage for backward: the first that does, if the next keeps it as well."""
        self.anchors: list[Tensor] = []
        """What stands for the trained weights of blocks that nothing trained comes before."""
        self._alive: list[Any] = []
        for name, parameter in model.named_parameters():  # tied ones once
            self.names[self.key(parameter)] = name
            self.parameters[name] = parameter

    def key(self, tensor: Tensor) -> int:
        """What tells a storage from others, kept alive so that it stays so."""
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        return id(storage)

    def keeping(self) -> contextlib.AbstractContextManager[None]:
        """A context that records what autograd keeps for backward."""

        def pack(tensor: Tensor) -> Tensor:
            key = self.key(tensor)
            if (
                key not in self.names
                and self.phase == "forward"
                and self.keepers.setdefault(key, self.part) is self.part
            ):
                self.part.kept[key] = (tensor.untyped_storage().nbytes(), self.divided.get(key, False))
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def handle(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Do an operation and record it."""
        result = operation(*args, **kwargs)
        name, inputs, outputs = _name(operation), _tensors((args, kwargs)), _tensors(result)
        if name in FREE or not outputs:
            return result
        known = {self.key(each) for each in inputs}
        made = [each for each in outputs if self.key(each) not in known]
        if not made and not name.endswith("_"):  # a view
            return result
        if name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm"):
            self._product(name, inputs, outputs[0])
        elif name in ("convolution", "convolution_backward"):
            self._convolution(name, args, outputs)
        else:
            self._move(name, inputs, outputs, bool(made))
        return result

    def attention(self, phase: Phase, query: Tensor, key: Tensor, value: Tensor, causal: bool, *others: Tensor) -> None:
        """Record a fused attention. `others`: what else it reads."""
        batch = math.prod(query.shape[:-3])
        self.whole(query, key)
        self._read(query, key, value, *others)
        divided = self.divided.get(self.key(query), False)
        rest = {
            "phase": phase,
            "heads": query.shape[-3],
            "kv_heads": key.shape[-3],
            "queries": query.shape[-2],
            "keys": key.shape[-2],
            "head_dim": query.shape[-1],
            "causal": causal,
            "width": query.element_size(),
            "divided": divided,
        }
        self.part.operations.append(_Op(Attention, {"samples": batch}, rest))

    def result_of_attention(self, outputs: list[Tensor], like: Tensor) -> None:
        """Outputs are divided as what they were made from, and selective recomputation keeps them."""
        self._made(*outputs)
        for each in outputs:
            self.divided[self.key(each)] = self.divided.get(self.key(like), False)
            if self.phase == "forward":
                self.part.results[self.key(each)] = (each.untyped_storage().nbytes(), self.divided[self.key(each)])

    def whole(self, *tensors: Tensor) -> None:
        """Take the sums over ranks that are still to be taken of tensors."""
        for each in tensors:
            if self.key(each) in self.partial:
                self.partial.discard(self.key(each))
                self.part.operations.append(_Op(Reduce, {"size": _bytes(each)}, {"phase": self.phase}))

    def _made(self, *outputs: Tensor) -> None:
        """Remember which operation makes a tensor."""
        for each in outputs:
            self.part.made.setdefault(self.key(each), len(self.part.operations) - 1)
            self._met(each)

    def _met(self, tensor: Tensor) -> None:
        """Remember how large a tensor is, if it is no weight."""
        if (key := self.key(tensor)) not in self.names:
            self.part.sizes[key] = (tensor.untyped_storage().nbytes(), False)

    def _gradient_of_weight(self, *outputs: Tensor) -> None:
        """Remember that tensors are gradients of weights."""
        self.gradients |= {self.key(each) for each in outputs}

    def _product(self, name: str, inputs: list[Tensor], out: Tensor) -> None:
        *added, left, right = inputs
        self.whole(left, right)
        count = left.shape[0] if left.dim() == 3 else 1
        if name == "_grouped_mm":
            count = right.shape[0] if right.dim() == 3 else left.shape[0]
        m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
        divided, result_is, weight = self._divide(left, right, count, k, n)
        self._read(*inputs)
        self._biased(added, divided)
        rest = {"phase": self.phase, "width": left.element_size(), "divided": divided, "weight": weight}
        self.part.operations.append(_Op(Product, {"count": count, "m": m, "n": n, "k": k}, rest))
        self._made(out)
        self.divided[self.key(out)] = result_is
        if self.phase == "backward" and weight and not any(self.key(each) in self.names for each in (left, right)):
            self._gradient_of_weight(out)
        if self.phase == "forward":
            self.part.results[self.key(out)] = (out.untyped_storage().nbytes(), result_is)
        if weight and divided == "k":
            self.partial.add(self.key(out))

    def _divide(self, left: Tensor, right: Tensor, count: int, k: int, n: int) -> tuple[Divided, bool, bool]:
        """The dimension that tensor parallelism divides, whether the result is divided, and whether weights take part.
        In backward what forward decided holds."""
        split_left = self.divided.get(self.key(left), False)
        split_right = self.divided.get(self.key(right), False)
        weight = self.names.get(self.key(right)) or self.names.get(self.key(left))
        if weight is None:
            if count > 1:
                return ("count" if split_left or split_right else ""), split_left or split_right, False
            if split_left and split_right:
                return "k", False, True
            # the gradient of a weight, or what stands for one
            return ("m" if split_left else "n" if split_right else ""), split_left or split_right, True
        if self._is_expert(weight):
            self.part.experts[weight] = tuple(self.parameters[weight].shape)
            return "", False, True
        how = self.part.divided.get(weight)
        if how is None:
            how = "k" if split_left else "n" if n * NARROW >= k else ""
            self.part.divided[weight] = how
        if self.phase == "forward":
            return how, how == "n", True
        # The gradient of a product's input: columns became what is summed over, and the other way round.
        if how == "n":
            return "k", False, True
        return ("n", True, True) if how == "k" else ("", False, True)

    def _biased(self, added: list[Tensor], divided: Divided) -> None:
        """Divide biases as the columns that they are added to."""
        for each in added:
            if (bias := self.names.get(self.key(each))) is not None:
                self.part.divided.setdefault(bias, "n" if divided == "n" else "")

    def _is_expert(self, name: str) -> bool:
        return self.parameters[name].dim() == 3

    def _convolution(self, name: str, args: Any, outputs: list[Tensor]) -> None:
        """A convolution as the product it amounts to: one row for each place of its result, and the backward one as the
        two products of its gradients."""
        if name == "convolution":
            image, kernel, groups, out = args[0], args[1], args[8], outputs[0]
            added = [args[2]] if args[2] is not None else []
            self._read(image, kernel, *added)
            self._biased(added, "")
        else:
            out, image, kernel, groups = args[0], args[1], args[2], args[9]
            self._read(out, image, kernel)
        rows = out.shape[0] * math.prod(out.shape[2:])
        columns, depth = kernel.shape[0] // groups, math.prod(kernel.shape[1:])
        if weight := self.names.get(self.key(kernel)):
            self.part.divided.setdefault(weight, "")
        shapes = [(rows, columns, depth)]
        if name == "convolution_backward":
            wanted = args[10]
            shapes = [(rows, depth, columns)] * bool(wanted[0]) + [(depth, columns, rows)] * bool(wanted[1])
        for m, n, k in shapes:
            rest = {"phase": self.phase, "width": image.element_size(), "divided": "", "weight": True}
            self.part.operations.append(_Op(Product, {"count": groups, "m": m, "n": n, "k": k}, rest))
        self._made(*outputs)
        if name == "convolution_backward":
            self._gradient_of_weight(*outputs[1 if args[10][0] else 0 :])
        if self.phase == "forward":
            self.part.results[self.key(out)] = (out.untyped_storage().nbytes(), False)

    def _move(self, name: str, inputs: list[Tensor], outputs: list[Tensor], makes: bool) -> None:
        terms = {self.key(each) for each in inputs if each.is_floating_point()}
        if terms and terms <= self.partial and name in ("add", "add_"):
            self.partial |= {self.key(each) for each in outputs}  # a sum of terms can wait, too
        else:
            self.whole(*inputs)
        divided = any(self.divided.get(self.key(each), False) for each in inputs)
        for each in outputs:
            self.divided[self.key(each)] = divided
        read = {self.key(each): _bytes(each) for each in inputs}
        written = {self.key(each): _bytes(each) for each in outputs}
        if name in ("embedding", "index", "index_select", "gather"):
            read[self.key(inputs[0])] = sum(written.values())  # only the rows that are picked
        if name == "embedding" and (weight := self.names.get(self.key(inputs[0]))):
            self.part.divided.setdefault(weight, "n")
        largest = max([*inputs, *outputs], key=lambda each: each.numel())
        self.part.reads.append((len(self.part.operations), read, written))
        self._read(*inputs)
        rest = {"phase": self.phase, "name": name, "divided": divided, "shape": tuple(largest.shape)}
        rest["width"] = largest.element_size()
        if name == "_to_copy" and (weight := self.names.get(self.key(inputs[0]))) is not None:
            self.names[self.key(outputs[0])] = weight  # a weight in another precision is that weight
        self.part.operations.append(_Op(Move, {"moved": sum(read.values()) + sum(written.values())}, rest))
        self._made(*outputs)
        floating = [each for each in inputs if each.is_floating_point()]
        of_weights = floating and all(self.key(each) in self.gradients for each in floating)
        if name == "embedding_dense_backward" or of_weights:
            self._gradient_of_weight(*outputs)

    def _read(self, *inputs: Tensor) -> None:
        for each in inputs:
            key = self.key(each)
            self.part.touched.setdefault(key, []).append(len(self.part.operations))
            self._met(each)
            if self.phase == "forward" and key not in self.names:
                self.part.storages[key] = (each.untyped_storage().nbytes(), self.divided.get(key, False))
            if (name := self.names.get(key)) is not None:
                self.part.named[name] = self.parameters[name].numel()
                if not self.parameters[name].requires_grad:
                    self.part.frozen.add(name)


class _Attend(torch.autograd.Function):
    """Fused attention that computes nothing: outputs of the right shape, and a record of both phases. It keeps what a
    fused kernel keeps: queries, keys, values, the result, and a sum for each query (Dao et al. 2022)."""

    @staticmethod
    def forward(ctx: Any, follower: _Follower, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        # Laid out as fused kernels do it, [.., s, h, d]: what follows joins the heads without copying.
        out = query.new_empty((*query.shape[:-3], query.shape[-2], query.shape[-3], value.shape[-1])).transpose(-3, -2)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        follower.attention("forward", query, key, value, causal)
        follower.result_of_attention([out, sums], query)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.follower, ctx.causal = follower, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, sums = ctx.saved_tensors
        ctx.follower.attention("backward", query, key, value, ctx.causal, out, sums, grad)
        found = [torch.empty_like(each) for each in (query, key, value)]
        ctx.follower.result_of_attention(found, query)
        return (None, *found, None)


class _Catching(TorchFunctionMode):
    """Puts `_Attend` in the place of torch's fused attention, and dropout as GPUs do it, which keeps a mask of a byte
    for each element, in the place of the meta device's, which keeps a factor."""

    def __init__(self, follower: _Follower) -> None:
        super().__init__()
        self._follower = follower

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            # a mask over all pairs is computed in full by every kernel
            causal = bool(given.get("is_causal", False))
            return _Attend.apply(self._follower, given["query"], given["key"], given["value"], causal)
        if func is F.dropout:
            given = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
            if given.get("training", True) and given.get("p", 0.5) > 0:
                return torch.native_dropout(given["input"], given.get("p", 0.5), True)[0]
            return given["input"]
        return func(*args, **kwargs)


# --- blocks -----------------------------------------------------------------------------------------------------------


def repeated(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a model: members of lists in which at least two have the same shape; the outermost lists count."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(name.startswith(f"{it}.") for it, _ in found):
            continue
        shapes = [_shape(child) for child in module]
        alike = [child for child in module.named_children() if shapes.count(_shape(child[1])) > 1]
        if any(shape for shape in shapes) and alike:
            found += [(f"{name}.{it}", child) for it, child in alike if next(child.parameters(), None) is not None]
    return found


def _shape(module: nn.Module) -> tuple[Any, ...]:
    """What two modules of the same structure share."""
    parameters = tuple((name, tuple(it.shape), it.requires_grad) for name, it in module.named_parameters())
    return (type(module), parameters) if parameters else ()


@contextlib.contextmanager
def _blocks_stepped_over(model: nn.Module, follower: _Follower) -> Iterator[None]:
    """Within it, blocks are followed apart from what surrounds them, and only one of each shape."""
    blocks = repeated(model)
    for name, block in blocks:
        vars(block)["forward"] = _stepping(name, block, follower)
    try:
        yield
    finally:
        for _, block in blocks:
            del vars(block)["forward"]


def _stepping(name: str, block: nn.Module, follower: _Follower) -> Callable[..., Any]:
    """The forward of a block that is only followed if none of its shape has been, with inputs of the same shapes."""
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        inputs = _tensors((args, kwargs))
        key = (_shape(block), repr(_outline((args, kwargs))), tuple(each.requires_grad for each in inputs))
        before = follower.part
        if key not in follower.known:
            follower.part = _Part(name, True)
            follower.known[key] = (follower.part, _follow_block(inner, args, kwargs, follower))
        part, (outline, keeps) = follower.known[key]
        follower.course += [part, _Part(f"after {name}", False)]
        follower.part = follower.course[-1]
        wanted = [each for each in inputs if each.requires_grad]
        if not wanted and any(each.requires_grad for each in block.parameters()):
            follower.anchors.append(torch.empty((), device=_device(block), requires_grad=True))
            wanted = follower.anchors[-1:]
        made = _Step.apply(follower, before, _specs(outline), *wanted)
        follower.keepers |= {follower.key(each): part for each, is_kept in zip(made, keeps, strict=True) if is_kept}
        return _filled(outline, iter(made))

    return forward


def _follow_block(inner: Callable[..., Any], args: Any, kwargs: Any, follower: _Follower) -> Any:
    """Follow a block forward and backward, and return the outline of its result, and of which tensors of it backward
    needs."""
    copies: dict[int, Tensor] = {}

    def leaf(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        return copies.setdefault(id(tensor), tensor.detach().requires_grad_())

    arguments, keywords = _mapped((args, kwargs), leaf)
    for copy in copies.values():
        follower.part.boundary += _bytes(copy)
    result = inner(*arguments, **keywords)
    follower.whole(*_tensors(result))
    keeps = [follower.key(each) in follower.part.kept for each in _tensors(result)]
    outputs = [each for each in _tensors(result) if each.requires_grad]
    follower.phase = "backward"
    weights = [follower.parameters[name] for name in follower.part.named]
    targets = [*copies.values(), *(each for each in weights if each.requires_grad)]
    if outputs and targets:
        given = [torch.empty_like(each) for each in outputs]
        found = torch.autograd.grad(outputs, targets, given, allow_unused=True)
        follower.whole(*(each for each in found[: len(copies)] if each is not None))
    follower.phase = "forward"
    return _outline(result), keeps


class _Step(torch.autograd.Function):
    """Results of a block that was stepped over; in backward, what comes next belongs to what stood before the block."""

    @staticmethod
    def forward(ctx: Any, follower: _Follower, before: _Part, specs: list[_Spec], *inputs: Tensor) -> Any:
        ctx.follower, ctx.before = follower, before
        ctx.inputs = [(each.shape, each.dtype) for each in inputs]
        ctx.device = next(iter(follower.parameters.values())).device  # below frozen weights there are no inputs
        made = tuple(torch.empty(it.shape, dtype=it.dtype, device=ctx.device) for it in specs)
        ctx.mark_non_differentiable(*(each for each in made if not each.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.follower.part = ctx.before
        return (None, None, None, *(torch.empty(s, dtype=d, device=ctx.device) for s, d in ctx.inputs))


# --- trees of tensors -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Spec:
    """What stands for a tensor in an outline."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Lists, tuples and mappings with their tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(each, change) for each in value))
    if isinstance(value, tuple | list):
        return type(value)(_mapped(each, change) for each in value)
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    return value


def _outline(value: Any) -> Any:
    return _mapped(value, lambda each: _Spec(tuple(each.shape), each.dtype))


def _specs(outline: Any) -> list[_Spec]:
    if isinstance(outline, _Spec):
        return [outline]
    if isinstance(outline, tuple | list):
        return [spec for each in outline for spec in _specs(each)]
    return [spec for each in outline.values() for spec in _specs(each)] if isinstance(outline, dict) else []


def _filled(outline: Any, made: Iterator[Tensor]) -> Any:
    """An outline with tensors in the place of what stands for them."""
    if isinstance(outline, _Spec):
        return next(made)
    if isinstance(outline, tuple) and hasattr(outline, "_fields"):
        return type(outline)(*(_filled(each, made) for each in outline))
    if isinstance(outline, tuple | list):
        return type(outline)(_filled(each, made) for each in outline)
    if isinstance(outline, dict):
        return {key: _filled(each, made) for key, each in outline.items()}
    return outline


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(value, found.append)
    return found


def _bytes(tensor: Tensor) -> float:
    """What reading a tensor moves: of one that repeats itself, its storage."""
    return float(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))


def _name(operation: Any) -> str:
    """`mm` of `aten.mm.default`."""
    return str(operation).split(".")[1]


# --- from two micro-batches to sizes ----------------------------------------------------------------------------------


def _segment(few: _Part, more: _Part) -> Segment:
    """A segment, from what was followed for two numbers of samples."""
    fused = [_fused(part) for part in (few, more)]
    operations: list[Operation] = []
    for index, (a, b) in enumerate(zip(few.operations, more.operations, strict=True)):
        sizes = {name: _size(a.sizes[name], b.sizes[name]) for name in a.sizes}
        rest = dict(a.rest)
        if a.kind is Move:
            (first, leads), (second, _) = (each[index] for each in fused)
            sizes["fused"], rest["leads"] = _size(first, second), leads
            rest["shape"] = _one_sample(a.rest["shape"], b.rest["shape"])
        operations.append(a.kind(**sizes, **rest))
    shapes = {few.experts[name] for name in few.experts}
    if shapes:
        operations = merged(operations, next(iter(shapes))[0], {size for shape in shapes for size in shape[1:]})
    return Segment(
        name=few.name,
        repeats=few.repeats,
        operations=tuple(operations),
        weights=_weights(few),
        kept=_kept(few.kept, more.kept),
        fused=_kept(_kept_when_fused(few), _kept_when_fused(more)),
        selective=_kept(few.results, more.results),
        boundary=_size(few.boundary, more.boundary),
        fullest=_fullest(_trail(few), _trail(more)),
        fullest_fused=_fullest(_trail_when_fused(few), _trail_when_fused(more)),
        is_block=few.is_block,
        experts=next(iter(shapes))[0] if shapes else 0,
    )


def _size(few: float, more: float) -> Size:
    each = (more - few) / (SAMPLES[1] - SAMPLES[0])
    return Size(few - each * SAMPLES[0], each)


def _one_sample(few: tuple[int, ...], more: tuple[int, ...]) -> tuple[int, ...]:
    """A shape for one sample, from those for two numbers of them."""
    if len(few) != len(more):
        return few
    return tuple(a if a == b else a // SAMPLES[0] for a, b in zip(few, more, strict=True))


def _kept(few: dict[int, tuple[float, bool]], more: dict[int, tuple[float, bool]]) -> Kept:
    def total(of: dict[int, tuple[float, bool]], divided: bool) -> float:
        return sum(size for size, is_divided in of.values() if is_divided is divided)

    return Kept(_size(total(few, True), total(more, True)), _size(total(few, False), total(more, False)))


def _trail(part: _Part) -> Trail:
    """What its operations did with storages."""
    backward = part.backward
    end = len(part.operations)
    return Trail(part.sizes, part.made, part.touched, min(backward, default=end), end)


def _trail_when_fused(part: _Part) -> Trail:
    return fused(_trail(part), _groups(part), _kept_when_fused(part))


def _fullest(few: Trail, more: Trail) -> tuple[Kept, ...]:
    """What is alive at the fullest moments of the larger micro-batch."""
    small, large = spans(few), spans(more)
    found = []
    for index in fullest(large, more.end):
        (a_divided, a_whole), (b_divided, b_whole) = alive(small, index), alive(large, index)
        found.append(Kept(_size(a_divided, b_divided), _size(a_whole, b_whole)))
    return tuple(found)


def _weights(part: _Part) -> Weights:
    def count(names: set[str]) -> int:
        return sum(part.named[name] for name in names)

    everything = set(part.named)
    experts = everything & set(part.experts)
    divided = {name for name in everything - experts if part.divided.get(name)}
    rest = everything - divided - experts
    largest = max(part.named.values(), default=0)
    return Weights(count(divided), count(rest), count(experts), count(part.frozen), largest)


def _untied(segments: tuple[Segment, ...], parts: list[_Part]) -> tuple[Segment, ...]:
    """Segments in which a weight that was met before does not count again."""
    met: set[str] = set()
    found = []
    for segment, part in zip(segments, parts, strict=True):
        again = replace(part, named={name: 0 if name in met else size for name, size in part.named.items()})
        found.append(replace(segment, weights=_weights(again)))
        met |= set(part.named)
    return tuple(found)


def _groups(part: _Part) -> list[list[int]]:
    """Indices of operations that are bound by memory and that a compiler would fuse: they wait for each other until a
    product or attention needs what one of them makes."""
    found: list[list[int]] = [[]]
    reads: dict[int, set[int]] = {}
    for key, readers in part.touched.items():
        for reader in readers:
            reads.setdefault(reader, set()).add(key)
    waiting: set[int] = set()
    for index, operation in enumerate(part.operations):
        turned = index > 0 and operation.rest["phase"] != part.operations[index - 1].rest["phase"]
        needs = waiting & reads.get(index, set())
        if turned or (operation.kind is not Move and (needs or operation.kind is Reduce)):
            found.append([])
            waiting = set()
        if operation.kind is Move:
            found[-1].append(index)
            waiting |= {key for key, maker in part.made.items() if maker == index}
    return [group for group in found if group]


def _fused(part: _Part) -> dict[int, tuple[float, bool]]:
    """Of each operation bound by memory, by its index: the bytes that are left when neighbours are fused, so that what
    one hands to the next in its group is never stored; and whether it is the first of its group."""
    at = {index: (read, written) for index, read, written in part.reads}
    kept, backward = set(_kept_when_fused(part)), part.backward
    found: dict[int, tuple[float, bool]] = {}
    for group in _groups(part):
        inside, seen = set(group), set[int]()
        for index in group:
            read, written = at[index]
            entering = sum(size for key, size in read.items() if key not in seen)
            seen |= set(read) | set(written)
            leaving = 0.0
            for key, size in written.items():
                readers = {reader for reader in part.touched.get(key, []) if reader > index}
                if not readers or readers - inside - backward or key in kept:
                    leaving += size
            found[index] = (entering + leaving, index == group[0])
    return found


def _kept_when_fused(part: _Part) -> dict[int, tuple[float, bool]]:
    """What backward needs kept when groups are fused: in the place of what never leaves its group, that from which the
    group can make it again."""
    group_of = {index: number for number, group in enumerate(_groups(part)) for index in group}
    reads = {index: read for index, read, _ in part.reads}
    backward = part.backward
    found: dict[int, tuple[float, bool]] = {}
    waiting, seen = list(part.kept), set[int]()
    while waiting:
        key = waiting.pop()
        if key in seen:
            continue
        seen.add(key)
        maker = part.made.get(key)
        inside = maker in group_of and not any(
            group_of.get(reader) != group_of[maker] for reader in part.touched.get(key, []) if reader not in backward
        )
        if inside and maker is not None:
            waiting += [source for source in reads[maker] if source in part.storages]
        else:
            found[key] = part.kept.get(key) or part.storages[key]
    return found
