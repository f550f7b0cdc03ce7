"""Blocks that are repeated: followed once, forward and backward, and stepped over from then on."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.planner.trace.op_recorder import OpRecorder, RecordedSegment
from phalanx.planner.trace.pytree import (
    TensorSpec,
    module_device,
    tensor_read_bytes,
    to_specs,
)
from phalanx.pytree import iterate_tensors, map_tensors


def find_repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a model: members of lists in which at least two have the same shape; the outermost lists count."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(
            name.startswith(f"{member_name}.") for member_name, _ in found
        ):
            continue
        children = [
            (f"{name}.{member_name}", child, _module_signature(child)) for member_name, child in module.named_children()
        ]
        shape_counts = Counter(shape for _, _, shape in children)
        found += [(member_name, child) for member_name, child, shape in children if shape and shape_counts[shape] > 1]
    return found


def _module_signature(module: nn.Module) -> tuple[Any, ...]:
    """What two modules of the same structure share."""
    parameters = tuple((name, tuple(it.shape), it.requires_grad) for name, it in module.named_parameters())
    return (type(module), parameters) if parameters else ()


@contextlib.contextmanager
def skip_repeated_blocks(model: nn.Module, recorder: OpRecorder) -> Iterator[None]:
    """Context in which repeated blocks are traced separately from the rest of the model, one block for each shape."""
    blocks = find_repeated_blocks(model)
    for name, block in blocks:
        vars(block)["forward"] = _make_skipping_forward(name, block, recorder)
    try:
        yield
    finally:
        for _, block in blocks:
            del vars(block)["forward"]


def _make_skipping_forward(name: str, block: nn.Module, recorder: OpRecorder) -> Callable[..., Any]:
    """The forward of a block that is only followed if none of its shape has been, with inputs of the same shapes."""
    original_forward = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        inputs = list(iterate_tensors((args, kwargs)))
        key = (_module_signature(block), repr(to_specs((args, kwargs))), tuple(each.requires_grad for each in inputs))
        before = recorder.segment
        if key not in recorder.traced_blocks:
            recorder.segment = RecordedSegment(name, True)
            recorder.traced_blocks[key] = (recorder.segment, _trace_block(original_forward, args, kwargs, recorder))
        part, (result, keeps) = recorder.traced_blocks[key]
        recorder.segments += [part, RecordedSegment(f"after {name}", False)]
        recorder.block_names.append(name)
        recorder.segment = recorder.segments[-1]
        wanted = [each for each in inputs if each.requires_grad]
        if not wanted and any(each.requires_grad for each in block.parameters()):
            recorder.anchors.append(torch.empty((), device=module_device(block), requires_grad=True))
            wanted = recorder.anchors[-1:]
        made = _SkippedBlock.apply(recorder, before, list(iterate_tensors(result, TensorSpec)), *wanted)
        recorder.saved_by |= {
            recorder.storage_key(each): part for each, is_kept in zip(made, keeps, strict=True) if is_kept
        }
        replacements = iter(made)
        return map_tensors(result, lambda _: next(replacements), TensorSpec)

    return forward


def _trace_block(original_forward: Callable[..., Any], args: Any, kwargs: Any, recorder: OpRecorder) -> Any:
    """Follow a block forward and backward, and return the outline of its result, and of which tensors of it backward
    needs."""
    copies: dict[int, Tensor] = {}

    def detach_once(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        return copies.setdefault(id(tensor), tensor.detach().requires_grad_())

    arguments, keywords = map_tensors((args, kwargs), detach_once)
    for copy in copies.values():
        recorder.segment.input_bytes += tensor_read_bytes(copy)
    result = original_forward(*arguments, **keywords)
    recorder.reduce_partial_sums(*iterate_tensors(result))
    keeps = [recorder.storage_key(each) in recorder.segment.saved for each in iterate_tensors(result)]
    outputs = [each for each in iterate_tensors(result) if each.requires_grad]
    recorder.pass_direction = "backward"
    weights = [recorder.parameters[name] for name in recorder.segment.parameter_elements]
    targets = [*copies.values(), *(each for each in weights if each.requires_grad)]
    if outputs and targets:
        output_grads = [torch.empty_like(each) for each in outputs]
        input_grads = torch.autograd.grad(outputs, targets, output_grads, allow_unused=True)
        recorder.reduce_partial_sums(*(each for each in input_grads[: len(copies)] if each is not None))
    recorder.pass_direction = "forward"
    return to_specs(result), keeps


class _SkippedBlock(torch.autograd.Function):
    """Results of a block that was stepped over; in backward, what comes next belongs to what stood before the block."""

    @staticmethod
    def forward(
        ctx: Any, recorder: OpRecorder, before: RecordedSegment, specs: list[TensorSpec], *inputs: Tensor
    ) -> Any:
        ctx.recorder, ctx.before = recorder, before
        ctx.inputs = [(each.shape, each.dtype) for each in inputs]
        ctx.device = next(iter(recorder.parameters.values())).device  # below frozen weights there are no inputs
        made = tuple(torch.empty(it.shape, dtype=it.dtype, device=ctx.device) for it in specs)
        ctx.mark_non_differentiable(*(each for each in made if not each.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.recorder.segment = ctx.before
        return (None, None, None, *(torch.empty(s, dtype=d, device=ctx.device) for s, d in ctx.inputs))
