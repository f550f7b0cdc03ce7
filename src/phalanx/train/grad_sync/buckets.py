"""Gradient buckets: flat buffers of gradients that are reduced together, fixed before step 0."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from phalanx.compat import call_foreach
from phalanx.train.distributed.dtensor_utils import distribute_like, to_local

GRAD_ALIGNMENT_ELEMENTS = 16
"""Elements (64 bytes of fp32) to which every gradient in a bucket is aligned, for fast kernels."""
QUANT_BLOCK_ELEMENTS = 256
"""Elements that share a scale in int8 quantization. A bucket is padded so that each worker's part is a multiple of it,
unless the bucket has fewer than MIN_BLOCKS_TO_PAD such blocks per worker, for which padding would add too much."""
MIN_BLOCKS_TO_PAD = 16
LAST_BUCKET_FRACTION = 16
"""The last bucket has no backward left to overlap with, so it is limited to 1/16 of the bucket size."""


@dataclass
class FlatBuffer:
    """A flat buffer for the gradients of a bucket: `flat` [length], a view of it for each parameter, and these views as
    gradients, sharded as the parameters are."""

    flat: Tensor
    views: list[Tensor]
    gradients: list[Tensor]


@dataclass
class Bucket:
    """Parameters with gradients that are reduced together.

    `num_used` elements hold gradients. The rest up to `num_elements` (metric slots, and padding to `world_size` equal
    parts) is not part of a norm: `num_used` does not depend on the world size.
    """

    parameters: list[nn.Parameter]
    offsets: list[int]
    num_used: int
    num_elements: int
    buffer: FlatBuffer  # target of gradient copies, unless there is a residual; after `finish`, the sum
    free_buffers: list[FlatBuffer] = field(default_factory=list)
    tree_nodes: list[FlatBuffer] = field(default_factory=list)  # nodes of the summation tree without their sibling
    residual: Tensor | None = None  # [length], fp32, error feedback: what this worker has not sent yet
    residual_views: list[Tensor] = field(default_factory=list)  # a view of the residual for each parameter
    projection_bases: list[Tensor | None] = field(default_factory=list)  # PowerSGD basis of each parameter
    send_uncompressed: bool = False  # no low-rank projection in this step
    pending_grads: list[Tensor | None] = field(default_factory=list)  # gradients that are not in the buffer yet
    missing_grads: set[int] = field(default_factory=set)  # parameters without a gradient from this backward yet

    def take_buffer(self) -> FlatBuffer:
        """Return an unused buffer, or a new one; its padding is zero."""
        if self.free_buffers:
            return self.free_buffers.pop()
        return make_flat_buffer(self.parameters, self.offsets, self.num_elements)

    def enable_error_feedback(self) -> None:
        """Allocate the residual."""
        if self.residual is None:
            self.residual = torch.zeros_like(self.buffer.flat, dtype=torch.float32)
            self.residual_views = make_parameter_views(self.residual, self.parameters, self.offsets)

    def take_grads(self) -> None:
        """Take the gradients from the parameters; `copy_grads_in` copies them to the buffer."""
        self.pending_grads = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def copy_grads_in(self) -> None:
        """Copy the taken gradients to the buffer; a missing gradient counts as zero. With error feedback they are added
        to the residual instead, in one pass over memory, and the buffer is left as it is."""
        pending, self.pending_grads = self.pending_grads, []
        views, gradients = [], []
        for gradient, view in zip(pending, self.residual_views or self.buffer.views, strict=True):
            if gradient is not None:
                views.append(view)
                gradients.append(to_local(gradient))
            elif not self.residual_views:
                view.zero_()
        if views:
            call_foreach("add_" if self.residual_views else "copy_", views, gradients)

    def flat_grads(self) -> Tensor:
        """Return the gradients without the padding."""
        return self.buffer.flat[: self.num_used]


def make_flat_buffer(
    parameters: Sequence[nn.Parameter], offsets: Sequence[int], length: int, dtype: torch.dtype | None = None
) -> FlatBuffer:
    """Make a zeroed buffer (with the parameters' dtype, unless given) and a view for each parameter. The views have the
    strides of their parameters, since fused optimizers iterate over both in memory order (channels_last, for example,
    is not in index order)."""
    flat = torch.zeros(length, dtype=dtype or parameters[0].dtype, device=parameters[0].device)
    views = make_parameter_views(flat, parameters, offsets)
    return FlatBuffer(flat, views, [distribute_like(p, view) for p, view in zip(parameters, views, strict=True)])


def make_parameter_views(flat: Tensor, parameters: Sequence[nn.Parameter], offsets: Sequence[int]) -> list[Tensor]:
    """Return views of a flat buffer with the shapes and strides of the parameters."""
    local_params = [to_local(p) for p in parameters]
    parts = zip(local_params, [torch.empty_like(p).stride() for p in local_params], offsets, strict=True)
    return [flat.as_strided(p.shape, stride, start) for p, stride, start in parts]


def make_buckets(
    parameters: Sequence[nn.Parameter],
    bucket_bytes: float,
    world_size: int,
    num_metric_slots: int = 0,
    dtype: torch.dtype | None = None,
    overlaps_backward: bool = False,
) -> list[Bucket]:
    """Divide parameters into buckets of at most `bucket_bytes` bytes, last parameter first (roughly the order in which
    backward makes gradients). A larger parameter gets its own bucket. A bucket has one dtype and one device. The last
    one has `num_metric_slots` slots after its gradients. `dtype`: dtype of the buffers, if not the parameters'. With
    `overlaps_backward`, the last of several buckets is split, because the communication of its tail is exposed."""
    groups: list[list[nn.Parameter]] = []
    size = 0.0
    for parameter in reversed(parameters):
        last = groups[-1][-1] if groups else None
        same_kind = last is not None and (last.dtype, last.device) == (parameter.dtype, parameter.device)
        if not same_kind or size + _parameter_bytes(parameter) > bucket_bytes:
            groups.append([])
            size = 0.0
        groups[-1].append(parameter)
        size += _parameter_bytes(parameter)
    if overlaps_backward and len(groups) > 1:
        groups[-1:] = _split_off_tail(groups[-1], bucket_bytes / LAST_BUCKET_FRACTION)
    return [_make_bucket(group, world_size, num_metric_slots if group is groups[-1] else 0, dtype) for group in groups]


def _split_off_tail(group: list[nn.Parameter], tail: float) -> list[list[nn.Parameter]]:
    """Split off the last parameters: at most `tail` bytes, or one parameter. Do not split if that is most of it."""
    sizes = [_parameter_bytes(parameter) for parameter in group]
    first = len(group) - 1
    while first > 0 and sum(sizes[first - 1 :]) <= tail:
        first -= 1
    return [group[:first], group[first:]] if first and 2 * sum(sizes[first:]) <= sum(sizes) else [group]


def _parameter_bytes(parameter: nn.Parameter) -> int:
    return to_local(parameter).numel() * parameter.element_size()


def _make_bucket(
    parameters: list[nn.Parameter], world_size: int, num_metric_slots: int, dtype: torch.dtype | None
) -> Bucket:
    offsets, num_used = [], 0
    for parameter in parameters:
        offsets.append(num_used)
        num_used += _round_up(to_local(parameter).numel(), GRAD_ALIGNMENT_ELEMENTS)
    has_many_blocks = num_used >= MIN_BLOCKS_TO_PAD * world_size * QUANT_BLOCK_ELEMENTS
    unit = QUANT_BLOCK_ELEMENTS if has_many_blocks else GRAD_ALIGNMENT_ELEMENTS
    length = _round_up(max(num_used + num_metric_slots, 1), world_size * unit)  # a rank's shards may all be empty
    return Bucket(parameters, offsets, num_used, length, make_flat_buffer(parameters, offsets, length, dtype))


def _round_up(bucket_index: int, unit: int) -> int:
    return -(-bucket_index // unit) * unit
