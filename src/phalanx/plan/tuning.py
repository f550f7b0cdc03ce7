"""What could make a recipe faster on a machine: candidates with the gain to expect, and what a measurement says of one.

Pure: numbers in, candidates and verdicts out; `phalanx.tuning` measures between. No candidate changes the mathematics
(global batch, learning rate, data, model), and precision only where that is allowed. Predictions are rules of thumb and
decide nothing but the order of trials, and which are not worth one.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.plan.memory import PART, activation_bytes, state_bytes
from phalanx.plan.resolve import parts_of, shared_among
from phalanx.recipe import Recipe
from phalanx.recipe.checks import divisors
from phalanx.recipe.devices import sizes_for
from phalanx.recipe.schema import Parallelism

MARGIN = 1.02
"""A gain below that is not worth another recipe: repeated runs of the same one differ by as much."""
FLOOR = 0.9
"""What is predicted to be slower than that is not tried: rules of thumb are not wrong by more."""
EXCHANGE = 4e9
"""Bytes a second that processes of one machine exchange over gloo: an order of magnitude."""
CACHE = 32e6
"""Bytes that a processor's caches hold: an order of magnitude."""
CHANGEABLE = (
    "batch.micro_size",
    "compile",
    "parallelism",
    "parallelism.async_tp",
    "memory.chunked_loss",
    "memory.activation_checkpointing",
    "precision",
    "num_threads",
)
"""Keys that tuning may change: they change speed, memory and rounding."""

Round = tuple[Sequence[float], Sequence[float]]
"""Seconds of steps of the best so far and of a candidate, taken one right after the other."""


@dataclass(frozen=True)
class Facts:
    """What predictions rest on. `cores` are physical, `logical` with hyperthreads; `memory_bytes` is a device's (of a
    CPU: all of it); `step_seconds` is a step of the best so far; `vocabulary` is None where there is none."""

    device: str
    cores: int
    logical: int
    memory_bytes: int
    tflops: Mapping[str, float]
    parameters: int
    flops_per_sample: float
    saved_bytes_per_sample: float
    step_seconds: float
    precisions: tuple[str, ...] = ()
    """Precisions that may be tried."""
    processes: bool = True
    """Whether the number of processes may change."""
    vocabulary: int | None = None
    sequence: int = 1
    frozen: int = 0
    """Parameters that are not trained, besides `parameters`."""
    peaks: Mapping[str, float | None] = field(default_factory=dict)
    """Bytes that a sample takes at the peak of a step, by way of recomputing."""


@dataclass(frozen=True)
class Candidate:
    """One change to try: dotted keys and their values, the gain to expect (old time over new) and why."""

    changes: Mapping[str, Any]
    predicted: float
    why: str

    @property
    def label(self) -> str:
        """`compile=true`, or `2 processes x 1 thread`."""
        layout = self.changes.get("parallelism")
        if layout is not None and "num_threads" in self.changes:
            world, threads = math.prod(layout.values()), self.changes["num_threads"]
            return f"{world} processes x {threads} {'thread' if threads == 1 else 'threads'}"
        return " ".join(f"{key}={_shown(value)}" for key, value in self.changes.items())


@dataclass(frozen=True)
class Measured:
    """A candidate against the best so far: medians in seconds, their ratio, and the quartiles of the rounds' ratios."""

    before: float
    after: float
    ratio: float
    low: float
    high: float

    @property
    def gains(self) -> bool:
        """Whether it is faster by more than noise."""
        return self.ratio >= MARGIN and self.low > 1.0


def measured(rounds: Sequence[Round]) -> Measured:
    """What the rounds say together."""
    before = statistics.median(itertools.chain.from_iterable(old for old, _ in rounds))
    after = statistics.median(itertools.chain.from_iterable(new for _, new in rounds))
    ratios = _ratios(rounds)
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Measured(before, after, before / after, low, high)


def hopeless(rounds: Sequence[Round]) -> bool:
    """Whether more rounds would be wasted: every one so far, two at least, was slower by a tenth."""
    return len(rounds) >= 2 and max(_ratios(rounds)) < FLOOR


def steps_to_pay(found: Measured, extra_seconds: float) -> int:
    """After how many steps a longer start (compilation) is paid back."""
    return math.ceil(max(0.0, extra_seconds) / (found.before - found.after))


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with dotted keys set. ValueError for a key that tuning must leave alone."""
    values = recipe.model_dump()
    for key, value in changes.items():
        if key not in CHANGEABLE:
            raise ValueError(f"tuning must not change {key}")
        *above, last = key.split(".")
        holder = values
        for part in above:
            holder = holder[part]
        holder[last] = value
    return Recipe.model_validate(values)


def candidates(recipe: Recipe, facts: Facts) -> list[Candidate]:
    """What could be faster than `recipe` (resolved), the largest predicted gain first."""
    found = itertools.chain(
        _precisions(recipe, facts),
        _compile(recipe, facts),
        _processes(recipe, facts),
        _layouts(recipe, facts),
        _micros(recipe, facts),
        _recomputes(recipe, facts),
        _losses(recipe, facts),
        _threads(recipe, facts),
    )
    return sorted((one for one in found if one.predicted >= FLOOR), key=lambda one: -one.predicted)


def untried(given: Recipe, facts: Facts, waiting: float) -> list[str]:
    """What is left as it is, and why. `waiting`: the share of a step that waits for data."""
    notes = []
    if not facts.precisions:
        notes.append(f"precision: {given.precision} is given; --allow-precision tries others")
    if not facts.processes:
        notes.append("processes: their number is given")
    if given.memory.activation_checkpointing in ("auto", "none"):
        notes.append("memory.activation_checkpointing: nothing is recomputed, and to do so would only take time")
    notes.append(f"data: read ahead by a thread; a step waits {waiting:.1%} of its time for them")
    return notes


def _precisions(recipe: Recipe, facts: Facts) -> Iterator[Candidate]:
    now = _rate(recipe.precision, facts)
    for name in facts.precisions:
        rate = _rate(name, facts)
        if name == recipe.precision or not rate or not now:
            continue
        matmul = _matmul_seconds(recipe, facts)
        predicted = facts.step_seconds / (facts.step_seconds - matmul + matmul * now / rate)
        yield Candidate({"precision": name}, predicted, f"its matmuls are about {rate / now:.2f} x as fast here")


def _splits_backward(recipe: Recipe) -> bool:
    return isinstance(recipe.parallelism, Parallelism) and recipe.parallelism.splits_backward


def _compile(recipe: Recipe, facts: Facts) -> Iterator[Candidate]:
    if not recipe.compile and not _splits_backward(recipe):
        rest = 1 - _matmul_seconds(recipe, facts) / facts.step_seconds
        why = f"{rest:.0%} of a step is not matmul, of which fusing saves about half"
        yield Candidate({"compile": True}, 1 / (1 - rest / 2), why)
    elif recipe.compile is True and facts.device != "cpu":
        yield Candidate({"compile": "cuda-graphs"}, 1.05, "a graph starts all kernels of a block at once")


def _processes(recipe: Recipe, facts: Facts) -> Iterator[Candidate]:
    """More processes with fewer threads each, on a CPU."""
    layout = recipe.parallelism
    if facts.device != "cpu" or not facts.processes or not isinstance(layout, Parallelism) or layout.world > 1:
        return
    batch = recipe.batch.global_size
    for world in divisors(facts.cores)[1:]:
        micro = _next_micro(recipe, batch // world) if batch % world == 0 else None
        replicas = changed(recipe, {"parallelism": {"replicate": world}})
        if micro is None or not _fits(replicas, micro, recipe.memory.activation_checkpointing, facts):
            continue
        exchange = 2 * (world - 1) / world * 4 * facts.parameters / EXCHANGE
        changes: dict[str, Any] = {"parallelism": {"replicate": world}, "batch.micro_size": micro}
        if recipe.determinism != "elastic":  # there threads are part of what must not change with the workers
            changes["num_threads"] = facts.cores // world
        predicted = facts.step_seconds / (0.95 * facts.step_seconds + exchange)
        yield Candidate(changes, predicted, "threads wait for each other in every operation, processes once a step")


def _layouts(recipe: Recipe, facts: Facts) -> Iterator[Candidate]:
    """Replicas instead of shards and the other way round, where nothing else divides the model; products that overlap
    with what tensor ranks send."""
    layout = recipe.parallelism
    if isinstance(layout, Parallelism) and layout.tensor > 1 and not layout.async_tp and not recipe.compile:
        if recipe.data.seq_len // layout.context % (2 * layout.tensor) == 0:
            # On two cores with two ranks: 0.96 x; their cores have no time left in which to send.
            predicted = 1.05 if facts.device != "cpu" else 0.95
            yield Candidate({"parallelism.async_tp": True}, predicted, "half of what leaves a block's parts is hidden")
        return
    whole = recipe.determinism == "elastic" or recipe.local_sgd is not None
    if not isinstance(layout, Parallelism) or whole or layout.expert > 1:
        return
    size = layout.replicate * layout.shard
    if size != layout.world or size == 1:
        return
    replicas = {"parallelism": {"replicate": size}}
    if layout.shard > 1 and _fits(
        changed(recipe, replicas), _micro(recipe), recipe.memory.activation_checkpointing, facts
    ):
        yield Candidate(replicas, 1.1, "replicas exchange gradients only, and they fit")
    elif layout.shard == 1:
        yield Candidate(
            {"parallelism": {"shard": size}}, 0.95, "shards share the optimizer's work and gather parameters"
        )


def _micros(recipe: Recipe, facts: Facts) -> Iterator[Candidate]:
    """The next larger and the next smaller micro-batch."""
    micro = _micro(recipe)
    share = recipe.batch.global_size // parts_of(recipe, 1)
    larger = [size for size in divisors(share) if size > micro]
    if (
        larger
        and recipe.determinism != "elastic"
        and _fits(recipe, larger[0], recipe.memory.activation_checkpointing, facts)
    ):
        predicted = 1.05 if facts.device != "cpu" else 1.01
        yield Candidate({"batch.micro_size": larger[0]}, predicted, "fewer, larger operations")
    smaller = _next_micro(recipe, micro - 1)
    if smaller is not None and facts.device == "cpu":
        held = micro * facts.saved_bytes_per_sample
        why = f"{held / 1e6:.0f} MB of activations are {'more than' if held > CACHE else 'about what'} the caches hold"
        yield Candidate({"batch.micro_size": smaller}, 1.03 if held > CACHE else 0.92, why)


def _recomputes(recipe: Recipe, facts: Facts) -> Iterator[Candidate]:
    gains = {"selective": {"none": 1.05}, "full": {"none": 1.33, "selective": 1.2}}
    for way, predicted in gains.get(recipe.memory.activation_checkpointing, {}).items():
        if way == "selective" and _splits_backward(recipe):
            continue
        if _fits(recipe, _micro(recipe), way, facts):
            yield Candidate({"memory.activation_checkpointing": way}, predicted, "activations fit into memory")


def _losses(recipe: Recipe, facts: Facts) -> Iterator[Candidate]:
    if facts.vocabulary is None or recipe.memory.chunked_loss is not False or ":" in recipe.task:
        return
    logits = 4.0 * _micro(recipe) * facts.sequence * facts.vocabulary
    if logits > 8 * CACHE:
        yield Candidate({"memory.chunked_loss": True}, 1.02, f"all logits at once are {logits / 1e6:.0f} MB")


def _threads(recipe: Recipe, facts: Facts) -> Iterator[Candidate]:
    workers, now = _workers(recipe), recipe.num_threads
    if facts.device != "cpu" or recipe.determinism == "elastic":
        return
    if facts.logical > facts.cores and now != facts.logical // workers:
        yield Candidate({"num_threads": facts.logical // workers}, 1.02, "hyperthreads may fill waiting times")
    if now == facts.cores // workers and now > 3:
        yield Candidate({"num_threads": now - 1}, 0.98, "leaves a core to the reader and the system")


def _matmul_seconds(recipe: Recipe, facts: Facts) -> float:
    """Of a step, at the measured rate; at most nine tenths of it."""
    rate = _rate(recipe.precision, facts)
    if not rate:
        return facts.step_seconds / 2
    samples = recipe.batch.global_size / (_workers(recipe) if facts.device != "cpu" else 1)
    return min(0.9 * facts.step_seconds, facts.flops_per_sample * samples / (rate * 1e12))


def _rate(precision: str, facts: Facts) -> float:
    """TFLOP/s of matmuls: as measured, or else what data sheets give beside bf16; 0 when nothing is known."""
    besides = {"fp16": 1.0, "fp8": 2.0, "tf32": 0.5}
    return facts.tflops.get(precision) or besides.get(precision, 0.0) * facts.tflops.get("bf16", 0.0)


def _fits(recipe: Recipe, micro: int, way: str, facts: Facts) -> bool:
    """Whether training state and activations take at most what `choose_memory` lets them have of a worker's memory."""
    peak = facts.peaks.get(way, facts.saved_bytes_per_sample)
    if peak is None:  # so it cannot be computed
        return False
    share = facts.memory_bytes // (_workers(recipe) if facts.device == "cpu" else 1)
    held = activation_bytes(recipe, int(peak), micro, _workers(recipe))
    most, least = PART[sizes_for(facts.device)]
    return state_bytes(recipe, facts.parameters, facts.frozen, facts.device) + held <= share * most // least


def _next_micro(recipe: Recipe, most: int) -> int | None:
    """The largest micro-batch up to `most` that divides every worker's share, also of the worlds that `elastic`
    promises to allow."""
    batch = recipe.batch.global_size
    return max((size for size in divisors(batch // shared_among(recipe, 1)) if size <= most), default=None)


def _micro(recipe: Recipe) -> int:
    assert isinstance(recipe.batch.micro_size, int)
    return recipe.batch.micro_size


def _workers(recipe: Recipe) -> int:
    return recipe.parallelism.world if isinstance(recipe.parallelism, Parallelism) else 1


def _ratios(rounds: Sequence[Round]) -> list[float]:
    return [statistics.median(old) / statistics.median(new) for old, new in rounds]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key} {size}" for key, size in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)
