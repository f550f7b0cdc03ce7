"""What could make a recipe faster on a machine: candidates with the gain to expect, and what a measurement says of one.

Pure: numbers in, candidates and verdicts out; `phalanx.app.tune` measures between. No candidate changes the mathematics
(global batch, learning rate, data, model), and precision only where that is allowed. Predictions are rules of thumb and
decide nothing but the order of trials, and which are not worth one.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.autoconfig.choices import num_data_parallel_groups, required_divisor
from phalanx.autoconfig.memory_choice import USABLE_MEMORY_FRACTION, activation_bytes, state_bytes
from phalanx.formatting import format_bytes, format_plural
from phalanx.recipe import ResolvedRecipe
from phalanx.recipe.devices import size_table_of
from phalanx.recipe.work_division import list_divisors

MIN_SPEEDUP = 1.02
"""A gain below that is not worth another recipe: repeated runs of the same one differ by as much."""
MIN_PREDICTED_SPEEDUP = 0.9
"""What is predicted to be slower than that is not tried: rules of thumb are not wrong by more."""
GLOO_BYTES_PER_S = 4e9
"""Bytes a second that processes of one machine exchange over gloo: an order of magnitude."""
CPU_CACHE_BYTES = 32e6
"""Bytes that a processor's caches hold: an order of magnitude."""
TUNABLE_KEYS = (
    "batch.micro_size",
    "compile",
    "parallelism",
    "memory.chunked_loss",
    "memory.activation_checkpointing",
    "precision",
    "num_threads",
)
"""Keys that tuning may change: they change speed, memory and rounding."""

PairedStepTimes = tuple[Sequence[float], Sequence[float]]
"""Seconds of steps of the best so far and of a candidate, taken one right after the other."""


@dataclass(frozen=True)
class TuningFacts:
    """What predictions rest on. `memory_bytes` is a device's (of a CPU: all of it); `step_s` is a step of the best so
    far; `vocab_size` is None where there is none."""

    device: str
    physical_cores: int
    memory_bytes: int
    tflops: Mapping[str, float]
    trainable_parameters: int
    flops_per_sample: float
    activation_bytes_per_sample: float
    step_s: float
    allowed_precisions: tuple[str, ...] = ()
    """Precisions that may be tried."""
    may_change_processes: bool = True
    """Whether the number of processes may change."""
    vocab_size: int | None = None
    seq_len: int = 1
    frozen_parameters: int = 0
    """Parameters that are not trained, besides `trainable_parameters`."""
    peak_bytes_per_sample: Mapping[str, float | None] = field(default_factory=dict)
    """Bytes that a sample takes at the peak of a step, by way of recomputing."""


@dataclass(frozen=True)
class TuningCandidate:
    """One change to try: dotted keys and their values, the gain to expect (old time over new) and why."""

    changes: Mapping[str, Any]
    predicted_speedup: float
    reason: str

    @property
    def label(self) -> str:
        """`compile=true`, or `2 processes x 1 thread`."""
        parallelism = self.changes.get("parallelism")
        if parallelism is not None and "num_threads" in self.changes:
            world, threads = math.prod(parallelism.values()), self.changes["num_threads"]
            return f"{world} processes x {format_plural(threads, 'thread')}"
        return " ".join(f"{key}={_format_value(value)}" for key, value in self.changes.items())


@dataclass(frozen=True)
class MeasuredSpeedup:
    """A candidate against the best so far: medians in seconds, their ratio, and the quartiles of the rounds' ratios."""

    baseline_s: float
    candidate_s: float
    speedup: float
    speedup_q1: float
    speedup_q3: float

    @property
    def is_faster(self) -> bool:
        """Whether it is faster by more than noise."""
        return self.speedup >= MIN_SPEEDUP and self.speedup_q1 > 1.0


def summarize_rounds(pairs: Sequence[PairedStepTimes]) -> MeasuredSpeedup:
    """What the rounds say together."""
    before = statistics.median(itertools.chain.from_iterable(old for old, _ in pairs))
    after = statistics.median(itertools.chain.from_iterable(new for _, new in pairs))
    ratios = _speedups(pairs)
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return MeasuredSpeedup(before, after, before / after, low, high)


def is_hopeless(pairs: Sequence[PairedStepTimes]) -> bool:
    """Whether more rounds would be wasted: every one so far, two at least, was slower by a tenth."""
    return len(pairs) >= 2 and max(_speedups(pairs)) < MIN_PREDICTED_SPEEDUP


def break_even_steps(speedup: MeasuredSpeedup, extra_seconds: float) -> int:
    """After how many steps a longer start (compilation) is paid back."""
    return math.ceil(max(0.0, extra_seconds) / (speedup.baseline_s - speedup.candidate_s))


def apply_changes(recipe: ResolvedRecipe, overrides: Mapping[str, Any]) -> ResolvedRecipe:
    """The recipe with dotted keys set. ValueError for a key that tuning must leave alone."""
    values = recipe.model_dump()
    for key, value in overrides.items():
        if key not in TUNABLE_KEYS:
            raise ValueError(f"tuning must not change {key}")
        *above, last = key.split(".")
        parent = values
        for part in above:
            parent = parent[part]
        parent[last] = value
    return ResolvedRecipe.model_validate(values)


def propose_candidates(recipe: ResolvedRecipe, facts: TuningFacts) -> list[TuningCandidate]:
    """What could be faster than `recipe` (resolved), the largest predicted gain first."""
    proposals = itertools.chain(
        _propose_precisions(recipe, facts),
        _propose_compile(recipe, facts),
        _propose_processes(recipe, facts),
        _propose_micro_sizes(recipe, facts),
        _propose_checkpointing(recipe, facts),
        _propose_chunked_loss(recipe, facts),
    )
    return sorted(
        (candidate for candidate in proposals if candidate.predicted_speedup >= MIN_PREDICTED_SPEEDUP),
        key=lambda candidate: -candidate.predicted_speedup,
    )


def _propose_precisions(recipe: ResolvedRecipe, facts: TuningFacts) -> Iterator[TuningCandidate]:
    current_rate = _matmul_tflops(recipe.precision, facts)
    for name in facts.allowed_precisions:
        rate = _matmul_tflops(name, facts)
        if name == recipe.precision or not rate or not current_rate:
            continue
        matmul = _matmul_seconds_per_step(recipe, facts)
        predicted = facts.step_s / (facts.step_s - matmul + matmul * current_rate / rate)
        reason = f"its matmuls are about {rate / current_rate:.2f} x as fast here"
        yield TuningCandidate({"precision": name}, predicted, reason)


def _propose_compile(recipe: ResolvedRecipe, facts: TuningFacts) -> Iterator[TuningCandidate]:
    if not recipe.compile and not recipe.parallelism.splits_backward:
        non_matmul_share = 1 - _matmul_seconds_per_step(recipe, facts) / facts.step_s
        reason = f"{non_matmul_share:.0%} of a step is not matmul, of which fusing saves about half"
        yield TuningCandidate({"compile": True}, 1 / (1 - non_matmul_share / 2), reason)
    elif recipe.compile is True and facts.device != "cpu":
        yield TuningCandidate({"compile": "cuda-graphs"}, 1.05, "a graph starts all kernels of a block at once")


def _propose_processes(recipe: ResolvedRecipe, facts: TuningFacts) -> Iterator[TuningCandidate]:
    """More processes with fewer threads each, on a CPU."""
    parallelism = recipe.parallelism
    if facts.device != "cpu" or not facts.may_change_processes or parallelism.world > 1:
        return
    global_batch = recipe.batch.global_size
    for world_size in list_divisors(facts.physical_cores)[1:]:
        micro_size = _largest_micro_size(recipe, global_batch // world_size) if global_batch % world_size == 0 else None
        replicas = apply_changes(recipe, {"parallelism": {"replicate": world_size}})
        mode = recipe.memory.activation_checkpointing
        if micro_size is None or not _fits_in_memory(replicas, micro_size, mode, facts):
            continue
        grad_sync_s = 2 * (world_size - 1) / world_size * 4 * facts.trainable_parameters / GLOO_BYTES_PER_S
        changes: dict[str, Any] = {"parallelism": {"replicate": world_size}, "batch.micro_size": micro_size}
        if recipe.determinism != "elastic":  # there threads are part of what must not change with the workers
            changes["num_threads"] = facts.physical_cores // world_size
        predicted = facts.step_s / (0.95 * facts.step_s + grad_sync_s)
        reason = "threads wait for each other in every operation, processes once a step"
        yield TuningCandidate(changes, predicted, reason)


def _propose_micro_sizes(recipe: ResolvedRecipe, facts: TuningFacts) -> Iterator[TuningCandidate]:
    """The next larger and the next smaller micro-batch."""
    micro_size = recipe.batch.micro_size
    samples_per_group = recipe.batch.global_size // num_data_parallel_groups(recipe, 1)
    larger = [size for size in list_divisors(samples_per_group) if size > micro_size]
    mode = recipe.memory.activation_checkpointing
    if larger and recipe.determinism != "elastic" and _fits_in_memory(recipe, larger[0], mode, facts):
        predicted = 1.05 if facts.device != "cpu" else 1.01
        yield TuningCandidate({"batch.micro_size": larger[0]}, predicted, "fewer, larger operations")
    smaller = _largest_micro_size(recipe, micro_size - 1)
    if smaller is not None and facts.device == "cpu":
        micro_batch_bytes = micro_size * facts.activation_bytes_per_sample
        compared, predicted = ("more than", 1.03) if micro_batch_bytes > CPU_CACHE_BYTES else ("about what", 0.92)
        reason = f"{format_bytes(micro_batch_bytes)} of activations are {compared} the caches hold"
        yield TuningCandidate({"batch.micro_size": smaller}, predicted, reason)


def _propose_checkpointing(recipe: ResolvedRecipe, facts: TuningFacts) -> Iterator[TuningCandidate]:
    gains = {"selective": {"none": 1.05}, "full": {"none": 1.33, "selective": 1.2}}
    for mode, predicted in gains.get(recipe.memory.activation_checkpointing, {}).items():
        if mode == "selective" and recipe.parallelism.splits_backward:
            continue
        if _fits_in_memory(recipe, recipe.batch.micro_size, mode, facts):
            yield TuningCandidate({"memory.activation_checkpointing": mode}, predicted, "activations fit into memory")


def _propose_chunked_loss(recipe: ResolvedRecipe, facts: TuningFacts) -> Iterator[TuningCandidate]:
    if facts.vocab_size is None or recipe.memory.chunked_loss is not False or ":" in recipe.task_kind:
        return
    logits = 4.0 * recipe.batch.micro_size * facts.seq_len * facts.vocab_size
    if logits > 8 * CPU_CACHE_BYTES:
        yield TuningCandidate({"memory.chunked_loss": True}, 1.02, f"all logits at once are {format_bytes(logits)}")


def _matmul_seconds_per_step(recipe: ResolvedRecipe, facts: TuningFacts) -> float:
    """Seconds of matmuls in a step, at the measured rate; at most nine tenths of the step."""
    rate = _matmul_tflops(recipe.precision, facts)
    if not rate:
        return facts.step_s / 2
    samples = recipe.batch.global_size / (recipe.parallelism.world if facts.device != "cpu" else 1)
    return min(0.9 * facts.step_s, facts.flops_per_sample * samples / (rate * 1e12))


def _matmul_tflops(precision: str, facts: TuningFacts) -> float:
    """TFLOP/s of matmuls: as measured, or else bf16's with the data sheet's ratio to bf16; 0 when neither is known."""
    relative_to_bf16 = {"fp16": 1.0, "fp8": 2.0, "tf32": 0.5}
    return facts.tflops.get(precision) or relative_to_bf16.get(precision, 0.0) * facts.tflops.get("bf16", 0.0)


def _fits_in_memory(recipe: ResolvedRecipe, micro_size: int, mode: str, facts: TuningFacts) -> bool:
    """Whether training state and activations take at most what `choose_memory` lets them have of a worker's memory."""
    sample_bytes = facts.peak_bytes_per_sample.get(mode, facts.activation_bytes_per_sample)
    if sample_bytes is None:  # so it cannot be computed
        return False
    worker_bytes = facts.memory_bytes // (recipe.parallelism.world if facts.device == "cpu" else 1)
    activations = activation_bytes(recipe, int(sample_bytes), micro_size, recipe.parallelism.world)
    state = state_bytes(recipe, facts.trainable_parameters, facts.frozen_parameters, facts.device)
    numerator, denominator = USABLE_MEMORY_FRACTION[size_table_of(facts.device)]
    return state + activations <= worker_bytes * numerator // denominator


def _largest_micro_size(recipe: ResolvedRecipe, limit: int) -> int | None:
    """The largest micro-batch up to `most` that divides every worker's share, also of the worlds that `elastic`
    promises to allow."""
    batch = recipe.batch.global_size
    return max((size for size in list_divisors(batch // required_divisor(recipe, 1)) if size <= limit), default=None)


def _speedups(rounds: Sequence[PairedStepTimes]) -> list[float]:
    return [statistics.median(old) / statistics.median(new) for old, new in rounds]


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key} {size}" for key, size in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)
