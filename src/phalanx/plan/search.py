"""Choose a layout: all that are valid for a model, a number of devices and a batch, estimated at once in NumPy, the
best of them simulated.

The estimate is the simulation's arithmetic without its queues: a pipeline takes (micro-batches + (stages - 1) / chunks)
x its slowest stage (Narayanan et al. 2021, section 2.2), communication that can hide behind computing counts only as
far as it is longer. It serves to leave out what cannot win; the order of the best is that of the simulation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from phalanx.cluster.description import Cluster
from phalanx.plan.collectives import Kind, collective_seconds, links
from phalanx.plan.experts import PHASES
from phalanx.plan.footprint import least_bytes
from phalanx.plan.holdings import LEAST, Keeping, among
from phalanx.plan.pipeline import Schedule
from phalanx.plan.profile import Attention, Profile
from phalanx.plan.rates import Rates
from phalanx.plan.setup import Setup
from phalanx.plan.step import SLOWED, Parts, exposed, passing, update_seconds
from phalanx.plan.work import Array, Division, Price, Work, work
from phalanx.recipe.checks import divisors
from phalanx.recipe.schema import Parallelism

SIMULATED = 50
"""So many of the best estimates that fit are simulated."""
LOOKED_AT = 600
"""So many of the best estimates are asked whether they fit, exactly; more as long as none does."""
ROUNDED = 1 + 1e-9
"""Bounds and what they bound are added up in another order."""
WORSE = 1.25
"""An estimate so much above the best simulated time cannot win any more: estimates are within a tenth of it mostly."""
WAYS = ("none", "selective", "full")
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
MOST_CHUNKS = 4
"""Stages of a rank that are tried at most."""
COLUMNS = ("replicate", "shard", "tensor", "pipeline", "context", "expert", "micro", "way", "schedule", "chunks")

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Space:
    """What may be chosen. A value that the recipe gives leaves no choice."""

    devices: int
    batch: int
    layout: Parallelism | None = None
    micro: int | None = None
    ways: tuple[str, ...] = WAYS
    domain: int = 8
    """Devices that a fast network joins: tensor parallelism does not reach beyond."""
    replicas_only: bool = False
    """Whether the recipe's exactness asks for whole replicas."""
    sequences: bool = True
    """Whether samples are sequences, which tensor and context parallelism can cut."""


def candidates(profile: Profile, space: Space) -> Columns:
    """All valid configurations, one a row: each of COLUMNS as an array; ways and schedules as their numbers."""
    attention = [op for segment in profile.segments for op in segment.operations if isinstance(op, Attention)]
    heads = [op.kv_heads for op in attention] + [op.heads for op in attention]
    experts = max((segment.experts for segment in profile.segments), default=0)
    rows: list[np.ndarray] = []
    for layout in _layouts(profile, space, heads, experts):
        replicate, shard, _, pipeline, _, _ = layout
        share = space.batch // (replicate * shard)
        micros = [space.micro] if space.micro is not None else divisors(share)
        orders = _orders(profile.blocks, pipeline, space)
        grid = [
            (*layout, micro, WAYS.index(way), schedule, chunks)
            for micro in micros
            if share % micro == 0
            for schedule, chunks in orders
            if pipeline == 1 or (share // micro >= pipeline and _runs(schedule, chunks, share // micro, pipeline))
            for way in space.ways
            if not (way == "selective" and pipeline > 1 and SCHEDULES[schedule] == "zero-bubble")
        ]
        if grid:
            rows.append(np.array(grid, dtype=np.int64))
    table = np.concatenate(rows) if rows else np.zeros((0, len(COLUMNS)), dtype=np.int64)
    return dict(zip(COLUMNS, table.T, strict=True))


def _layouts(profile: Profile, space: Space, heads: Sequence[int], experts: int) -> list[tuple[int, ...]]:
    """(replicate, shard, tensor, pipeline, context, expert) of all layouts that divide model and batch evenly."""
    if space.layout is not None:
        it = space.layout
        return [(it.replicate, it.shard, it.tensor, it.pipeline, it.context, it.expert)]
    if space.replicas_only:
        return [(space.devices, 1, 1, 1, 1, 1)] if space.batch % space.devices == 0 else []
    found: list[tuple[int, ...]] = []
    cut = bool(heads) and space.sequences
    for tensor in divisors(space.devices):
        if tensor > 1 and (not cut or tensor > space.domain or any(count % tensor for count in heads)):
            continue
        for pipeline in divisors(space.devices // tensor):
            if pipeline > max(1, profile.blocks):
                continue
            for context in divisors(space.devices // tensor // pipeline):
                if context > 1 and (not cut or profile.tokens % (2 * context * tensor)):
                    continue
                parts = space.devices // tensor // pipeline // context
                if space.batch % parts:
                    continue
                for shard in divisors(parts):
                    for expert in divisors(shard * context):
                        if expert == 1 or (experts and experts % expert == 0):
                            found.append((parts // shard, shard, tensor, pipeline, context, expert))
    return found


def _orders(blocks: int, pipeline: int, space: Space) -> list[tuple[int, int]]:
    """Schedules by number, and stages of a rank."""
    if space.layout is not None:
        schedule = space.layout.pipeline_schedule
        stages = (
            len(space.layout.layers_per_stage)
            if space.layout.layers_per_stage
            else pipeline * (2 if schedule == "interleaved" else 1)
        )
        return [(SCHEDULES.index(schedule), stages // pipeline)]
    if pipeline == 1:
        return [(SCHEDULES.index("1f1b"), 1)]
    found = [(SCHEDULES.index("1f1b"), 1), (SCHEDULES.index("zero-bubble"), 1)]
    for chunks in range(2, MOST_CHUNKS + 1):
        if blocks >= pipeline * chunks:
            found.append((SCHEDULES.index("interleaved"), chunks))
    return found


def _runs(schedule: int, chunks: int, micros: int, pipeline: int) -> bool:
    """Interleaving wants whole groups of as many micro-batches as there are ranks."""
    return chunks == 1 or SCHEDULES[schedule] != "interleaved" or micros % pipeline == 0


@dataclass(frozen=True)
class Estimate:
    """Of each configuration: seconds of a step, and bytes that it needs on a device at least, whatever its activations
    take; exact as far as it goes (`footprint.least_bytes`)."""

    seconds: np.ndarray
    memory: np.ndarray


def estimate(base: Setup, rates: Rates, price: Price, columns: Columns, kept: Keeping = LEAST) -> Estimate:
    """All configurations at once. `base` gives profile, cluster, batch, precision and stack; `kept` is what the
    optimizer keeps for each parameter."""
    c = columns
    parts = c["replicate"] * c["shard"]
    micros = base.batch // (parts * c["micro"])
    stages = c["pipeline"]
    divided = {name: c[name].astype(float) for name in ("tensor", "context", "expert")}
    samples = c["micro"] / c["context"]
    rows, back = _distinct(c, ("micro", "context", "tensor", "expert"))
    unique = np.stack([samples, *divided.values()])[:, rows]
    stack, sharing = base.stack, c["shard"] * c["context"]
    division = Division(
        samples=unique[0],
        tensor=unique[1],
        context=unique[2],
        expert=unique[3],
        fused=stack.fused,
        sequence_parallel=stack.sequence_parallel,
    )
    reach = _Reach(base.cluster, stack.communicating, stack.latency)
    one, ranks = np.ones(unique.shape[1]), unique[1]
    groups = {"tensor": (ranks, one), "context": (unique[2], ranks), "expert": (unique[3], ranks)}

    def send(kind: Kind, group: str, size: Array, copies: float) -> np.ndarray:
        return reach.each(kind, *groups[group], size, copies)

    mixed = any(segment.experts for segment in base.profile.segments)
    count = base.profile.blocks or 1
    at_once = np.ceil(count / (stages * c["chunks"])) * c["chunks"] / count
    shape = (2, 2, len(back))  # forward and backward; the device's and the host's seconds
    passes, elements, trained, local = np.zeros(shape), *(np.zeros(len(back)) for _ in range(3))
    for segment in base.profile.segments:
        share = (at_once if segment.is_block else 1.0) * segment.repeats
        ahead, backwards = (work(segment, phase, division, price) for phase in PHASES)

        def seconds(done: Work, again: Work | None, way: str) -> list[np.ndarray]:
            made = passing(stack, done, again, way, mixed, rates.quantised, send)
            return [(made.total - made.launching) * one, made.launching * one]

        there = np.array(seconds(ahead, None, "none"))
        by_way = [seconds(backwards, ahead if way != "none" and segment.is_block else None, way) for way in WAYS]
        passes[0] += share * there[:, back]
        passes[1] += share * np.array(by_way)[c["way"], :, back].T
        weights = segment.weights
        dense, expert = weights.divided / c["tensor"] + weights.whole, weights.expert / c["expert"]
        elements = elements + share * (dense + expert)
        trained = trained + share * (dense + expert) * weights.trained
        local = local + share * among(dense, expert, sharing, c["expert"]) * weights.trained
    # The host runs ahead of the device; see step.through.
    forward, backward = np.hypot(passes[:, 0], passes[:, 1])
    gathered = reach.each("all_gather", sharing, c["tensor"], elements * 2.0)
    scattered = reach.each("all_gather", sharing, c["tensor"], trained * stack.gradient_bytes)
    behind = np.minimum(gathered, forward) + np.minimum(gathered + scattered, backward)
    waiting = np.maximum(0.0, gathered - forward) + np.maximum(0.0, gathered + scattered - backward)
    slowest = forward + backward + waiting + SLOWED * behind + (gathered + scattered) / np.maximum(1, count / stages)
    bubble = np.where(stages > 1, (stages - 1) / c["chunks"], 0.0)
    bubble = np.where(c["schedule"] == SCHEDULES.index("zero-bubble"), bubble / 3, bubble)
    size = local * stack.gradient_bytes * base.wire.share
    adding = reach.each("all_reduce", c["replicate"], c["tensor"] * sharing, size)
    adding = exposed(adding, backward, stack.hidden if base.wire.hides else 0.0)
    update = update_seconds(base.optimizer, rates, local)
    seconds_of = (micros + bubble) * slowest + adding + update + stack.step_seconds
    rows, back = _distinct(c, ("replicate", "shard", "tensor", "pipeline", "context", "expert", "chunks"))
    memory = np.array([least_bytes(each, kept) for each in setups(base, c, list(rows))])[back]
    return Estimate(np.asarray(seconds_of), memory)


def _distinct(columns: Columns, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Rows that differ in some of these columns, one of each kind, and which of them each row is like."""
    _, rows, back = np.unique(
        np.stack([columns[name] for name in names]), axis=1, return_index=True, return_inverse=True
    )
    return rows, back.reshape(-1)


class _Reach:
    """Seconds of collectives for arrays of layouts: links are the same for all that share group and stride."""

    def __init__(self, cluster: Cluster, scale: float, late: float) -> None:
        self._cluster, self._scale, self._late = cluster, scale, late

    def each(self, kind: Kind, ranks: Any, stride: Any, size: Any, copies: float = 1.0) -> np.ndarray:
        """Of one collective of `size` bytes for each group of `ranks`, `stride` devices apart."""
        size = np.broadcast_to(size, ranks.shape)
        found = np.zeros(ranks.shape)
        codes = ranks.astype(np.int64) * 2**32 + stride.astype(np.int64)
        for code in np.unique(codes):
            n, between = divmod(int(code), 2**32)
            if n > 1:
                here = codes == code
                over = links(self._cluster, n, between, self._late)
                found[here] = collective_seconds(kind, size[here], over, self._scale, copies)
        return found


@dataclass(frozen=True)
class Option:
    """One configuration, simulated."""

    setup: Setup
    parts: Parts
    memory: float
    """Bytes on the fullest device."""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.parts.total


@dataclass(frozen=True)
class Found:
    """The outcome of a search: what fits, the fastest first; how many were valid, and of how many of them the training
    state fits; the least memory that any takes."""

    options: tuple[Option, ...]
    valid: int
    least: Option | None
    """Where nothing fits: what comes closest."""


def setups(base: Setup, columns: Columns, rows: Sequence[int]) -> list[Setup]:
    """Configurations as setups."""
    found = []
    for row in rows:
        value = {name: int(columns[name][row]) for name in COLUMNS}
        layout = Parallelism(
            **{name: value[name] for name in ("replicate", "shard", "tensor", "pipeline", "context", "expert")},
            pipeline_schedule=SCHEDULES[value["schedule"]],
            layers_per_stage=base.layout.layers_per_stage,
            async_tp=base.layout.async_tp,
        )
        found.append(
            replace(
                base,
                layout=layout,
                micro=value["micro"],
                recompute=WAYS[value["way"]],
                zero=3 if value["shard"] * value["context"] > 1 else 0,
                chunks=value["chunks"],
            )
        )
    return found


def search(
    base: Setup,
    rates: Rates,
    price: Price,
    space: Space,
    simulate: Callable[[Setup], Parts],
    memory: Callable[[Setup], float],
    room: float,
    kept: Keeping = LEAST,
) -> Found:
    """The fastest configurations that fit into `room` bytes of a device. `simulate` and `memory` are exact. `kept`,
    what the optimizer keeps for each parameter, spares asking `memory` where the training state alone is too large."""
    columns = candidates(base.profile, space)
    valid = len(columns["micro"])
    if not valid:
        return Found((), 0, None)
    guess = estimate(base, rates, price, columns, kept)
    near = np.flatnonzero(guess.memory <= room * ROUNDED)
    order = near[np.argsort(guess.seconds[near], kind="stable")]
    options: list[Option] = []
    best = math.inf
    for asked, row in enumerate(order):
        if options and (len(options) >= SIMULATED or asked >= LOOKED_AT or guess.seconds[row] > WORSE * best):
            break
        (setup,) = setups(base, columns, [int(row)])
        needed = memory(setup)
        if needed <= room:
            options.append(Option(setup, simulate(setup), needed))
            best = min(best, options[-1].seconds)
    least = None if options else _closest(base, columns, guess.memory, simulate, memory)
    options.sort(key=_rank)
    return Found(tuple(options), valid, least)


def _closest(
    base: Setup,
    columns: Columns,
    bounds: np.ndarray,
    simulate: Callable[[Setup], Parts],
    memory: Callable[[Setup], float],
) -> Option:
    """What needs least memory, where each needs `bounds` at least."""
    closest, least = None, math.inf
    for row in np.argsort(bounds, kind="stable"):
        if bounds[row] > least * ROUNDED:
            break
        (setup,) = setups(base, columns, [int(row)])
        if (needed := memory(setup)) < least:
            closest, least = setup, needed
    assert closest is not None
    return Option(closest, simulate(closest), least)


def _rank(option: Option) -> tuple[float, int, bool, int, float]:
    """Faster comes first; what is as fast to half a percent, with the simpler layout,
    whole replicas and less recomputation."""
    layout = option.setup.layout
    divided = sum(size > 1 for size in (layout.replicate, layout.shard, layout.tensor, layout.pipeline, layout.context))
    way = WAYS.index(option.setup.recompute) if option.setup.recompute in WAYS else 0
    return round(math.log(option.seconds) / 0.005), divided, layout.shard > 1, way, option.memory
