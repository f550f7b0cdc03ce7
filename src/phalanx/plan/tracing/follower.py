"""Records what is done while a model is followed, operation by operation, in the part that is being computed.

How tensor parallelism divides a block follows from its data flow (Shoeybi et al. 2019, Megatron-LM, section 3): a
product of a whole activation with a weight is divided by columns and leaves a divided activation; the next weight to
meet that is divided by rows, and a sum over ranks makes the result whole. What lies between inherits.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from phalanx.plan.profile import (
    Attention,
    Divided,
    Move,
    Phase,
    Product,
    Reduce,
)
from phalanx.plan.tracing.trees import bytes_of, name_of, tensors

NARROW = 16
"""A product whose result is so many times narrower than what it reads (a router, a gate) is not worth dividing."""
FREE = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias", "lift_fresh"}
)
"""Operations that cost nothing, beside views."""


@dataclass
class Op:
    """An operation for one number of samples: its kind, numbers that may grow with them, and the rest."""

    kind: type
    sizes: dict[str, float]
    rest: dict[str, Any]


@dataclass
class Part:
    """A segment as it is being followed."""

    name: str
    is_block: bool
    repeats: int = 1
    operations: list[Op] = field(default_factory=list)
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


class Follower:
    """Records what is done, in the part that is being computed."""

    def __init__(self, model: nn.Module) -> None:
        self.phase: Phase = "forward"
        self.course = [Part("before the blocks", False)]
        self.part = self.course[0]
        self.stepped: list[str] = []
        """Names of the blocks in the course, in order: most are stood for by the first of their shape."""
        self.known: dict[tuple[Any, ...], tuple[Part, Any]] = {}
        self.names: dict[int, str] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.divided: dict[int, bool] = {}
        self.partial: set[int] = set()
        """Storages of which each tensor-parallel rank has a term of a sum that has not been taken yet."""
        self.gradients: set[int] = set()
        """Storages that hold gradients of weights."""
        self.routed: set[int] = set()
        """Storages of tokens that experts multiply with their matrices, and of these."""
        self.keepers: dict[int, Part] = {}
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
        name, inputs, outputs = name_of(operation), tensors((args, kwargs)), tensors(result)
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
            self._move(name, inputs, outputs)
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
        self.part.operations.append(Op(Attention, {"samples": batch}, rest))

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
                self.part.operations.append(Op(Reduce, {"size": bytes_of(each)}, {"phase": self.phase}))

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
        expert = self._of_expert(left, right)
        self._read(*inputs)
        self._biased(added, divided)
        rest = {"phase": self.phase, "width": left.element_size(), "divided": divided}
        rest |= {"expert": expert, "grouped": expert and count > 1, "weight": weight or expert}
        self.part.operations.append(Op(Product, {"count": count, "m": m, "n": n, "k": k}, rest))
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

    def _of_expert(self, left: Tensor, right: Tensor) -> bool:
        """Whether a product is one of an expert: with its matrix, or, for that one's gradient, with what was multiplied
        by it in forward."""
        sides = {self.key(left), self.key(right)}
        if any(self._is_expert(self.names[key]) for key in sides if key in self.names):
            if self.phase == "forward":
                self.routed |= sides
            return True
        return self.phase == "backward" and bool(sides & self.routed)

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
            self.part.operations.append(Op(Product, {"count": groups, "m": m, "n": n, "k": k}, rest))
        self._made(*outputs)
        if name == "convolution_backward":
            self._gradient_of_weight(*outputs[1 if args[10][0] else 0 :])
        if self.phase == "forward":
            self.part.results[self.key(out)] = (out.untyped_storage().nbytes(), False)

    def _move(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        terms = {self.key(each) for each in inputs if each.is_floating_point()}
        if terms and terms <= self.partial and name in ("add", "add_"):
            self.partial |= {self.key(each) for each in outputs}  # a sum of terms can wait, too
        else:
            self.whole(*inputs)
        divided = any(self.divided.get(self.key(each), False) for each in inputs)
        for each in outputs:
            self.divided[self.key(each)] = divided
        read = {self.key(each): bytes_of(each) for each in inputs}
        written = {self.key(each): bytes_of(each) for each in outputs}
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
        self.part.operations.append(Op(Move, {"moved": sum(read.values()) + sum(written.values())}, rest))
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
    def forward(ctx: Any, follower: Follower, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
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


class Catching(TorchFunctionMode):
    """Puts `_Attend` in the place of torch's fused attention, and dropout as GPUs do it, which keeps a mask of a byte
    for each element, in the place of the meta device's, which keeps a factor."""

    def __init__(self, follower: Follower) -> None:
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
