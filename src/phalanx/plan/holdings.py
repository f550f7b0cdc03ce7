"""What a training run holds from step to step on one device: weights, their gradients and the optimizer's state; and
the copies of weights and gradients that come and go while a step is computed. Elements and bytes, no activations.

Bytes of a parameter. Megatron-LM's table (docs, distributed optimizer): bf16 weights with fp32 gradients 18, or
6 + 12/d where d replicas divide the optimizer; fp16 20, or 4 + 16/d, since an fp32 copy of gradients is made for the
update; fp32 16. Where weights are held in fp32 and cast when they are used (torch's FSDP2, autocast, Phalanx) 16, and 2
for the cast. ZeRO: Rajbhandari et al. 2020, section 5.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from phalanx.plan.profile import Segment
from phalanx.plan.setup import Setup
from phalanx.plan.work import Array

CAST = ("phalanx", "torch", "xla")
"""Stacks whose weights are held in fp32 and cast when they are used; others hold 16 bits and an fp32 copy."""
LOW = ("bf16", "fp16", "fp8", "fp4")
"""Precisions whose products read weights in 16 bits or fewer."""
BOTH = ("megatron-2021",)
"""Stacks whose bf16 gradients stay beside the fp32 ones (DeepSpeed's BF16 optimizer as BLOOM was trained with)."""
MOMENTS = {"adamw": 2, "lamb": 2, "sgd": 1, "lars": 1, "muon": 1}
"""Numbers that an optimizer keeps for each parameter. (muon's vectors have two, but they are few.)"""
STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.03}
"""Of each of them. 8 bits come with a scale for each block (Dettmers et al. 2022): 4 bytes for 128."""


@dataclass(frozen=True)
class Elements:
    """Parameters of a part of a model on one rank, before data-parallel ranks divide them."""

    dense: float = 0.0
    expert: float = 0.0
    frozen: float = 0.0
    """Of both, those that are not trained, as a share."""
    largest: float = 0.0
    """Of a single weight."""

    @property
    def count(self) -> float:
        """All of them."""
        return self.dense + self.expert


@dataclass(frozen=True)
class Held:
    """Bytes on one device for the whole of a step."""

    parameters: float
    gradients: float
    optimizer: float


@dataclass(frozen=True)
class Keeping:
    """How an optimizer keeps its state: `moments` bytes for each parameter; `offload`: in the host's memory."""

    moments: float
    offload: bool


LEAST = Keeping(0.0, True)
"""Of all optimizers the one that keeps least."""


def keeping(optimizer: str, state: str, offload: bool, momentum: float = 0.9) -> Keeping:
    """By the names of a recipe. KeyError: there is no optimizer or format of that name."""
    kept = STATE_BYTES[state] if optimizer == "adamw" else STATE_BYTES["fp32"]
    # lars and muon have their buffer at momentum 0, too
    moments = 0 if optimizer == "sgd" and not momentum else MOMENTS[optimizer]
    return Keeping(moments * kept, offload)


def elements(setup: Setup, segments: Iterable[tuple[Segment, int]]) -> Elements:
    """Parameters of segments, each so often, on one rank."""
    layout = setup.layout
    dense = expert = frozen = largest = 0.0
    for segment, count in segments:
        weights = segment.weights
        of_dense = weights.divided / layout.tensor + weights.whole
        of_expert = weights.expert / layout.expert
        dense += count * of_dense
        expert += count * of_expert
        largest = max(largest, weights.largest / (layout.expert if weights.expert else layout.tensor))
        if weights.count:
            frozen += count * (of_dense + of_expert) * weights.frozen / weights.count
    return Elements(dense, expert, frozen / (dense + expert) if dense + expert else 0.0, largest)


def held(setup: Setup, parts: Elements, kept: Keeping) -> Held:
    """Bytes of the training state on one rank that has these parameters."""
    low, fp16 = setup.precision in LOW, setup.precision == "fp16"
    cast = setup.zero == 3 or setup.stack.name in CAST or not low
    weight = 4.0 if cast else 2.0
    gradient = 4.0 if cast else (2.0 if fp16 else float(setup.stack.gradient_bytes))
    if setup.precision == "bf16" and not cast and setup.stack.name in BOTH:
        gradient += 2.0
    master = 0.0 if cast else 4.0
    copied = 4.0 if fp16 and not cast else 0.0
    # An optimizer that updates in the host's memory has its fp32 weights there, if those of the device are copies.
    state = 0.0 if kept.offload else master + copied + kept.moments
    of_optimizer, of_gradients, of_weights = (divided(setup, parts, level) for level in (1, 2, 3))
    trained = 1.0 - parts.frozen
    return Held(
        parameters=weight * of_weights,
        gradients=(gradient + setup.wire.memory * (setup.layout.replicate > 1 or not setup.wire.hides))
        * of_gradients
        * trained,
        optimizer=state * of_optimizer * trained,
    )


def divided(setup: Setup, parts: Elements, level: int) -> float:
    """Parameters of which one rank holds what ZeRO divides from `level` on: 1 the optimizer's state, 2 gradients, too,
    3 weights, too."""
    if setup.zero < level:
        return parts.count
    layout = setup.layout
    # Copies of a sharded model (hybrid sharding) divide nothing among each other.
    ranks = layout.context * (layout.shard if setup.zero == 3 else setup.parts)
    return float(among(parts.dense, parts.expert, ranks, layout.expert))


def among(dense: Array, expert: Array, ranks: Array, of_experts: Array) -> Array:
    """Elements on each of `ranks` that divide those of one: an expert is where its rank of expert parallelism is, so
    fewer ranks have the same. Numbers or arrays."""
    return dense / ranks + expert / np.maximum(1.0, ranks / of_experts)


def gathered(setup: Setup, parts: Elements) -> float:
    """Bytes of weights as products read them, where these are not what the rank holds anyway."""
    low = setup.precision in LOW
    if setup.zero == 3:
        return (2.0 if low else 4.0) * parts.count
    return 2.0 * parts.count if low and setup.stack.name in CAST else 0.0


def fresh(setup: Setup, parts: Elements) -> float:
    """Bytes of gradients as backward makes them, before they are added to those that are held. Autograd makes each in
    the precision of its product, one after the other. Sharded weights have theirs together. Transformer Engine, which
    adds to the held ones at once, keeps an empty one for each shape of a weight all the same (`get_dummy_wgrad`): in
    SimuMax's runs of Megatron-LM on B200 just what is missing without."""
    width = 2.0 if setup.precision in LOW else 4.0
    if setup.zero < 3 and setup.stack.name in CAST:
        trained = parts.count * (1.0 - parts.frozen)
        return (width + (4.0 if setup.precision in LOW else 0.0)) * min(parts.largest, trained)
    return width * parts.count * (1.0 - parts.frozen)


def scattered(setup: Setup, parts: Elements) -> float:
    """Bytes of the fp32 copy of a gathered gradient that sharding ranks add up."""
    return 4.0 * parts.count * (1.0 - parts.frozen) if setup.zero == 3 else 0.0
