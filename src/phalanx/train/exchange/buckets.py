"""Buckets: the gradients that travel together, fixed before step 0, in memory of their own."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.compat import foreach
from phalanx.train.optimizers.local import like, local

ALIGNMENT = 16
"""Elements (64 bytes of fp32) to which every gradient in a bucket is aligned, as fast kernels like it."""
BLOCK = 256
"""Elements that share a scale where numbers are rounded to 8 bits. Each worker's part of a bucket is a multiple of it,
so that nobody has to pad it, unless that would add more than a small part to the bucket: one in ROOMY."""
ROOMY = 16
TAIL = 16
"""What comes last in backward has nothing to travel beside, so it is kept to one part in so many of a bucket."""


@dataclass
class Slab:
    """One buffer for the gradients of a bucket: `flat` [length], a view of it for each parameter, and what these views
    are as gradients: sharded as the parameter is."""

    flat: Tensor
    views: list[Tensor]
    gradients: list[Tensor]


@dataclass
class Bucket:
    """Some parameters whose gradients travel together.

    `used` elements hold gradients; the rest up to `length`, slots and what makes the bucket a multiple of `world` equal
    parts, belongs to no norm: `used` does not depend on the world.
    """

    parameters: list[nn.Parameter]
    starts: list[int]
    used: int
    length: int
    slab: Slab  # where gradients are copied now, unless there is a residual; after `finish`, the sum
    spare: list[Slab] = field(default_factory=list)
    finished: list[Slab] = field(default_factory=list)  # nodes of the tree that wait for their sibling
    residual: Tensor | None = None  # [length], fp32, what this worker has not sent yet of its gradients
    held: list[Tensor] = field(default_factory=list)  # a view of the residual for each parameter
    bases: list[Tensor | None] = field(default_factory=list)  # of each parameter, on what its gradient is projected
    whole: bool = False  # nothing is projected in this step
    fresh: list[Tensor | None] = field(default_factory=list)  # gradients that are not in the slab yet
    missing: set[int] = field(default_factory=set)  # parameters whose gradients backward has not made yet

    def new_slab(self) -> Slab:
        """A spare buffer, or a new one; its padding is zero."""
        return self.spare.pop() if self.spare else make_slab(self.parameters, self.starts, self.length)

    def hold_back(self) -> None:
        """Have a residual."""
        if self.residual is None:
            self.residual = torch.zeros_like(self.slab.flat, dtype=torch.float32)
            self.held = views_of(self.residual, self.parameters, self.starts)

    def pay_back(self) -> None:
        """Have in the slab what the residual has, and keep nothing."""
        if self.residual is not None:
            self.sum().copy_(self.residual[: self.used])
            self.residual, self.held = None, []

    def collect(self) -> None:
        """Take the parameters' gradients away from them; `fill` has them then."""
        self.fresh = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def fill(self) -> None:
        """Move what was collected into the slab; a gradient that is not there counts as zero. Where something is held
        back they are added to it instead, and the slab is left as it is: one pass through memory does both."""
        fresh, self.fresh = self.fresh, []
        views, gradients = [], []
        for gradient, view in zip(fresh, self.held or self.slab.views, strict=True):
            if gradient is not None:
                views.append(view)
                gradients.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
            elif not self.held:
                view.zero_()
        if views:
            foreach("add_" if self.held else "copy_", views, gradients)

    def sum(self) -> Tensor:
        """The gradients without the padding."""
        return self.slab.flat[: self.used]


def make_slab(
    parameters: Sequence[nn.Parameter], starts: Sequence[int], length: int, dtype: torch.dtype | None = None
) -> Slab:
    """A zeroed buffer (of the parameters' dtype, or another) with a view for each parameter, of the parameter's own
    memory layout: fused optimizers go over both as they lie in memory (channels_last, for one, is not in the order of
    the indices)."""
    flat = torch.zeros(length, dtype=dtype or parameters[0].dtype, device=parameters[0].device)
    views = views_of(flat, parameters, starts)
    return Slab(flat, views, [like(p, view) for p, view in zip(parameters, views, strict=True)])


def views_of(flat: Tensor, parameters: Sequence[nn.Parameter], starts: Sequence[int]) -> list[Tensor]:
    """The parts of a bucket's memory that belong to its parameters, as each of these lies in memory."""
    here = [local(p) for p in parameters]
    parts = zip(here, [torch.empty_like(p).stride() for p in here], starts, strict=True)
    return [flat.as_strided(p.shape, stride, start) for p, stride, start in parts]


def make_buckets(
    parameters: Sequence[nn.Parameter],
    capacity: float,
    world: int,
    slots: int = 0,
    dtype: torch.dtype | None = None,
    beside: bool = False,
) -> list[Bucket]:
    """Cut parameters, last first (roughly the order in which backward makes gradients), into buckets of at most
    `capacity` bytes (a larger parameter has one of its own). A bucket has one dtype and one device. The last has room
    for so many `slots` after its gradients. `dtype`: of what travels, where it is not the parameters'. `beside`: they
    travel beside backward, so the last of several is cut once more, to leave little that comes after it."""
    groups: list[list[nn.Parameter]] = []
    size = 0.0
    for parameter in reversed(parameters):
        last = groups[-1][-1] if groups else None
        alike = last is not None and (last.dtype, last.device) == (parameter.dtype, parameter.device)
        if not alike or size + _nbytes(parameter) > capacity:
            groups.append([])
            size = 0.0
        groups[-1].append(parameter)
        size += _nbytes(parameter)
    if beside and len(groups) > 1:
        groups[-1:] = _cut(groups[-1], capacity / TAIL)
    return [_bucket(group, world, slots if group is groups[-1] else 0, dtype) for group in groups]


def _cut(group: list[nn.Parameter], tail: float) -> list[list[nn.Parameter]]:
    """The parameters, the last of them apart: at most `tail` bytes or one parameter. Whole if that is most of it."""
    sizes = [_nbytes(parameter) for parameter in group]
    first = len(group) - 1
    while first > 0 and sum(sizes[first - 1 :]) <= tail:
        first -= 1
    return [group[:first], group[first:]] if first and 2 * sum(sizes[first:]) <= sum(sizes) else [group]


def _nbytes(parameter: nn.Parameter) -> int:
    return local(parameter).numel() * parameter.element_size()


def _bucket(parameters: list[nn.Parameter], world: int, slots: int, dtype: torch.dtype | None) -> Bucket:
    starts, used = [], 0
    for parameter in parameters:
        starts.append(used)
        used += _round_up(local(parameter).numel(), ALIGNMENT)
    unit = BLOCK if used >= ROOMY * world * BLOCK else ALIGNMENT
    length = _round_up(max(used + slots, 1), world * unit)  # a rank may hold no row of any of them
    return Bucket(parameters, starts, used, length, make_slab(parameters, starts, length, dtype))


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
