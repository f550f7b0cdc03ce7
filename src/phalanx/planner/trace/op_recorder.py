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

from phalanx.planner.model_profile import (
    AttentionOp,
    Gemm,
    MemoryOp,
    PassDirection,
    TensorAllReduce,
    TpSplitDim,
)
from phalanx.pytree import iterate_tensors, map_tensors

NARROW_GEMM_RATIO = 16
"""A product that is narrower than its input by at least this factor (a router, a gate) is not worth dividing."""
FREE_OPS = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias", "lift_fresh"}
)
"""Operations that cost nothing. Views cost nothing either."""


@dataclass(frozen=True)
class TensorSpec:
    """What stands for a tensor in an outline."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def to_specs(value: Any) -> Any:
    return map_tensors(value, lambda each: TensorSpec(tuple(each.shape), each.dtype))


def tensor_read_bytes(tensor: Tensor) -> float:
    """What reading a tensor moves: of one that repeats itself, its storage."""
    return float(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))


def op_name(operation: Any) -> str:
    """`mm` of `aten.mm.default`."""
    return str(operation).split(".")[1]


def module_device(module: nn.Module) -> torch.device:
    """Where a module's weights are, or pretend to be."""
    return next(module.parameters()).device


@dataclass
class RecordedOp:
    """An operation for one number of samples: its kind, numbers that may grow with them, and the rest."""

    op_type: type
    sizes: dict[str, float]
    attributes: dict[str, Any]


@dataclass
class RecordedSegment:
    """A segment as it is being followed."""

    name: str
    is_block: bool
    num_repeats: int = 1
    ops: list[RecordedOp] = field(default_factory=list)
    parameter_elements: dict[str, int] = field(default_factory=dict)
    """Elements of its parameters."""
    tp_dims: dict[str, TpSplitDim] = field(default_factory=dict)
    """How tensor parallelism divides each of its parameters: by "n" columns, "k" rows."""
    expert_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of its parameters that are stacks of experts' matrices."""
    frozen_names: set[str] = field(default_factory=set)
    int8_names: set[str] = field(default_factory=set)
    saved: dict[int, tuple[float, bool]] = field(default_factory=dict)
    selective_results: dict[int, tuple[float, bool]] = field(default_factory=dict)
    input_bytes: float = 0.0
    memory_accesses: list[tuple[int, dict[int, float], dict[int, float]]] = field(default_factory=list)
    """For each memory-bound operation: its index, and the bytes of storages read and written."""
    readers: dict[int, list[int]] = field(default_factory=dict)
    """Indices of operations that read a storage."""
    producer: dict[int, int] = field(default_factory=dict)
    """Index of the operation that made a storage."""
    forward_storages: dict[int, tuple[float, bool]] = field(default_factory=dict)
    """Bytes of what was made or read in forward, and whether it is divided."""
    storage_sizes: dict[int, tuple[float, bool]] = field(default_factory=dict)
    """The same of both phases, without weights and their gradients."""

    @property
    def backward_ops(self) -> set[int]:
        """Indices of the operations of backward."""
        return {index for index, each in enumerate(self.ops) if each.attributes["phase"] == "backward"}


class OpRecorder:
    """Records what is done, in the part that is being computed."""

    def __init__(self, module: nn.Module) -> None:
        self.pass_direction: PassDirection = "forward"
        self.segments = [RecordedSegment("before the blocks", False)]
        self.segment = self.segments[0]
        self.block_names: list[str] = []
        """Names of the blocks in the course, in order: most are stood for by the first of their shape."""
        self.traced_blocks: dict[tuple[Any, ...], tuple[RecordedSegment, Any]] = {}
        self.weight_names: dict[int, str] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.tp_sharded: dict[int, bool] = {}
        self.partial_sums: set[int] = set()
        """Storages of which each tensor-parallel rank has a term of a sum that has not been taken yet."""
        self.weight_gradients: set[int] = set()
        """Storages that hold gradients of weights."""
        self.expert_storages: set[int] = set()
        """Storages of tokens that experts multiply with their matrices, and of these."""
        self.saved_by: dict[int, RecordedSegment] = {}
        """Which part keeps a storage for backward: the first that does, if the next keeps it as well."""
        self.anchors: list[Tensor] = []
        """What stands for the trained weights of blocks that nothing trained comes before."""
        self._storages: list[Any] = []
        for name, parameter in module.named_parameters():  # tied ones once
            self.weight_names[self.storage_key(parameter)] = name
            self.parameters[name] = parameter

    def storage_key(self, tensor: Tensor) -> int:
        """A key that identifies a storage. The storage is kept alive, so that no other gets the same key."""
        storage = tensor.untyped_storage()
        self._storages.append(storage)
        return id(storage)

    def record_saved_tensors(self) -> contextlib.AbstractContextManager[None]:
        """A context that records what autograd keeps for backward."""

        def pack(tensor: Tensor) -> Tensor:
            key = self.storage_key(tensor)
            if (
                key not in self.weight_names
                and self.pass_direction == "forward"
                and self.saved_by.setdefault(key, self.segment) is self.segment
            ):
                self.segment.saved[key] = (tensor.untyped_storage().nbytes(), self.tp_sharded.get(key, False))
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def record_op(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Do an operation and record it."""
        result = op(*args, **kwargs)
        name, inputs, outputs = op_name(op), list(iterate_tensors((args, kwargs))), list(iterate_tensors(result))
        if name in FREE_OPS or not outputs:
            return result
        known = {self.storage_key(each) for each in inputs}
        new_tensors = [each for each in outputs if self.storage_key(each) not in known]
        if not new_tensors and not name.endswith("_"):  # a view
            return result
        if name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm"):
            self._record_gemm(name, inputs, outputs[0])
        elif name in ("convolution", "convolution_backward"):
            self._record_convolution(name, args, outputs)
        else:
            self._record_memory_op(name, inputs, outputs)
        return result

    def record_attention(
        self,
        pass_direction: PassDirection,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool,
        *other_inputs: Tensor,
    ) -> None:
        """Record a fused attention. `other_inputs`: what else it reads."""
        batch = math.prod(query.shape[:-3])
        self.reduce_partial_sums(query, key)
        self._record_inputs(query, key, value, *other_inputs)
        divided = self.tp_sharded.get(self.storage_key(query), False)
        rest = {
            "phase": pass_direction,
            "num_heads": query.shape[-3],
            "num_kv_heads": key.shape[-3],
            "num_queries": query.shape[-2],
            "num_keys": key.shape[-2],
            "head_dim": query.shape[-1],
            "causal": causal,
            "element_bytes": query.element_size(),
            "tp_sharded": divided,
        }
        self.segment.ops.append(RecordedOp(AttentionOp, {"samples": batch}, rest))

    def record_attention_result(self, outputs: list[Tensor], source: Tensor) -> None:
        """Outputs are divided as what they were made from, and selective recomputation keeps them."""
        self._record_outputs(*outputs)
        for each in outputs:
            self.tp_sharded[self.storage_key(each)] = self.tp_sharded.get(self.storage_key(source), False)
            if self.pass_direction == "forward":
                self.segment.selective_results[self.storage_key(each)] = (
                    each.untyped_storage().nbytes(),
                    self.tp_sharded[self.storage_key(each)],
                )

    def reduce_partial_sums(self, *tensors: Tensor) -> None:
        """Take the sums over ranks that are still to be taken of tensors."""
        for each in tensors:
            if self.storage_key(each) in self.partial_sums:
                self.partial_sums.discard(self.storage_key(each))
                self.segment.ops.append(
                    RecordedOp(TensorAllReduce, {"num_bytes": tensor_read_bytes(each)}, {"phase": self.pass_direction})
                )

    def _record_outputs(self, *outputs: Tensor) -> None:
        """Remember which operation makes a tensor."""
        for each in outputs:
            self.segment.producer.setdefault(self.storage_key(each), len(self.segment.ops) - 1)
            self._record_size(each)

    def _record_size(self, tensor: Tensor) -> None:
        """Remember how large a tensor is, if it is no weight."""
        if (key := self.storage_key(tensor)) not in self.weight_names:
            self.segment.storage_sizes[key] = (tensor.untyped_storage().nbytes(), False)

    def _mark_weight_gradients(self, *outputs: Tensor) -> None:
        """Remember that tensors are gradients of weights."""
        self.weight_gradients |= {self.storage_key(each) for each in outputs}

    def _record_gemm(self, name: str, inputs: list[Tensor], out: Tensor) -> None:
        *added, left, right = inputs
        self.reduce_partial_sums(left, right)
        count = left.shape[0] if left.dim() == 3 else 1
        if name == "_grouped_mm":
            count = right.shape[0] if right.dim() == 3 else left.shape[0]
        m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
        divided, result_is, weight = self._choose_tp_dim(left, right, count, k, n)
        expert = self._is_expert_gemm(left, right)
        self._record_inputs(*inputs)
        self._mark_bias(added, divided)
        rest = {"phase": self.pass_direction, "element_bytes": left.element_size(), "tp_dim": divided}
        rest |= {"is_expert": expert, "is_grouped": expert and count > 1, "has_weight": weight or expert}
        self.segment.ops.append(RecordedOp(Gemm, {"count": count, "m": m, "n": n, "k": k}, rest))
        self._record_outputs(out)
        self.tp_sharded[self.storage_key(out)] = result_is
        if (
            self.pass_direction == "backward"
            and weight
            and not any(self.storage_key(each) in self.weight_names for each in (left, right))
        ):
            self._mark_weight_gradients(out)
        if self.pass_direction == "forward":
            self.segment.selective_results[self.storage_key(out)] = (out.untyped_storage().nbytes(), result_is)
        if weight and divided == "k":
            self.partial_sums.add(self.storage_key(out))

    def _choose_tp_dim(self, left: Tensor, right: Tensor, count: int, k: int, n: int) -> tuple[TpSplitDim, bool, bool]:
        """The dimension that tensor parallelism divides, whether the result is divided, and whether weights take part.
        In backward what forward decided holds."""
        split_left = self.tp_sharded.get(self.storage_key(left), False)
        split_right = self.tp_sharded.get(self.storage_key(right), False)
        weight = self.weight_names.get(self.storage_key(right)) or self.weight_names.get(self.storage_key(left))
        if weight is None:
            if count > 1:
                return ("count" if split_left or split_right else ""), split_left or split_right, False
            if split_left and split_right:
                return "k", False, True
            # the gradient of a weight, or what stands for one
            return ("m" if split_left else "n" if split_right else ""), split_left or split_right, True
        if self._is_expert_weight(weight):
            self.segment.expert_shapes[weight] = tuple(self.parameters[weight].shape)
            return "", False, True
        how = self.segment.tp_dims.get(weight)
        if how is None:
            how = "k" if split_left else "n" if n * NARROW_GEMM_RATIO >= k else ""
            self.segment.tp_dims[weight] = how
        if self.pass_direction == "forward":
            return how, how == "n", True
        # The gradient of a product's input: columns became what is summed over, and the other way round.
        if how == "n":
            return "k", False, True
        return ("n", True, True) if how == "k" else ("", False, True)

    def _mark_bias(self, added: list[Tensor], divided: TpSplitDim) -> None:
        """Divide biases as the columns that they are added to."""
        for each in added:
            if (bias := self.weight_names.get(self.storage_key(each))) is not None:
                self.segment.tp_dims.setdefault(bias, "n" if divided == "n" else "")

    def _is_expert_weight(self, name: str) -> bool:
        return self.parameters[name].dim() == 3

    def _is_expert_gemm(self, left: Tensor, right: Tensor) -> bool:
        """Whether a product is one of an expert: with its matrix, or, for that one's gradient, with what was multiplied
        by it in forward."""
        sides = {self.storage_key(left), self.storage_key(right)}
        if any(self._is_expert_weight(self.weight_names[key]) for key in sides if key in self.weight_names):
            if self.pass_direction == "forward":
                self.expert_storages |= sides
            return True
        return self.pass_direction == "backward" and bool(sides & self.expert_storages)

    def _record_convolution(self, name: str, args: Any, outputs: list[Tensor]) -> None:
        """A convolution as the product it amounts to: one row for each place of its result, and the backward one as the
        two products of its gradients."""
        if name == "convolution":
            image, kernel, groups, out = args[0], args[1], args[8], outputs[0]
            added = [args[2]] if args[2] is not None else []
            self._record_inputs(image, kernel, *added)
            self._mark_bias(added, "")
        else:
            out, image, kernel, groups = args[0], args[1], args[2], args[9]
            self._record_inputs(out, image, kernel)
        rows = out.shape[0] * math.prod(out.shape[2:])
        columns, depth = kernel.shape[0] // groups, math.prod(kernel.shape[1:])
        if weight := self.weight_names.get(self.storage_key(kernel)):
            self.segment.tp_dims.setdefault(weight, "")
        shapes = [(rows, columns, depth)]
        if name == "convolution_backward":
            wanted = args[10]
            shapes = [(rows, depth, columns)] * bool(wanted[0]) + [(depth, columns, rows)] * bool(wanted[1])
        for m, n, k in shapes:
            rest = {
                "phase": self.pass_direction,
                "element_bytes": image.element_size(),
                "tp_dim": "",
                "has_weight": True,
            }
            self.segment.ops.append(RecordedOp(Gemm, {"count": groups, "m": m, "n": n, "k": k}, rest))
        self._record_outputs(*outputs)
        if name == "convolution_backward":
            self._mark_weight_gradients(*outputs[1 if args[10][0] else 0 :])
        if self.pass_direction == "forward":
            self.segment.selective_results[self.storage_key(out)] = (out.untyped_storage().nbytes(), False)

    def _record_memory_op(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        terms = {self.storage_key(each) for each in inputs if each.is_floating_point()}
        if terms and terms <= self.partial_sums and name in ("add", "add_"):
            self.partial_sums |= {self.storage_key(each) for each in outputs}  # a sum of terms can wait, too
        else:
            self.reduce_partial_sums(*inputs)
        divided = any(self.tp_sharded.get(self.storage_key(each), False) for each in inputs)
        for each in outputs:
            self.tp_sharded[self.storage_key(each)] = divided
        read = {self.storage_key(each): tensor_read_bytes(each) for each in inputs}
        written = {self.storage_key(each): tensor_read_bytes(each) for each in outputs}
        if name in ("embedding", "index", "index_select", "gather"):
            read[self.storage_key(inputs[0])] = sum(written.values())  # only the rows that are picked
        if name == "embedding" and (weight := self.weight_names.get(self.storage_key(inputs[0]))):
            self.segment.tp_dims.setdefault(weight, "n")
        largest = max([*inputs, *outputs], key=lambda each: each.numel())
        self.segment.memory_accesses.append((len(self.segment.ops), read, written))
        self._record_inputs(*inputs)
        rest = {"phase": self.pass_direction, "name": name, "tp_sharded": divided}
        rest["element_bytes"] = largest.element_size()
        if name == "_to_copy" and (weight := self.weight_names.get(self.storage_key(inputs[0]))) is not None:
            self.weight_names[self.storage_key(outputs[0])] = weight  # a weight in another precision is that weight
        self.segment.ops.append(
            RecordedOp(MemoryOp, {"unfused_bytes": sum(read.values()) + sum(written.values())}, rest)
        )
        self._record_outputs(*outputs)
        floating = [each for each in inputs if each.is_floating_point()]
        of_weights = floating and all(self.storage_key(each) in self.weight_gradients for each in floating)
        if name == "embedding_dense_backward" or of_weights:
            self._mark_weight_gradients(*outputs)

    def _record_inputs(self, *inputs: Tensor) -> None:
        for each in inputs:
            key = self.storage_key(each)
            self.segment.readers.setdefault(key, []).append(len(self.segment.ops))
            self._record_size(each)
            if self.pass_direction == "forward" and key not in self.weight_names:
                self.segment.forward_storages[key] = (each.untyped_storage().nbytes(), self.tp_sharded.get(key, False))
            if (name := self.weight_names.get(key)) is not None:
                self.segment.parameter_elements[name] = self.parameters[name].numel()
                if not self.parameters[name].requires_grad:
                    self.segment.frozen_names.add(name)
                if self.parameters[name].dtype in (torch.int8, torch.uint8):
                    self.segment.int8_names.add(name)
