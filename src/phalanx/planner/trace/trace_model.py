"""From an `nn.Module` to its `ModelProfile`, without memory and without time: the model is followed on the meta device,
where tensors have shapes and nothing else, forward and backward.

Two micro-batch sizes are traced, and what differs between them grows with the samples. A repeated block is traced once;
the others of its shape are skipped. Attention is recorded before torch decomposes it: on the meta device torch would
choose the math kernel, which stores s x s scores that no GPU stores.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from phalanx.compat import fake_tensor_mode, intercept_operations
from phalanx.planner.model_profile import ModelProfile
from phalanx.planner.trace.op_recorder import (
    OpRecorder,
    RecordedSegment,
    TensorSpec,
    module_device,
    op_name,
    tensor_read_bytes,
    to_specs,
)
from phalanx.planner.trace.to_segments import TRACED_MICRO_SIZES, drop_tied_weights, to_segment
from phalanx.pytree import iterate_tensors, map_tensors


class _FakeFusedAttention(torch.autograd.Function):
    """Fused attention that computes nothing: outputs of the right shape, and a record of both phases. It keeps what a
    fused kernel keeps: queries, keys, values, the result, and a sum for each query (Dao et al. 2022)."""

    @staticmethod
    def forward(ctx: Any, recorder: OpRecorder, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        # Laid out as fused kernels do it, [.., s, h, d]: what follows joins the heads without copying.
        out = query.new_empty((*query.shape[:-3], query.shape[-2], query.shape[-3], value.shape[-1])).transpose(-3, -2)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        recorder.record_attention("forward", query, key, value, causal)
        recorder.record_attention_result([out, sums], query)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.recorder, ctx.causal = recorder, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, sums = ctx.saved_tensors
        ctx.recorder.record_attention("backward", query, key, value, ctx.causal, out, sums, grad)
        found = [torch.empty_like(each) for each in (query, key, value)]
        ctx.recorder.record_attention_result(found, query)
        return (None, *found, None)


class AttentionCaptureMode(TorchFunctionMode):
    """Puts `_FakeFusedAttention` in the place of torch's fused attention, and dropout as GPUs do it, which keeps a mask
    of a byte for each element, in the place of the meta device's, which keeps a factor."""

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            # a mask over all pairs is computed in full by every kernel
            causal = bool(given.get("is_causal", False))
            return _FakeFusedAttention.apply(self._recorder, given["query"], given["key"], given["value"], causal)
        if getattr(func, "__name__", "") == "dropout":  # by name: runs in this process replace the function
            given = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
            if given.get("training", True) and given.get("p", 0.5) > 0:
                return torch.native_dropout(given["input"], given.get("p", 0.5), True)[0]
            return given["input"]
        return func(*args, **kwargs)


LossFromSamples = Callable[[nn.Module, int], Tensor]
"""Returns the loss of a number of samples, as a tensor on the meta device."""
INIT_OPS = frozenset(
    {"normal_", "uniform_", "fill_", "zero_", "trunc_normal_", "copy_", "mul_", "div_", "add_", "clamp_", "erfinv_"}
)
"""What initialisation does to weights: skipped, there is nothing to fill."""


def build_on_meta(
    make: Callable[[], nn.Module], dtype: torch.dtype = torch.bfloat16, device: str = "meta"
) -> nn.Module:
    """The module that `make` returns, on the meta device, in `dtype`, in training mode."""

    def handle(operation: Any, args: Any, kwargs: Any) -> Any:
        if op_name(operation) in INIT_OPS and isinstance(args[0], nn.Parameter):
            return args[0]
        return operation(*args, **kwargs)

    with torch.device(device), intercept_operations(handle):
        model = make()
        # tensors that only pretend to be on a device cannot be exchanged, so nothing is where nothing would change
        wrong = any(it.is_floating_point() and it.dtype != dtype for it in model.parameters())
        return (model.to(dtype) if wrong else model).train()


def profile_autocast(make: Callable[[], nn.Module], forward: LossFromSamples, tokens: int) -> ModelProfile:
    """The profile of a model with weights in fp32 that computes in bf16 on a CPU, as autocast has it: which operations
    are in which precision only that device's dispatcher knows, so tensors pretend to be on it."""

    def mixed(model: nn.Module, samples: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(model, samples)

    with fake_tensor_mode(symbols=False):
        return profile_model(build_on_meta(make, torch.float32, "cpu"), mixed, tokens)


def profile_fake_tensors(
    make: Callable[[], nn.Module], forward: LossFromSamples, tokens: int, dtype: torch.dtype
) -> ModelProfile:
    """Profile a model with fake tensors instead of meta tensors: with the latter some models, such as those of
    transformers, read tensor values, for example to build masks, and fail."""
    with fake_tensor_mode(symbols=False):
        return profile_model(_convert_dtype(build_on_meta(make, torch.float32, "cpu"), dtype), forward, tokens)


def _convert_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with parameters and buffers of this dtype. `to` exchanges tensors, which those that pretend to be on a
    device do not allow."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if tensor.is_floating_point() and tensor.dtype != dtype:
                new = made.get(id(tensor), tensor.detach().to(dtype))
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, tensor.requires_grad) if id(tensor) not in made else new
                made[id(tensor)] = new
                setattr(module, name, new)
    return model


def language_modeling_forward(vocab_size: int, seq_len: int) -> LossFromSamples:
    """Cross-entropy in fp32 of a model from tokens [b, s] to logits [b, s, v]."""

    def forward(model: nn.Module, samples: int) -> Tensor:
        tokens = torch.zeros(samples, seq_len, dtype=torch.int64, device=module_device(model))
        logits = model(tokens)
        logits = logits["logits"] if isinstance(logits, Mapping) else getattr(logits, "logits", logits)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    return forward


def image_classification_forward(channels: int, height: int, width: int) -> LossFromSamples:
    """Cross-entropy in fp32 of a model from images [b, c, h, w] to logits [b, classes]."""

    def forward(model: nn.Module, samples: int) -> Tensor:
        dtype = next(model.parameters()).dtype
        images = torch.zeros(samples, channels, height, width, dtype=dtype, device=module_device(model))
        logits = model(images)
        return F.cross_entropy(logits.float(), torch.zeros(samples, dtype=torch.int64, device=module_device(model)))

    return forward


def profile_model(model: nn.Module, forward: LossFromSamples, units_per_sample: int) -> ModelProfile:
    """The profile of a model on the meta device; `forward(model, samples)` gives its loss, a sample has
    `units_per_sample`."""
    small_trace, large_trace = (_trace_model(model, forward, samples) for samples in TRACED_MICRO_SIZES)
    if [len(each.ops) for each in small_trace] != [len(each.ops) for each in large_trace]:
        raise ValueError("the number of operations depends on the number of samples, so no step time can be predicted")
    segments = tuple(to_segment(a, b) for a, b in zip(small_trace, large_trace, strict=True))
    used = [name for each in small_trace for name in each.parameter_elements]
    sizes = {name: each.parameter_elements[name] for each in small_trace for name in each.parameter_elements}
    tied_elements = sum(sizes[name] * (used.count(name) - 1) for name in sizes)
    return ModelProfile(drop_tied_weights(segments, small_trace), units_per_sample, tied_elements)


def _trace_model(model: nn.Module, forward: LossFromSamples, samples: int) -> list[RecordedSegment]:
    recorder = OpRecorder(model)
    with (
        skip_repeated_blocks(model, recorder),
        AttentionCaptureMode(recorder),
        intercept_operations(recorder.record_op),
        recorder.record_saved_tensors(),
    ):
        loss = forward(model, samples)
        recorder.pass_direction = "backward"
        outside = {name for segment in recorder.segments if not segment.is_block for name in segment.parameter_elements}
        grad_targets: list[Tensor] = [
            recorder.parameters[name] for name in outside if recorder.parameters[name].requires_grad
        ]
        grad_targets += recorder.anchors
        if grad_targets:
            torch.autograd.grad(loss, grad_targets, allow_unused=True)
    for segment in recorder.segments:
        segment.storage_sizes = {
            key: (size, recorder.tp_sharded.get(key, False))
            for key, (size, _) in segment.storage_sizes.items()
            if key not in recorder.weight_gradients and recorder.saved_by.get(key, segment) is segment
        }
    block_names = iter(recorder.block_names)
    segments = [
        _rename_block(segment, next(block_names), recorder) if segment.is_block else segment
        for segment in recorder.segments
    ]
    return _merge_repeats([segment for segment in segments if segment.ops])


def _rename_block(segment: RecordedSegment, name: str, recorder: OpRecorder) -> RecordedSegment:
    """The record of a traced block with the name and the parameter names of the block `name`, which has the same
    shape."""

    prefix = f"{segment.name}.".removeprefix(".")  # of blocks of the model itself, when it is a list

    def renamed(parameter: str) -> str:
        other = f"{name}.{parameter.removeprefix(prefix)}".removeprefix(".")
        return other if parameter.startswith(prefix) and other in recorder.parameters else parameter

    return replace(
        segment,
        parameter_elements={renamed(key): size for key, size in segment.parameter_elements.items()},
        tp_dims={renamed(key): how for key, how in segment.tp_dims.items()},
        expert_shapes={renamed(key): shape for key, shape in segment.expert_shapes.items()},
        frozen_names={renamed(key) for key in segment.frozen_names},
        int8_names={renamed(key) for key in segment.int8_names},
    )


def _merge_repeats(segments: list[RecordedSegment]) -> list[RecordedSegment]:
    """Segments in order; equal blocks in a row are merged into one with a count. A block with weights that occurred
    before (tied weights) is not merged with blocks that have their own."""
    merged: list[RecordedSegment] = []
    seen_weights: set[str] = set()
    previous_shared = False
    for segment in segments:
        is_shared = seen_weights.issuperset(segment.parameter_elements)
        if merged and segment.is_block and merged[-1].ops is segment.ops and is_shared == previous_shared:
            merged[-1].num_repeats += 1
        else:
            merged.append(replace(segment))
        seen_weights, previous_shared = seen_weights | segment.parameter_elements.keys(), is_shared
    return merged


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
