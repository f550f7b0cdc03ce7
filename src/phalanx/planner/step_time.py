"""How long a step takes: every stage's computing and communicating, what hides behind what, and the schedule that joins
them. Two streams a rank, one that computes and one that communicates, simulated segment by segment; then the pipeline.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from phalanx.planner.device_costs import DeviceCosts
from phalanx.planner.measured_costs import MeasuredCosts
from phalanx.planner.model_profile import PASS_DIRECTIONS, ModelSegment, PassDirection
from phalanx.planner.pipeline import StageSegments, StageTime, pipeline_seconds, split_into_stages, split_profile
from phalanx.planner.scenario import CHECKPOINTING_MODES, PIPELINE_SCHEDULES, Layouts, Scenario, layout_of
from phalanx.planner.segment_costs import (
    ArrayLike,
    CollectiveKind,
    GroupCollectives,
    OpCost,
    PassBreakdown,
    ShardSpec,
    op_cost_from,
    segment_pass_time,
    segment_work,
)
from phalanx.planner.state_memory import shard_elements
from phalanx.text_table import Column, format_table

OVERLAP_SLOWDOWN = 0.15
"""Slowdown of compute during communication: 19 % on average on A100, H100, MI250 and MI210 (arXiv 2507.03114), 13 % in
Galvatron's measurements."""
UPDATE_BYTES_PER_PARAMETER = {"adamw": 30.0, "lamb": 34.0, "sgd": 20.0, "lars": 24.0, "muon": 20.0}
"""Bytes that an update moves for each parameter: AdamW reads gradient, master weight and two moments, writes three of
them and the weight in 16 bits; lamb and lars read weights and updates once more for their norms. Muon's products are
not in it."""
BREAKDOWN_LABELS = {
    "gemm": "matrix products",
    "attention": "attention",
    "memory_bound": "memory-bound operations",
    "recomputation": "recomputation",
    "tp_all_reduce": "all-reduce over tensor ranks",
    "cp_all_gather_kv": "all-gather of keys and values",
    "ep_all_to_all": "all-to-all of tokens to experts",
    "fsdp_exposed": "exposed FSDP communication",
    "kernel_launch": "kernel launch",
    "pipeline_bubble": "pipeline bubble",
    "grad_sync": "gradient synchronization",
    "optimizer": "optimizer",
    "data_wait": "waiting for data",
    "checkpoint_stall": "checkpoints, divided over the steps",
    "other": "other, once a step",
}
"""Labels of the parts of a step, in the order in which they are printed."""


@dataclass(frozen=True)
class StepBreakdown:
    """Seconds of a step by cause; they sum to the step."""

    gemm: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    recomputation: float = 0.0
    tp_all_reduce: float = 0.0
    cp_all_gather_kv: float = 0.0
    ep_all_to_all: float = 0.0
    fsdp_exposed: float = 0.0
    kernel_launch: float = 0.0
    grad_sync: float = 0.0
    pipeline_bubble: float = 0.0
    optimizer: float = 0.0
    data_wait: float = 0.0
    checkpoint_stall: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """The step."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class LayoutStepTimes:
    """Seconds of a step by cause, for many layouts: an array for each field of `StepBreakdown`."""

    parts: dict[str, np.ndarray]

    @property
    def total(self) -> np.ndarray:
        """Seconds of a step of each layout."""
        return np.asarray(sum(self.parts.values()))

    def breakdown(self, row: int) -> StepBreakdown:
        """Return the parts of one layout's step."""
        return StepBreakdown(**{name: float(seconds[row]) for name, seconds in self.parts.items()})


class LayoutCosts:
    """The costs of a model's segments under each layout, computed once. Everything else is that of `scenario`."""

    def __init__(self, scenario: Scenario, layouts: Layouts, device: DeviceCosts, cost_of: OpCost) -> None:
        self.scenario, self.layouts, self.device, self._cost_of = scenario, layouts, device, cost_of
        data_parallel = layouts.replicate * layouts.shard
        self.num_micro_batches = np.maximum(1, scenario.global_batch // (data_parallel * layouts.micro_size))
        self.samples = layouts.micro_size / layouts.context
        self.shard_ranks = np.where(layouts.zero_level == 3, layouts.shard * layouts.context, 1)
        """Ranks that divide the weights."""
        self.replica_ranks = data_parallel * layouts.context // self.shard_ranks
        self.divides_state = np.isin(layouts.zero_level, (1, 2))
        """Whether replicas divide the optimizer state."""
        stack = scenario.stack
        self.collectives = GroupCollectives(scenario.cluster, stack.comm_factor, stack.latency_factor)
        unique_rows, self._inverse = layouts.unique_rows("micro_size", "context", "tensor", "expert")
        self._unique = layouts.take(unique_rows)
        self._shard = ShardSpec(
            samples=self.samples[unique_rows],
            tensor=self._unique.tensor,
            context=self._unique.context,
            expert=self._unique.expert,
            fuses_memory_ops=stack.fuses_memory_ops,
            sequence_parallel=stack.sequence_parallel,
        )
        self._passes: dict[tuple[int, str], PassBreakdown] = {}
        self._has_experts = any(segment.num_experts for segment in scenario.profile.segments)

    def pass_of(self, segment: ModelSegment, direction: PassDirection) -> PassBreakdown:
        """A segment's forward, or its backward with what is computed again for it; without sharding."""
        key = (id(segment), direction)
        if key not in self._passes:
            self._passes[key] = self._compute_pass(segment, direction)
        return self._passes[key]

    def _compute_pass(self, segment: ModelSegment, direction: PassDirection) -> PassBreakdown:
        modes = self.layouts.checkpointing * int(direction == "backward" and segment.is_block)
        work = segment_work(segment, direction, self._shard, self._cost_of)
        recomputed = segment_work(segment, "forward", self._shard, self._cost_of) if modes.any() else None
        parts = {name: np.zeros(len(self.layouts)) for name in PassBreakdown.__dataclass_fields__}
        for mode in set(modes.tolist()):
            pass_time = segment_pass_time(
                self.scenario.stack,
                work,
                recomputed if mode else None,
                CHECKPOINTING_MODES[mode],
                self._has_experts,
                self.device.quantized,
                self._collective_seconds,
            )
            selected = modes == mode
            rows = self._inverse[selected]
            for name, seconds in vars(pass_time).items():
                parts[name][selected] = np.broadcast_to(seconds, len(self._unique))[rows]
        return PassBreakdown(**parts)

    def _collective_seconds(self, kind: CollectiveKind, group: str, num_bytes: ArrayLike, copies: float) -> np.ndarray:
        ranks, stride = getattr(self._unique, group), self._unique.tensor
        return self.collectives.seconds(
            kind, ranks, np.ones_like(stride) if group == "tensor" else stride, num_bytes, copies
        )

    def gather_seconds(self, segment: ModelSegment) -> np.ndarray:
        """Seconds to gather the weights of a segment among the ranks that divide them; 0 where none do."""
        in_fp32 = not segment.is_block and self.scenario.stack.name == "phalanx"  # what embeddings and norms read
        size = self.num_elements(segment) * (4.0 if in_fp32 else 2.0)
        return self.collectives.seconds("all_gather", self.shard_ranks, self.layouts.tensor, size)

    def reduce_scatter_seconds(self, segment: ModelSegment) -> np.ndarray:
        """Seconds to add the gradients of a segment and leave each rank its part; 0 where weights are not divided."""
        size = self.num_trained(segment) * self.scenario.stack.gradient_bytes
        return self.collectives.seconds("reduce_scatter", self.shard_ranks, self.layouts.tensor, size)

    def num_elements(self, segment: ModelSegment) -> np.ndarray:
        """Parameters of a segment on one rank, before data-parallel ranks divide them."""
        dense, expert = self._dense_and_expert_elements(segment)
        return np.asarray(dense + expert)

    def num_trained(self, segment: ModelSegment) -> np.ndarray:
        """Those of them that are trained, which alone have gradients and an update."""
        return np.asarray(self.num_elements(segment) * segment.weights.trained_share)

    def num_updated(self, segment: ModelSegment) -> np.ndarray:
        """Those of them that one rank updates."""
        ranks = np.where(self.divides_state, self.replica_ranks, self.shard_ranks)
        elements = shard_elements(*self._dense_and_expert_elements(segment), ranks, self.layouts.expert)
        return np.asarray(elements * segment.weights.trained_share)

    def _dense_and_expert_elements(self, segment: ModelSegment) -> tuple[np.ndarray, np.ndarray]:
        weights, layouts = segment.weights, self.layouts
        return weights.tp_sharded / layouts.tensor + weights.replicated, weights.expert / layouts.expert


def stage_pass_time(costs: LayoutCosts, stage: StageSegments, direction: PassDirection) -> PassBreakdown:
    """A micro-batch through a chunk, one way, with the weights gathered ahead of use where they are divided: the next
    segment's while this one is computed."""
    passes = [(costs.pass_of(segment, direction), segment, count) for segment, count in stage.segments]
    if direction == "backward":
        passes.reverse()
    totals = {
        name: sum(count * getattr(pass_time, name) for pass_time, _, count in passes)
        for name in PassBreakdown.__dataclass_fields__
    }
    if (costs.shard_ranks > 1).any():
        units: list[FsdpUnit] = []
        for pass_time, segment, count in passes:
            gather_s = costs.gather_seconds(segment)
            scatter_s = costs.reduce_scatter_seconds(segment) if direction == "backward" else np.zeros_like(gather_s)
            units += [FsdpUnit(pass_time.total - pass_time.kernel_launch, gather_s, scatter_s)] * count
        totals["fsdp_exposed"] = _exposed_fsdp_seconds(units)
    # The host runs ahead of the device, so only what a whole pass takes counts; where both are about as busy each waits
    # for the other now and then.
    launch_s, device_s = totals.pop("kernel_launch"), sum(totals.values())
    return PassBreakdown(**totals, kernel_launch=np.hypot(launch_s, device_s) - device_s)


class FsdpUnit(NamedTuple):
    """A segment with sharded weights: seconds of its compute, of the all-gather before, of the reduce-scatter after."""

    compute_s: np.ndarray
    gather_s: np.ndarray
    scatter_s: np.ndarray


def _exposed_fsdp_seconds(units: Sequence[FsdpUnit]) -> np.ndarray:
    """Seconds by which gathering weights and scattering gradients lengthens a pass: two streams, weights gathered one
    segment ahead, computing slowed down while something travels. 0 where nothing is gathered."""
    comm_end = weights_ready = units[0].gather_s
    compute_end = np.zeros_like(comm_end)
    for index, unit in enumerate(units):
        unit_ready = weights_ready
        if index + 1 < len(units):
            comm_end = weights_ready = np.maximum(comm_end, compute_end) + units[index + 1].gather_s
        start = np.maximum(compute_end, unit_ready)
        overlap_s = np.maximum(0.0, np.minimum(comm_end - start, unit.compute_s))
        compute_end = start + unit.compute_s + OVERLAP_SLOWDOWN * overlap_s
        scatter_end = np.maximum(comm_end, compute_end) + unit.scatter_s
        comm_end = np.where(unit.scatter_s > 0, scatter_end, comm_end)
    # weights that are still being gathered are another pass's
    last_end = np.where(units[-1].scatter_s > 0, comm_end, compute_end)
    return np.asarray(np.maximum(compute_end, last_end) - sum(unit.compute_s for unit in units))


def stage_send_seconds(costs: LayoutCosts) -> np.ndarray:
    """Seconds that the activations of a micro-batch travel from a stage to the next."""
    layouts = costs.layouts
    block = next((each for each in costs.scenario.profile.segments if each.is_block), None)
    num_bytes = 0.0 if block is None else block.input_bytes.evaluate(costs.samples) / layouts.tensor
    stride = layouts.tensor * layouts.context * layouts.replicate * layouts.shard
    return costs.collectives.seconds("send", layouts.pipeline, stride, num_bytes)


def measured_step_time(scenario: Scenario, device: DeviceCosts, measured_costs: MeasuredCosts) -> StepBreakdown:
    """Seconds of a step by cause on a machine that was measured, one process after the other's operations: whole
    replicas only. NotMeasured: something that it needs was not."""
    costs = LayoutCosts(scenario, layout_of(scenario), device, measured_costs.cost_of)
    stage = split_into_stages(scenario)[0]
    passes = [stage_pass_time(costs, stage, direction) for direction in PASS_DIRECTIONS]
    num_trained = sum(costs.num_trained(segment).item() * count for segment, count in stage.segments)
    ranks = scenario.parallelism.replicate
    totals = {
        name: scenario.num_micro_batches * sum(getattr(each, name).item() for each in passes)
        for name in PassBreakdown.__dataclass_fields__
    }
    totals["memory_bound"] += (scenario.num_micro_batches - 1) * measured_costs.accumulate_seconds(num_trained)
    return StepBreakdown(
        **totals,
        grad_sync=measured_costs.all_reduce_seconds(
            num_trained * scenario.stack.gradient_bytes * scenario.transport.wire_ratio, ranks
        )
        if ranks > 1
        else 0.0,
        optimizer=measured_costs.optimizer_seconds(num_trained),
        other=scenario.stack.step_overhead_s,
    )


def predict_step_time(scenario: Scenario, device: DeviceCosts) -> StepBreakdown:
    """Seconds of a step by cause, from the point of view of the busiest pipeline rank."""
    return predict_step_times(scenario, layout_of(scenario), device, simulate_pipeline=True).breakdown(0)


def predict_step_times(
    scenario: Scenario, layouts: Layouts, device: DeviceCosts, simulate_pipeline: bool = False
) -> LayoutStepTimes:
    """Seconds of a step by cause under each layout, from the point of view of the busiest pipeline rank. `scenario`
    gives all that is not in `layouts`. Without `simulate_pipeline` a pipeline takes (micro-batches + (stages - 1) /
    virtual stages) x its slowest rank (Narayanan et al. 2021, section 2.2), a third of that bubble with zero bubble,
    and no time for messages; all else is the same."""
    parts = {name: np.zeros(len(layouts)) for name in StepBreakdown.__dataclass_fields__}
    group_rows, group_of = layouts.unique_rows("pipeline", "virtual_stages")
    for group in range(len(group_rows)):
        rows = np.flatnonzero(group_of == group)
        costs = LayoutCosts(scenario, layouts.take(rows), device, op_cost_from(device))
        for name, seconds in _predict_equal_stages(costs, simulate_pipeline).items():
            parts[name][rows] = seconds
    return LayoutStepTimes(parts)


def _predict_equal_stages(costs: LayoutCosts, simulate_pipeline: bool) -> dict[str, np.ndarray]:
    """Predict layouts that divide the model into the same stages."""
    scenario, layouts = costs.scenario, costs.layouts
    pipeline, virtual_stages = int(layouts.pipeline[0]), int(layouts.virtual_stages[0])
    stages = split_profile(scenario.profile, pipeline * virtual_stages, scenario.parallelism.layers_per_stage)
    times: dict[StageSegments, StagePasses] = {}
    for stage in stages:
        if stage not in times:
            times[stage] = StagePasses(*(stage_pass_time(costs, stage, direction) for direction in PASS_DIRECTIONS))
    # Most ranks of a pipeline have the same segments: each kind counts once, in the order of its first rank.
    ranks = list(dict.fromkeys(tuple(stages[rank::pipeline]) for rank in range(pipeline)))
    forward_s, backward_s = (
        np.array([sum(getattr(times[stage], direction).total for stage in rank) for rank in ranks])
        for direction in PASS_DIRECTIONS
    )
    rank_s = forward_s + backward_s
    busiest = np.argmax(rank_s, axis=0)
    parts = {}
    for name in PassBreakdown.__dataclass_fields__:
        of_ranks = [
            sum(getattr(getattr(times[stage], direction), name) for direction in PASS_DIRECTIONS for stage in rank)
            for rank in ranks
        ]
        parts[name] = costs.num_micro_batches * np.array(of_ranks)[busiest, np.arange(len(layouts))]
    if pipeline > 1:
        pipeline_s = (
            _simulate_pipelines(costs, [times[stage] for stage in stages])
            if simulate_pipeline
            else _pipeline_closed_form_seconds(costs, rank_s.max(axis=0))
        )
        parts["pipeline_bubble"] = pipeline_s - sum(parts.values())
    num_updated = _count_on_fullest_rank(costs.num_updated, ranks)
    num_gradients = np.where(layouts.zero_level == 3, num_updated, _count_on_fullest_rank(costs.num_trained, ranks))
    parts["grad_sync"] = _exposed_grad_sync_seconds(costs, num_gradients, forward_s.max(axis=0), backward_s.max(axis=0))
    update_bytes = num_updated * UPDATE_BYTES_PER_PARAMETER[scenario.optimizer]
    parts["optimizer"] = np.asarray(update_bytes / (costs.device.bandwidth * 0.8))
    parts["other"] = np.full(len(layouts), scenario.stack.step_overhead_s)
    return parts


class StagePasses(NamedTuple):
    """One micro-batch through a stage, both ways."""

    forward: PassBreakdown
    backward: PassBreakdown


def _count_on_fullest_rank(
    count_of: Callable[[ModelSegment], np.ndarray], ranks: Sequence[Sequence[StageSegments]]
) -> np.ndarray:
    """Elements of the pipeline rank that has most, by `count_of` each segment."""
    counts = [sum(count_of(segment) * count for stage in rank for segment, count in stage.segments) for rank in ranks]
    return np.asarray(np.array(counts).max(axis=0))


def _simulate_pipelines(costs: LayoutCosts, stages: Sequence[StagePasses]) -> np.ndarray:
    """Seconds of each layout's forwards and backwards, event by event."""
    layouts = costs.layouts
    totals = [(each.forward.total, each.backward.total) for each in stages]
    send_s = stage_send_seconds(costs)
    return np.array(
        [
            pipeline_seconds(
                "interleaved" if layouts.virtual_stages[row] > 1 else PIPELINE_SCHEDULES[layouts.schedule[row]],
                [StageTime(float(forward[row]), float(backward[row])) for forward, backward in totals],
                int(layouts.pipeline[row]),
                int(costs.num_micro_batches[row]),
                float(send_s[row]),
            )
            for row in range(len(layouts))
        ]
    )


def _pipeline_closed_form_seconds(costs: LayoutCosts, slowest_rank_s: np.ndarray) -> np.ndarray:
    layouts = costs.layouts
    bubble_share = np.where(layouts.schedule == PIPELINE_SCHEDULES.index("zero-bubble"), 1 / 3, 1.0)
    bubble_stages = bubble_share * (layouts.pipeline - 1) / layouts.virtual_stages
    return np.asarray((costs.num_micro_batches + bubble_stages) * slowest_rank_s)


def _exposed_grad_sync_seconds(
    costs: LayoutCosts, num_weights: np.ndarray, first_forward_s: np.ndarray, last_backward_s: np.ndarray
) -> np.ndarray:
    """Exposed seconds of the all-reduce of `num_weights` gradients over replicas, overlapped with the last
    `last_backward_s` of backward, and, where replicas divide the optimizer state, of the all-gather of the new weights,
    overlapped with the first `first_forward_s` of forward."""
    stack, transport = costs.scenario.stack, costs.scenario.transport
    divides_state, stride = costs.divides_state, costs.layouts.tensor * costs.shard_ranks
    dividing_ranks = np.where(divides_state, costs.replica_ranks, 1)
    adding_ranks = np.where(divides_state, 1, costs.replica_ranks)
    seconds, gradient_bytes = costs.collectives.seconds, num_weights * stack.gradient_bytes
    reduce_s = seconds("reduce_scatter", dividing_ranks, stride, gradient_bytes) + seconds(
        "all_reduce", adding_ranks, stride, gradient_bytes * transport.wire_ratio
    )
    gather_s = seconds("all_gather", dividing_ranks, stride, num_weights * 2.0)
    max_overlap = stack.max_overlap if transport.overlaps_backward else 0.0
    return np.asarray(
        exposed_seconds(reduce_s, last_backward_s, max_overlap)
        + exposed_seconds(gather_s, first_forward_s, stack.max_overlap)
    )


def exposed_seconds(comm_s: ArrayLike, compute_s: ArrayLike, max_overlap: float) -> ArrayLike:
    """What does not hide, and by how much it slows down what it hides behind. Numbers or arrays."""
    hidden_s = np.minimum(comm_s * max_overlap, compute_s)
    return comm_s - hidden_s + OVERLAP_SLOWDOWN * hidden_s


def format_breakdown(step_breakdown: StepBreakdown, width: int = 40) -> str:
    """The parts of a step as bars; they sum to the step."""
    rows = []
    for name, words in BREAKDOWN_LABELS.items():
        seconds = getattr(step_breakdown, name)
        share = seconds / step_breakdown.total
        if share > 0.0005:
            rows.append((words, format_seconds(seconds), f"{share:.1%}", "#" * round(width * share)))
    rows.append(("a step", format_seconds(step_breakdown.total), "100.0%", ""))
    columns = [Column(min_width=42), Column(is_number=True), Column(is_number=True), Column()]
    return "\n".join(format_table(columns, rows, indent=2))


def format_seconds(seconds: float) -> str:
    """Seconds with as many digits as a forecast deserves."""
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.3f} s"
