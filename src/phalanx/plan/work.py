"""What one rank has to do for one micro-batch in one segment of a model, once a layout has divided it: seconds of
computing, and the bytes that travel. Numbers or NumPy arrays of layouts alike, so that a search can ask for thousands.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.plan.profile import Attention, Dispatch, Move, Operation, Phase, Product, Reduce, Segment, Size
from phalanx.plan.rates import Rates, attention_seconds, move_seconds, product_seconds

Array = Any
"""A number, or an array of them."""


@dataclass(frozen=True)
class Division:
    """How a segment is divided; each a number or an array. `samples` of the micro-batch: less than one where context
    parallelism cuts a sample."""

    samples: Array
    tensor: Array = 1
    context: Array = 1
    expert: Array = 1
    fused: bool = True
    """Whether a compiler or hand-written kernels fuse what is bound by memory."""
    sequence_parallel: bool = True
    """Whether tensor ranks divide by sequence what they do not divide by width (Korthikanti et al. 2022)."""


@dataclass(frozen=True)
class Seconds:
    """Of computing, by what bounds it."""

    products: Array = 0.0
    attention: Array = 0.0
    memory: Array = 0.0

    @property
    def total(self) -> Array:
        """Of all."""
        return self.products + self.attention + self.memory

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.products + other.products, self.attention + other.attention, self.memory + other.memory)

    def __mul__(self, factor: Array) -> "Seconds":
        return Seconds(self.products * factor, self.attention * factor, self.memory * factor)


@dataclass(frozen=True)
class Work:
    """One phase of a segment: computing, and what is communicated in it, in bytes of whole buffers: sums over tensor
    ranks (`reduces` of `reduced` bytes each), tokens that travel to experts (`dispatches` of `dispatched` bytes), keys
    and values that context ranks show each other."""

    seconds: Seconds
    reduces: int
    reduced: Array
    dispatches: int
    dispatched: Array
    copies: float
    keys_and_values: Array
    launches: float = 0.0
    """Kernels that the host has to launch."""
    of_experts: Array = 0.0
    """Products of single experts among those that are grouped: launches of their own where software loops over them."""


Price = Callable[[Operation, Division], Seconds]
"""What an operation costs, divided so."""


def work(segment: Segment, phase: Phase, division: Division, price: Price) -> Work:
    """What a phase of a segment asks of one rank."""
    total = Seconds()
    reduced: list[Array] = []
    dispatched: list[Array] = []
    copies = 1.0
    shown: Array = 0.0
    launches = 0.0
    of_experts: Array = 0.0
    for op in segment.of(phase):
        launches += float(op.leads) if isinstance(op, Move) and division.fused else 1.0
        if isinstance(op, Reduce):
            reduced.append(_at(op.size, division.samples))
        elif isinstance(op, Dispatch):
            # Each tensor rank sends its own part of the tokens.
            dispatched.append(_at(op.size, division.samples) / division.tensor)
            copies = op.copies
        else:
            total = total + price(op, division)
            if isinstance(op, Product) and op.grouped:
                of_experts = of_experts + np.maximum(_at(op.count, division.samples) / division.expert, 1.0)
            if isinstance(op, Attention):
                heads = op.kv_heads / np.minimum(division.tensor, op.kv_heads)
                tokens = _at(op.samples, division.samples) * division.context * op.keys
                shown = shown + 2.0 * op.width * heads * op.head_dim * tokens * (2 if phase == "backward" else 1)
    return Work(
        total,
        len(reduced),
        sum(reduced) / len(reduced) if reduced else 0.0,
        len(dispatched),
        sum(dispatched) / len(dispatched) if dispatched else 0.0,
        copies,
        shown,
        launches,
        of_experts,
    )


def priced_by(rates: Rates) -> Price:
    """Costs by data sheet or fitted curves."""

    def price(op: Operation, division: Division) -> Seconds:
        if isinstance(op, Product):
            return Seconds(products=_product(rates, op, division))
        if isinstance(op, Attention):
            heads = op.heads / division.tensor if op.divided else op.heads
            return Seconds(attention=attention_seconds(rates, op, division.samples, heads))
        if isinstance(op, Move):
            return Seconds(memory=_move(rates, op, division))
        return Seconds()

    return price


def _product(rates: Rates, op: Product, division: Division) -> Array:
    dims = {name: _at(getattr(op, name), division.samples) for name in ("count", "m", "n", "k")}
    if op.expert:
        # The tokens of all ranks of a group meet at the rank that has their expert; where tensor ranks have divided
        # the sequence, each brings its part.
        rows = "m" if op.m.each else "k"
        dims["count"] = np.maximum(dims["count"] / division.expert, 1.0)
        dims[rows] = dims[rows] * division.expert / division.tensor
    elif op.divided:
        dims[op.divided] = np.maximum(dims[op.divided] / division.tensor, 1.0)
    return product_seconds(rates, **dims, width=op.width, weight=op.weight, grouped=op.grouped)


def _move(rates: Rates, op: Move, division: Division) -> Array:
    moved = _at(op.fused if division.fused else op.moved, division.samples)
    launches = float(op.leads) if division.fused else 1.0
    among = division.tensor if op.divided or division.sequence_parallel else 1
    return move_seconds(rates, moved / among, launches)


def _at(size: Size, samples: Array) -> Array:
    return size.fixed + size.each * samples
