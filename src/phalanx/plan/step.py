"""How long a step takes: every stage's computing and communicating, what hides behind what, and the schedule that joins
them. Two streams a rank, one that computes and one that communicates, simulated segment by segment; then the pipeline.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from phalanx.plan.collectives import Kind, collective_seconds, links
from phalanx.plan.holdings import among
from phalanx.plan.measured import Here
from phalanx.plan.pipeline import Schedule, Stage, seconds
from phalanx.plan.profile import Segment
from phalanx.plan.rates import Rates
from phalanx.plan.setup import Setup, Stack
from phalanx.plan.work import Array, Division, Price, Work, priced_by, work

SLOWED = 0.15
"""By how much computing slows down while something is communicated: 19 % on average on A100, H100, MI250 and MI210
(arXiv 2507.03114), 13 % in Galvatron's measurements."""
OPTIMIZER_BYTES = {"adamw": 30.0, "lamb": 34.0, "sgd": 20.0, "lars": 24.0, "muon": 20.0}
"""Bytes that an update moves for each parameter: AdamW reads gradient, master weight and two moments, writes three of
them and the weight in 16 bits; lamb and lars read weights and updates once more for their norms. Muon's products are
not in it."""


@dataclass(frozen=True)
class Chunk:
    """What one rank has of the model for one pipeline stage: segments, each so often."""

    segments: tuple[tuple[Segment, int], ...]


@dataclass(frozen=True)
class Parts:
    """Seconds of a step by cause; they sum to the step."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    recomputing: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    sharding: float = 0.0
    launching: float = 0.0
    gradients: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    data: float = 0.0
    checkpoint: float = 0.0
    rest: float = 0.0

    @property
    def total(self) -> float:
        """The step."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class Pass:
    """One micro-batch through one chunk, one way: seconds by cause, numbers or arrays of layouts."""

    products: Array
    attention: Array
    memory: Array
    recomputing: Array
    tensor: Array
    context: Array
    expert: Array
    sharding: Array
    launching: Array
    """By how much the host, which launches kernels, holds the device up."""

    @property
    def total(self) -> Array:
        """Of all."""
        return sum(vars(self).values())


Sending = Callable[[Kind, str, Array, float], Array]
"""Seconds of a collective among "tensor", "context" or "expert" ranks, by its kind, bytes and copies."""


def passing(
    stack: Stack, done: Work, again: Work | None, way: str, experts: bool, quantised: bool, send: Sending
) -> Pass:
    """What a segment does one way and what is computed `again` for it, in seconds, without sharding; `way` of
    recomputing. `experts`: whether any segment of the model has them. Numbers or arrays of layouts."""
    recomputing: Array = 0.0
    reduces, dispatches, launching = done.reduces, done.dispatches, _launching(stack, done)
    if again is not None:
        launching = launching + _launching(stack, again)
        recomputing = again.seconds.memory if way == "selective" else again.seconds.total
        if way != "selective":
            reduces, dispatches = reduces + again.reduces, dispatches + again.dispatches
    slower = stack.experts if experts else 1.0
    computing = slower * stack.computing
    reduced = done.reduced if done.reduces or again is None else again.reduced
    dispatched = done.dispatched if done.dispatches or again is None else again.dispatched
    shown = send("all_gather", "context", done.keys_and_values, 1.0)
    return Pass(
        products=done.seconds.products * computing * (stack.eight if quantised else 1.0),
        attention=done.seconds.attention * computing,
        memory=done.seconds.memory * computing,
        recomputing=recomputing * computing,
        tensor=reduces * send("all_reduce", "tensor", reduced, 1.0) * (1 - stack.tensor_hidden),
        context=np.maximum(0.0, shown - done.seconds.attention * stack.computing),
        expert=dispatches * send("all_to_all", "expert", dispatched, done.copies) * slower,
        sharding=0.0,
        launching=launching,
    )


def _launching(stack: Stack, done: Work) -> Array:
    """Seconds that the host needs for what a pass through a segment launches."""
    launches = done.launches + done.of_experts * stack.expert_launches
    return launches * stack.launch + done.dispatches * stack.routing


def chunks(setup: Setup) -> list[Chunk]:
    """The stages of the pipeline, in order: blocks as evenly as they go, what stands before and after them with the
    first and the last."""
    stages = setup.layout.pipeline * setup.chunks
    blocks: list[Segment] = []
    before: list[Segment] = []
    after: list[Segment] = []
    for segment in setup.profile.segments:
        if segment.is_block:
            blocks += [segment] * segment.repeats
        elif blocks:
            after.append(segment)
        else:
            before.append(segment)
    given = setup.layout.layers_per_stage or even(len(blocks), stages)
    found, at = [], 0
    for index, count in enumerate(given):
        mine = [(each, 1) for each in before] if index == 0 else []
        for block in blocks[at : at + count]:
            if mine and mine[-1][0] is block:
                mine[-1] = (block, mine[-1][1] + 1)
            else:
                mine.append((block, 1))
        at += count
        if index == len(given) - 1:
            mine += [(each, 1) for each in after]
        found.append(Chunk(tuple(mine)))
    return found


def even(blocks: int, stages: int) -> list[int]:
    """So many blocks on so many stages; where it does not come out even, the ends have less: they do more besides."""
    each, left = divmod(blocks, stages)
    extra = sorted(range(stages), key=lambda stage: (-min(stage, stages - 1 - stage), stage))[:left]
    return [each + (stage in extra) for stage in range(stages)]


class Costs:
    """The costs of a setup's segments, computed once."""

    def __init__(self, setup: Setup, rates: Rates, price: Price | None = None) -> None:
        self.setup, self.rates = setup, rates
        self._price = price or priced_by(rates)
        layout, cluster = setup.layout, setup.cluster
        inner, late = layout.tensor * layout.context, setup.stack.latency
        self._groups = {
            "tensor": links(cluster, layout.tensor, 1, late),
            "context": links(cluster, layout.context, layout.tensor, late),
            "expert": links(cluster, layout.expert, layout.tensor, late),
        }
        self.shard = links(cluster, layout.shard * (layout.context if setup.zero == 3 else 1), layout.tensor, late)
        sharded = layout.shard * layout.context if setup.zero == 3 else 1
        adding = setup.parts * layout.context // sharded
        self.replicas = links(cluster, adding, layout.tensor * sharded, late)
        self.stages = links(cluster, layout.pipeline, inner * setup.parts, late)
        self.division = Division(
            samples=setup.micro / layout.context,
            tensor=layout.tensor,
            context=layout.context,
            expert=layout.expert,
            fused=setup.stack.fused,
            sequence_parallel=setup.stack.sequence_parallel,
        )
        self._known: dict[tuple[int, str], Any] = {}
        self._mixed = any(segment.experts for segment in setup.profile.segments)

    def of(self, segment: Segment, way: str) -> Pass:
        """A segment's forward, or its backward with what is computed again for it; without sharding."""
        key = (id(segment), way)
        if key not in self._known:
            self._known[key] = self._forward(segment) if way == "forward" else self._backward(segment)
        found: Pass = self._known[key]
        return found

    def _forward(self, segment: Segment) -> Pass:
        return self._pass(work(segment, "forward", self.division, self._price), None)

    def _backward(self, segment: Segment) -> Pass:
        again = None
        if segment.is_block and self.setup.recompute in ("full", "selective"):
            again = work(segment, "forward", self.division, self._price)
        return self._pass(work(segment, "backward", self.division, self._price), again)

    def _pass(self, done: Work, again: Work | None) -> Pass:
        made = passing(
            self.setup.stack, done, again, self.setup.recompute, self._mixed, self.rates.quantised, self._sent
        )
        return Pass(**{name: float(value) for name, value in vars(made).items()})

    def _sent(self, kind: Kind, group: str, size: Array, copies: float) -> Array:
        return collective_seconds(kind, size, self._groups[group], self.setup.stack.communicating, copies)

    def gathered(self, segment: Segment) -> float:
        """Seconds to gather the weights of a segment among the ranks that divide them; 0 where none do."""
        if self.setup.zero < 3 or self.shard.ranks == 1:
            return 0.0
        size = self.elements(segment) * 2.0
        return float(collective_seconds("all_gather", size, self.shard, self.setup.stack.communicating))

    def scattered(self, segment: Segment) -> float:
        """Seconds to add the gradients of a segment and leave each rank its part."""
        if self.setup.zero < 3 or self.shard.ranks == 1:
            return 0.0
        size = self.trained(segment) * float(self.setup.stack.gradient_bytes)
        return float(collective_seconds("reduce_scatter", size, self.shard, self.setup.stack.communicating))

    def elements(self, segment: Segment) -> float:
        """Parameters of a segment on one rank, before data-parallel ranks divide them."""
        return sum(self._elements(segment))

    def trained(self, segment: Segment) -> float:
        """Those of them that are trained, which alone have gradients and an update."""
        return self.elements(segment) * segment.weights.trained

    def updated(self, segment: Segment) -> float:
        """Those of them that one rank updates."""
        setup, layout = self.setup, self.setup.layout
        ranks = layout.context * (layout.shard if setup.zero == 3 else setup.parts) if setup.zero else 1
        return float(among(*self._elements(segment), ranks, layout.expert)) * segment.weights.trained

    def _elements(self, segment: Segment) -> tuple[float, float]:
        weights, layout = segment.weights, self.setup.layout
        return weights.divided / layout.tensor + weights.whole, weights.expert / layout.expert


def through(costs: Costs, chunk: Chunk, way: str) -> Pass:
    """A micro-batch through a chunk, one way, with the weights gathered ahead of use where they are divided: the next
    segment's while this one is computed."""
    passes = [(costs.of(segment, way), segment, count) for segment, count in chunk.segments]
    if way == "backward":
        passes.reverse()
    exposed = 0.0
    if costs.setup.zero == 3 and costs.shard.ranks > 1:
        lots: list[Lot] = []
        for each, segment, count in passes:
            scattered = costs.scattered(segment) if way == "backward" else 0.0
            lots += [Lot(each.total - each.launching, costs.gathered(segment), scattered)] * count
        exposed = _exposed(lots)
    sums = {name: sum(count * getattr(each, name) for each, _, count in passes) for name in Pass.__dataclass_fields__}
    sums["sharding"] = exposed
    # The host runs ahead of the device, so only what a whole pass takes counts; where both are about as busy each waits
    # for the other now and then.
    launching, device = sums.pop("launching"), sum(sums.values())
    return Pass(**sums, launching=math.hypot(launching, device) - device)


class Lot(NamedTuple):
    """A segment whose weights are divided: seconds of computing it, of gathering its weights before, of scattering its
    gradients after."""

    computing: float
    gathering: float
    scattering: float


def _exposed(lots: Sequence[Lot]) -> float:
    """Seconds by which gathering weights and scattering gradients lengthens a pass: two streams, weights gathered one
    segment ahead, computing slowed down while something travels."""
    computing, travelling = 0.0, lots[0].gathering
    ready = travelling
    for index, lot in enumerate(lots):
        mine = ready
        if index + 1 < len(lots):
            travelling = max(travelling, computing) + lots[index + 1].gathering
            ready = travelling
        start = max(computing, mine)
        together = max(0.0, min(travelling - start, lot.computing))
        computing = start + lot.computing + SLOWED * together
        if lot.scattering:
            travelling = max(travelling, computing) + lot.scattering
    # weights that are still being gathered are another pass's
    left = travelling if lots[-1].scattering else computing
    return max(computing, left) - sum(lot.computing for lot in lots)


def sent_between(costs: Costs) -> float:
    """Seconds that the activations of a micro-batch travel from a stage to the next."""
    setup, layout = costs.setup, costs.setup.layout
    if layout.pipeline == 1:
        return 0.0
    block = next(each for each in setup.profile.segments if each.is_block)
    size = block.boundary.at(setup.micro / layout.context) / layout.tensor
    return float(collective_seconds("send", size, costs.stages, setup.stack.communicating))


def step_here(setup: Setup, rates: Rates, here: Here) -> Parts:
    """Seconds of a step by cause on a machine that was measured, one process after the other's operations: whole
    replicas only. NotMeasured: something that it needs was not."""
    costs = Costs(setup, rates, here.price)
    chunk = chunks(setup)[0]
    passes = [through(costs, chunk, way) for way in ("forward", "backward")]
    weights = sum(costs.trained(segment) * count for segment, count in chunk.segments)
    ranks = setup.layout.replicate
    sums = {name: setup.micros * sum(getattr(each, name) for each in passes) for name in Pass.__dataclass_fields__}
    sums["memory"] += (setup.micros - 1) * here.accumulate(weights)
    return Parts(
        **sums,
        gradients=here.exchange(weights * setup.stack.gradient_bytes * setup.wire.share, ranks) if ranks > 1 else 0.0,
        optimizer=here.update(weights),
        rest=setup.stack.step_seconds,
    )


def step(setup: Setup, rates: Rates, price: Price | None = None) -> Parts:
    """Seconds of a step by cause, from the point of view of the busiest pipeline rank."""
    costs, layout = Costs(setup, rates, price), setup.layout
    parts_of_model = chunks(setup)
    forward = [through(costs, chunk, "forward") for chunk in parts_of_model]
    backward = [through(costs, chunk, "backward") for chunk in parts_of_model]
    stages = [Stage(f.total, b.total) for f, b in zip(forward, backward, strict=True)]
    send = sent_between(costs)
    schedule: Schedule = "interleaved" if setup.chunks > 1 else layout.pipeline_schedule
    made = seconds(schedule, stages, layout.pipeline, setup.micros, send)
    busiest = max(
        range(layout.pipeline), key=lambda rank: sum(s.forward + s.backward for s in stages[rank :: layout.pipeline])
    )
    mine = [*forward[busiest :: layout.pipeline], *backward[busiest :: layout.pipeline]]
    sums = {name: setup.micros * sum(getattr(each, name) for each in mine) for name in Pass.__dataclass_fields__}
    ranks = [
        [pair for each in parts_of_model[at :: layout.pipeline] for pair in each.segments]
        for at in range(layout.pipeline)
    ]
    updated = max(sum(costs.updated(segment) * count for segment, count in mine) for mine in ranks)
    gradients = (
        updated if setup.zero == 3 else max(sum(costs.trained(of) * count for of, count in mine) for mine in ranks)
    )
    last = max(sum(each.total for each in backward[rank :: layout.pipeline]) for rank in range(layout.pipeline))
    first = max(sum(each.total for each in forward[rank :: layout.pipeline]) for rank in range(layout.pipeline))
    return Parts(
        **sums,
        bubble=made - sum(sums.values()),
        gradients=_gradients(costs, gradients, first, last),
        optimizer=update_seconds(setup.optimizer, rates, updated),
        rest=setup.stack.step_seconds,
    )


def _gradients(costs: Costs, weights: float, first: float, last: float) -> float:
    """Exposed seconds of adding gradients of so many `weights` over replicas, behind the `last` backward, and, where
    replicas divide the optimizer's state, of gathering the new weights, behind the `first` forward."""
    setup, over = costs.setup, costs.replicas
    stack = setup.stack
    if over.ranks == 1:
        return 0.0
    scale = stack.communicating
    if setup.zero in (1, 2):
        adding = float(collective_seconds("reduce_scatter", weights * stack.gradient_bytes, over, scale))
        gathering = float(collective_seconds("all_gather", weights * 2.0, over, scale))
    else:
        size = weights * stack.gradient_bytes * setup.wire.share
        adding = float(collective_seconds("all_reduce", size, over, scale))
        gathering = 0.0
    hidden = stack.hidden if setup.wire.hides else 0.0
    return float(exposed(adding, last, hidden) + exposed(gathering, first, stack.hidden))


def exposed(travelling: Array, computing: Array, hidden: float) -> Array:
    """What does not hide, and by how much it slows down what it hides behind. Numbers or arrays."""
    behind = np.minimum(travelling * hidden, computing)
    return travelling - behind + SLOWED * behind


def update_seconds(optimizer: str, rates: Rates, weights: Array) -> Array:
    """Seconds of the optimizer on so many weights."""
    return weights * OPTIMIZER_BYTES[optimizer] / (rates.bandwidth * 0.8)
