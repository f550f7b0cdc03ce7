"""Choose a layout: all that are valid for a model, a number of devices and a batch, estimated at once in NumPy, the
best of them simulated.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.planner.device_costs import DeviceCosts
from phalanx.planner.memory import lower_bound_bytes
from phalanx.planner.model_profile import AttentionOp, ModelProfile
from phalanx.planner.scenario import (
    CHECKPOINTING_MODES,
    LAYOUT_FIELDS,
    PIPELINE_SCHEDULES,
    Layouts,
    Scenario,
    to_scenarios,
)
from phalanx.planner.state_memory import NO_OPTIMIZER_STATE, OptimizerState
from phalanx.planner.step_time import StepBreakdown, predict_step_times
from phalanx.recipe.schema import Parallelism
from phalanx.recipe.work_division import list_divisors

MAX_SIMULATED = 50
"""How many of the best estimates that fit are simulated."""
MAX_MEMORY_CHECKS = 600
"""How many of the best estimates are checked for memory exactly; more as long as none fits."""
ROUNDING_TOLERANCE = 1 + 1e-9
"""Bounds and what they bound are added up in another order."""
PRUNE_FACTOR = 1.25
"""An estimate so much above the least cannot win: 95% of estimates are within 3% of the simulated time."""
MAX_VIRTUAL_STAGES = 4
"""Stages of a rank that are tried at most."""


@dataclass(frozen=True)
class SearchSpace:
    """What may be chosen. A value that the recipe gives leaves no choice."""

    devices: int
    global_batch: int
    parallelism: Parallelism | None = None
    micro_size: int | None = None
    checkpointing_modes: tuple[str, ...] = CHECKPOINTING_MODES
    domain_size: int = 8
    """Devices that a fast network joins: tensor parallelism does not reach beyond."""
    replicas_only: bool = False
    """Whether the recipe's exactness asks for whole replicas."""
    has_sequences: bool = True
    """Whether samples are sequences, which tensor and context parallelism can cut."""


def enumerate_candidates(profile: ModelProfile, space: SearchSpace) -> Layouts:
    """All valid configurations."""
    attention_ops = [op for segment in profile.segments for op in segment.ops if isinstance(op, AttentionOp)]
    head_counts = [op.num_kv_heads for op in attention_ops] + [op.num_heads for op in attention_ops]
    num_experts = max((segment.num_experts for segment in profile.segments), default=0)
    rows: list[np.ndarray] = []
    for parallelism in _enumerate_parallelisms(profile, space, head_counts, num_experts):
        replicate, shard, _, pipeline, context, _ = parallelism
        zero_level = 3 if shard * context > 1 else 0
        samples_per_group = space.global_batch // (replicate * shard)
        micro_sizes = [space.micro_size] if space.micro_size is not None else list_divisors(samples_per_group)
        schedules = _enumerate_schedules(profile.num_blocks, pipeline, space)
        grid = [
            (*parallelism, micro_size, CHECKPOINTING_MODES.index(mode), schedule, virtual_stages, zero_level)
            for micro_size in micro_sizes
            if samples_per_group % micro_size == 0
            for schedule, virtual_stages in schedules
            if pipeline == 1
            or (
                samples_per_group // micro_size >= pipeline
                and (
                    virtual_stages == 1
                    or PIPELINE_SCHEDULES[schedule] != "interleaved"
                    or samples_per_group // micro_size % pipeline == 0  # whole groups of as many as there are ranks
                )
            )
            for mode in space.checkpointing_modes
            if not (mode == "selective" and pipeline > 1 and PIPELINE_SCHEDULES[schedule] == "zero-bubble")
        ]
        if grid:
            rows.append(np.array(grid, dtype=np.int64))
    table = np.concatenate(rows) if rows else np.zeros((0, len(LAYOUT_FIELDS)), dtype=np.int64)
    return Layouts(*table.T)


def _enumerate_parallelisms(
    profile: ModelProfile, space: SearchSpace, head_counts: Sequence[int], num_experts: int
) -> list[tuple[int, ...]]:
    """(replicate, shard, tensor, pipeline, context, expert) of all layouts that divide model and batch evenly."""
    if space.parallelism is not None:
        fixed = space.parallelism
        return [(fixed.replicate, fixed.shard, fixed.tensor, fixed.pipeline, fixed.context, fixed.expert)]
    if space.replicas_only or profile.must_be_whole:
        return [(space.devices, 1, 1, 1, 1, 1)] if space.global_batch % space.devices == 0 else []
    parallelisms: list[tuple[int, ...]] = []
    has_splittable_sequences = bool(head_counts) and space.has_sequences
    for tensor in list_divisors(space.devices):
        if tensor > 1 and (
            not has_splittable_sequences or tensor > space.domain_size or any(count % tensor for count in head_counts)
        ):
            continue
        for pipeline in list_divisors(space.devices // tensor):
            if pipeline > max(1, profile.num_blocks):
                continue
            for context in list_divisors(space.devices // tensor // pipeline):
                if context > 1 and (not has_splittable_sequences or profile.units_per_sample % (2 * context * tensor)):
                    continue
                data_parallel = space.devices // tensor // pipeline // context
                if space.global_batch % data_parallel:
                    continue
                for shard in list_divisors(data_parallel):
                    for expert in list_divisors(shard * context):
                        if expert == 1 or (num_experts and num_experts % expert == 0):
                            parallelisms.append((data_parallel // shard, shard, tensor, pipeline, context, expert))
    return parallelisms


def _enumerate_schedules(blocks: int, pipeline: int, space: SearchSpace) -> list[tuple[int, int]]:
    """Schedules by number, and stages of a rank."""
    if space.parallelism is not None:
        schedule = space.parallelism.pipeline_schedule
        num_stages = (
            len(space.parallelism.layers_per_stage)
            if space.parallelism.layers_per_stage
            else pipeline * (2 if schedule == "interleaved" else 1)
        )
        return [(PIPELINE_SCHEDULES.index(schedule), num_stages // pipeline)]
    if pipeline == 1:
        return [(PIPELINE_SCHEDULES.index("1f1b"), 1)]
    schedules = [(PIPELINE_SCHEDULES.index("1f1b"), 1), (PIPELINE_SCHEDULES.index("zero-bubble"), 1)]
    for virtual_stages in range(2, MAX_VIRTUAL_STAGES + 1):
        if blocks >= pipeline * virtual_stages:
            schedules.append((PIPELINE_SCHEDULES.index("interleaved"), virtual_stages))
    return schedules


@dataclass(frozen=True)
class StepEstimates:
    """For each configuration: seconds of a step, and a lower bound of the bytes on a device, without activations
    (`memory.lower_bound_bytes`)."""

    step_s: np.ndarray
    min_bytes: np.ndarray


def estimate_candidates(
    base_scenario: Scenario,
    device: DeviceCosts,
    layouts: Layouts,
    optimizer_state: OptimizerState = NO_OPTIMIZER_STATE,
) -> StepEstimates:
    """All configurations at once. `base_scenario` gives profile, cluster, batch, precision and stack; `optimizer_state`
    is what the optimizer keeps for each parameter."""
    unique_rows, inverse = layouts.unique_rows(
        "replicate", "shard", "tensor", "pipeline", "context", "expert", "virtual_stages"
    )
    min_bytes = np.array(
        [lower_bound_bytes(each, optimizer_state) for each in to_scenarios(base_scenario, layouts, list(unique_rows))]
    )[inverse]
    return StepEstimates(predict_step_times(base_scenario, layouts, device).total, min_bytes)


@dataclass(frozen=True)
class Candidate:
    """One configuration, simulated."""

    scenario: Scenario
    breakdown: StepBreakdown
    peak_bytes: float
    """Bytes on the fullest device."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.breakdown.total


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search: what fits, the fastest first; how many were valid, and of how many of them the training
    state fits; the least memory that any takes."""

    candidates: tuple[Candidate, ...]
    num_valid: int
    closest: Candidate | None
    """Where nothing fits: what comes closest."""


def search_parallelism(
    base_scenario: Scenario,
    device: DeviceCosts,
    space: SearchSpace,
    estimate_memory: Callable[[Scenario], float],
    memory_limit: float,
    optimizer_state: OptimizerState = NO_OPTIMIZER_STATE,
) -> SearchResult:
    """The fastest configurations that fit into `memory_limit` bytes of a device. `estimate_memory` is exact.
    `optimizer_state`, what the optimizer keeps for each parameter, spares asking it where the training state alone is
    too large."""
    layouts = enumerate_candidates(base_scenario.profile, space)
    num_valid = len(layouts)
    if not num_valid:
        return SearchResult((), 0, None)
    estimates = estimate_candidates(base_scenario, device, layouts, optimizer_state)
    fitting_rows = np.flatnonzero(estimates.min_bytes <= memory_limit * ROUNDING_TOLERANCE)
    order = fitting_rows[np.argsort(estimates.step_s[fitting_rows], kind="stable")]
    fitting: list[tuple[int, float]] = []
    for num_checked, row in enumerate(order.tolist()):
        if fitting and (
            len(fitting) >= MAX_SIMULATED
            or num_checked >= MAX_MEMORY_CHECKS
            or estimates.step_s[row] > PRUNE_FACTOR * estimates.step_s[fitting[0][0]]
        ):
            break
        (scenario,) = to_scenarios(base_scenario, layouts, [row])
        if (needed_bytes := estimate_memory(scenario)) <= memory_limit:
            fitting.append((row, needed_bytes))
    if not fitting:
        smallest = _find_smallest(base_scenario, layouts, estimates.min_bytes, estimate_memory)
        return SearchResult((), num_valid, *_simulate(base_scenario, layouts, device, [smallest]))
    candidates = _simulate(base_scenario, layouts, device, fitting)
    return SearchResult(tuple(sorted(candidates, key=_sort_key)), num_valid, None)


def _simulate(
    base_scenario: Scenario, layouts: Layouts, device: DeviceCosts, rows_and_bytes: Sequence[tuple[int, float]]
) -> list[Candidate]:
    """Simulate the layouts at these rows; the bytes that each needs are known."""
    rows = [row for row, _ in rows_and_bytes]
    times = predict_step_times(base_scenario, layouts.take(rows), device, simulate_pipeline=True)
    scenarios = to_scenarios(base_scenario, layouts, rows)
    return [
        Candidate(scenario, times.breakdown(index), needed_bytes)
        for index, (scenario, (_, needed_bytes)) in enumerate(zip(scenarios, rows_and_bytes, strict=True))
    ]


def _find_smallest(
    base_scenario: Scenario,
    layouts: Layouts,
    min_bytes: np.ndarray,
    estimate_memory: Callable[[Scenario], float],
) -> tuple[int, float]:
    """The row of what needs least memory, where each needs `min_bytes` at least, and its bytes."""
    smallest, least_bytes = -1, math.inf
    for row in np.argsort(min_bytes, kind="stable").tolist():
        if min_bytes[row] > least_bytes * ROUNDING_TOLERANCE:
            break
        (scenario,) = to_scenarios(base_scenario, layouts, [row])
        if (needed_bytes := estimate_memory(scenario)) < least_bytes:
            smallest, least_bytes = row, needed_bytes
    return smallest, least_bytes


def _sort_key(candidate: Candidate) -> tuple[float, int, bool, int, float]:
    """Faster comes first; what is as fast to half a percent, with the simpler layout,
    whole replicas and less recomputation."""
    parallelism = candidate.scenario.parallelism
    sizes = (parallelism.replicate, parallelism.shard, parallelism.tensor, parallelism.pipeline, parallelism.context)
    mode_index = CHECKPOINTING_MODES.index(candidate.scenario.checkpointing)
    return (
        round(math.log(candidate.step_s) / 0.005),
        sum(size > 1 for size in sizes),
        parallelism.shard > 1,
        mode_index,
        candidate.peak_bytes,
    )
