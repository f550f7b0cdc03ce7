"""From an `nn.Module` to its `ModelProfile`, without memory and without time: the model is followed on the meta device,
where tensors have shapes and nothing else, forward and backward.

Two micro-batch sizes are traced, and what differs between them grows with the samples. A repeated block is traced once;
the others of its shape are skipped. Attention is recorded before torch decomposes it: on the meta device torch would
choose the math kernel, which stores s x s scores that no GPU stores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.compat import fake_tensor_mode, intercept_operations
from phalanx.planner.model_profile import (
    ModelProfile,
)
from phalanx.planner.trace.attention_capture import AttentionCaptureMode
from phalanx.planner.trace.blocks import skip_repeated_blocks
from phalanx.planner.trace.op_recorder import OpRecorder, RecordedSegment
from phalanx.planner.trace.pytree import module_device, op_name
from phalanx.planner.trace.to_segments import TRACED_MICRO_SIZES, drop_tied_weights, to_segment

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
