"""How long a step takes: every stage's computing and communicating, what hides behind what, and the schedule that joins
them. Two streams a rank, one that computes and one that communicates, simulated segment by segment; then the pipeline.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from phalanx.planner.collectives import CollectiveKind, collective_seconds, group_links
from phalanx.planner.device_costs import DeviceCosts
from phalanx.planner.measured_costs import MeasuredCosts
from phalanx.planner.model_profile import ModelSegment
from phalanx.planner.pipeline import PipelineSchedule, StageTime, pipeline_seconds
from phalanx.planner.scenario import Scenario, SoftwareStack
from phalanx.planner.segment_costs import ArrayLike, OpCost, SegmentWork, ShardSpec, op_cost_from, segment_work
from phalanx.planner.stages import StageSegments, split_into_stages
from phalanx.planner.state_memory import shard_elements

OVERLAP_SLOWDOWN = 0.15
"""Slowdown of compute during communication: 19 % on average on A100, H100, MI250 and MI210 (arXiv 2507.03114), 13 % in
Galvatron's measurements."""
UPDATE_BYTES_PER_PARAMETER = {"adamw": 30.0, "lamb": 34.0, "sgd": 20.0, "lars": 24.0, "muon": 20.0}
"""Bytes that an update moves for each parameter: AdamW reads gradient, master weight and two moments, writes three of
them and the weight in 16 bits; lamb and lars read weights and updates once more for their norms. Muon's products are
not in it."""


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
class PassBreakdown:
    """One micro-batch through one chunk, one way: seconds by cause, numbers or arrays of layouts."""

    gemm: ArrayLike
    attention: ArrayLike
    memory_bound: ArrayLike
    recomputation: ArrayLike
    tp_all_reduce: ArrayLike
    cp_all_gather_kv: ArrayLike
    ep_all_to_all: ArrayLike
    fsdp_exposed: ArrayLike
    kernel_launch: ArrayLike
    """Seconds for which the device waits for the host to launch kernels."""

    @property
    def total(self) -> ArrayLike:
        """Seconds of all parts."""
        return sum(vars(self).values())


CollectiveTime = Callable[[CollectiveKind, str, ArrayLike, float], ArrayLike]
"""Seconds of a collective among "tensor", "context" or "expert" ranks, by its kind, bytes and copies."""


def segment_pass_time(
    stack: SoftwareStack,
    work_done: SegmentWork,
    recomputed: SegmentWork | None,
    mode: str,
    has_experts: bool,
    quantized: bool,
    collective_time: CollectiveTime,
) -> PassBreakdown:
    """What a segment does one way and what is computed `recomputed` for it, in seconds, without sharding; `way` of
    recomputing. `has_experts`: whether any segment of the model has them. Numbers or arrays of layouts."""
    recompute_s: ArrayLike = 0.0
    num_reduces, num_dispatches, launch_s = (
        work_done.num_reduces,
        work_done.num_dispatches,
        _launch_seconds(stack, work_done),
    )
    if recomputed is not None:
        launch_s = launch_s + _launch_seconds(stack, recomputed)
        recompute_s = recomputed.compute.memory_bound if mode == "selective" else recomputed.compute.total
        if mode != "selective":
            num_reduces, num_dispatches = (
                num_reduces + recomputed.num_reduces,
                num_dispatches + recomputed.num_dispatches,
            )
    expert_factor = stack.expert_factor if has_experts else 1.0
    compute_factor = expert_factor * stack.compute_factor
    reduced_bytes = work_done.reduce_bytes if work_done.num_reduces or recomputed is None else recomputed.reduce_bytes
    dispatched_bytes = (
        work_done.dispatch_bytes if work_done.num_dispatches or recomputed is None else recomputed.dispatch_bytes
    )
    kv_gather_s = collective_time("all_gather", "context", work_done.kv_bytes, 1.0)
    return PassBreakdown(
        gemm=work_done.compute.gemm * compute_factor * (stack.fp8_gemm_factor if quantized else 1.0),
        attention=work_done.compute.attention * compute_factor,
        memory_bound=work_done.compute.memory_bound * compute_factor,
        recomputation=recompute_s * compute_factor,
        tp_all_reduce=num_reduces
        * collective_time("all_reduce", "tensor", reduced_bytes, 1.0)
        * (1 - stack.max_tp_overlap),
        cp_all_gather_kv=np.maximum(0.0, kv_gather_s - work_done.compute.attention * stack.compute_factor),
        ep_all_to_all=num_dispatches
        * collective_time("all_to_all", "expert", dispatched_bytes, work_done.copies_per_token)
        * expert_factor,
        fsdp_exposed=0.0,
        kernel_launch=launch_s,
    )


def _launch_seconds(stack: SoftwareStack, work_done: SegmentWork) -> ArrayLike:
    """Seconds that the host needs for what a pass through a segment launches."""
    launches = work_done.num_launches + work_done.num_expert_gemms * stack.launches_per_expert_gemm
    return launches * stack.launch_s + work_done.num_dispatches * stack.routing_sync_s


class SegmentCosts:
    """The costs of a setup's segments, computed once."""

    def __init__(self, scenario: Scenario, device: DeviceCosts, cost_of: OpCost | None = None) -> None:
        self.scenario, self.device = scenario, device
        self._cost_of = cost_of or op_cost_from(device)
        parallelism, cluster = scenario.parallelism, scenario.cluster
        inner_stride, latency_factor = parallelism.tensor * parallelism.context, scenario.stack.latency_factor
        self._groups = {
            "tensor": group_links(cluster, parallelism.tensor, 1, latency_factor),
            "context": group_links(cluster, parallelism.context, parallelism.tensor, latency_factor),
            "expert": group_links(cluster, parallelism.expert, parallelism.tensor, latency_factor),
        }
        self.shard_links = group_links(
            cluster,
            parallelism.shard * (parallelism.context if scenario.zero_level == 3 else 1),
            parallelism.tensor,
            latency_factor,
        )
        shard_ranks = parallelism.shard * parallelism.context if scenario.zero_level == 3 else 1
        replica_ranks = scenario.data_parallel * parallelism.context // shard_ranks
        self.replica_links = group_links(cluster, replica_ranks, parallelism.tensor * shard_ranks, latency_factor)
        self.stage_links = group_links(
            cluster, parallelism.pipeline, inner_stride * scenario.data_parallel, latency_factor
        )
        self.shard = ShardSpec(
            samples=scenario.micro_size / parallelism.context,
            tensor=parallelism.tensor,
            context=parallelism.context,
            expert=parallelism.expert,
            fuses_memory_ops=scenario.stack.fuses_memory_ops,
            sequence_parallel=scenario.stack.sequence_parallel,
        )
        self._cache: dict[tuple[int, str], Any] = {}
        self._has_experts = any(segment.num_experts for segment in scenario.profile.segments)

    def pass_of(self, segment: ModelSegment, direction: str) -> PassBreakdown:
        """A segment's forward, or its backward with what is computed again for it; without sharding."""
        key = (id(segment), direction)
        if key not in self._cache:
            self._cache[key] = self._forward_pass(segment) if direction == "forward" else self._backward_pass(segment)
        found: PassBreakdown = self._cache[key]
        return found

    def _forward_pass(self, segment: ModelSegment) -> PassBreakdown:
        return self._to_floats(segment_work(segment, "forward", self.shard, self._cost_of), None)

    def _backward_pass(self, segment: ModelSegment) -> PassBreakdown:
        recomputed = None
        if segment.is_block and self.scenario.checkpointing in ("full", "selective"):
            recomputed = segment_work(segment, "forward", self.shard, self._cost_of)
        return self._to_floats(segment_work(segment, "backward", self.shard, self._cost_of), recomputed)

    def _to_floats(self, work_done: SegmentWork, recomputed: SegmentWork | None) -> PassBreakdown:
        pass_time = segment_pass_time(
            self.scenario.stack,
            work_done,
            recomputed,
            self.scenario.checkpointing,
            self._has_experts,
            self.device.quantized,
            self._collective_seconds,
        )
        return PassBreakdown(**{name: float(value) for name, value in vars(pass_time).items()})

    def _collective_seconds(self, kind: CollectiveKind, group: str, num_bytes: ArrayLike, copies: float) -> ArrayLike:
        return collective_seconds(kind, num_bytes, self._groups[group], self.scenario.stack.comm_factor, copies)

    def gather_seconds(self, segment: ModelSegment) -> float:
        """Seconds to gather the weights of a segment among the ranks that divide them; 0 where none do."""
        if self.scenario.zero_level < 3 or self.shard_links.ranks == 1:
            return 0.0
        size = self.num_elements(segment) * 2.0
        return float(collective_seconds("all_gather", size, self.shard_links, self.scenario.stack.comm_factor))

    def reduce_scatter_seconds(self, segment: ModelSegment) -> float:
        """Seconds to add the gradients of a segment and leave each rank its part."""
        if self.scenario.zero_level < 3 or self.shard_links.ranks == 1:
            return 0.0
        size = self.num_trained(segment) * float(self.scenario.stack.gradient_bytes)
        return float(collective_seconds("reduce_scatter", size, self.shard_links, self.scenario.stack.comm_factor))

    def num_elements(self, segment: ModelSegment) -> float:
        """Parameters of a segment on one rank, before data-parallel ranks divide them."""
        return sum(self._dense_and_expert_elements(segment))

    def num_trained(self, segment: ModelSegment) -> float:
        """Those of them that are trained, which alone have gradients and an update."""
        return self.num_elements(segment) * segment.weights.trained_share

    def num_updated(self, segment: ModelSegment) -> float:
        """Those of them that one rank updates."""
        scenario, parallelism = self.scenario, self.scenario.parallelism
        ranks = (
            parallelism.context * (parallelism.shard if scenario.zero_level == 3 else scenario.data_parallel)
            if scenario.zero_level
            else 1
        )
        return (
            float(shard_elements(*self._dense_and_expert_elements(segment), ranks, parallelism.expert))
            * segment.weights.trained_share
        )

    def _dense_and_expert_elements(self, segment: ModelSegment) -> tuple[float, float]:
        weights, parallelism = segment.weights, self.scenario.parallelism
        return weights.tp_sharded / parallelism.tensor + weights.replicated, weights.expert / parallelism.expert


def stage_pass_time(costs: SegmentCosts, stage: StageSegments, direction: str) -> PassBreakdown:
    """A micro-batch through a chunk, one way, with the weights gathered ahead of use where they are divided: the next
    segment's while this one is computed."""
    passes = [(costs.pass_of(segment, direction), segment, count) for segment, count in stage.segments]
    if direction == "backward":
        passes.reverse()
    exposed_s = 0.0
    if costs.scenario.zero_level == 3 and costs.shard_links.ranks > 1:
        units: list[FsdpUnit] = []
        for pass_time, segment, count in passes:
            scattered = costs.reduce_scatter_seconds(segment) if direction == "backward" else 0.0
            units += [
                FsdpUnit(pass_time.total - pass_time.kernel_launch, costs.gather_seconds(segment), scattered)
            ] * count
        exposed_s = _exposed_fsdp_seconds(units)
    totals = {
        name: sum(count * getattr(pass_time, name) for pass_time, _, count in passes)
        for name in PassBreakdown.__dataclass_fields__
    }
    totals["fsdp_exposed"] = exposed_s
    # The host runs ahead of the device, so only what a whole pass takes counts; where both are about as busy each waits
    # for the other now and then.
    launch_s, device_s = totals.pop("kernel_launch"), sum(totals.values())
    return PassBreakdown(**totals, kernel_launch=math.hypot(launch_s, device_s) - device_s)


class FsdpUnit(NamedTuple):
    """A segment with sharded weights: seconds of its compute, of the all-gather before, of the reduce-scatter after."""

    compute_s: float
    gather_s: float
    scatter_s: float


def _exposed_fsdp_seconds(units: Sequence[FsdpUnit]) -> float:
    """Seconds by which gathering weights and scattering gradients lengthens a pass: two streams, weights gathered one
    segment ahead, computing slowed down while something travels."""
    compute_end, comm_end = 0.0, units[0].gather_s
    weights_ready = comm_end
    for index, unit in enumerate(units):
        unit_ready = weights_ready
        if index + 1 < len(units):
            comm_end = max(comm_end, compute_end) + units[index + 1].gather_s
            weights_ready = comm_end
        start = max(compute_end, unit_ready)
        overlap_s = max(0.0, min(comm_end - start, unit.compute_s))
        compute_end = start + unit.compute_s + OVERLAP_SLOWDOWN * overlap_s
        if unit.scatter_s:
            comm_end = max(comm_end, compute_end) + unit.scatter_s
    # weights that are still being gathered are another pass's
    last_end = comm_end if units[-1].scatter_s else compute_end
    return max(compute_end, last_end) - sum(unit.compute_s for unit in units)


def stage_send_seconds(costs: SegmentCosts) -> float:
    """Seconds that the activations of a micro-batch travel from a stage to the next."""
    scenario, parallelism = costs.scenario, costs.scenario.parallelism
    if parallelism.pipeline == 1:
        return 0.0
    block = next(each for each in scenario.profile.segments if each.is_block)
    num_bytes = block.input_bytes.evaluate(scenario.micro_size / parallelism.context) / parallelism.tensor
    return float(collective_seconds("send", num_bytes, costs.stage_links, scenario.stack.comm_factor))


def measured_step_time(scenario: Scenario, device: DeviceCosts, measured_costs: MeasuredCosts) -> StepBreakdown:
    """Seconds of a step by cause on a machine that was measured, one process after the other's operations: whole
    replicas only. NotMeasured: something that it needs was not."""
    costs = SegmentCosts(scenario, device, measured_costs.cost_of)
    stage = split_into_stages(scenario)[0]
    passes = [stage_pass_time(costs, stage, direction) for direction in ("forward", "backward")]
    num_trained = sum(costs.num_trained(segment) * count for segment, count in stage.segments)
    ranks = scenario.parallelism.replicate
    totals = {
        name: scenario.num_micro_batches * sum(getattr(each, name) for each in passes)
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


def predict_step_time(scenario: Scenario, device: DeviceCosts, cost_of: OpCost | None = None) -> StepBreakdown:
    """Seconds of a step by cause, from the point of view of the busiest pipeline rank."""
    costs, parallelism = SegmentCosts(scenario, device, cost_of), scenario.parallelism
    stages_of_model = split_into_stages(scenario)
    forward = [stage_pass_time(costs, chunk, "forward") for chunk in stages_of_model]
    backward = [stage_pass_time(costs, chunk, "backward") for chunk in stages_of_model]
    stages = [StageTime(f.total, b.total) for f, b in zip(forward, backward, strict=True)]
    send_s = stage_send_seconds(costs)
    schedule: PipelineSchedule = "interleaved" if scenario.virtual_stages > 1 else parallelism.pipeline_schedule
    pipeline_s = pipeline_seconds(schedule, stages, parallelism.pipeline, scenario.num_micro_batches, send_s)
    busiest = max(
        range(parallelism.pipeline),
        key=lambda rank: sum(s.forward_s + s.backward_s for s in stages[rank :: parallelism.pipeline]),
    )
    rank_passes = [*forward[busiest :: parallelism.pipeline], *backward[busiest :: parallelism.pipeline]]
    totals = {
        name: scenario.num_micro_batches * sum(getattr(each, name) for each in rank_passes)
        for name in PassBreakdown.__dataclass_fields__
    }
    ranks = [
        [pair for each in stages_of_model[at :: parallelism.pipeline] for pair in each.segments]
        for at in range(parallelism.pipeline)
    ]
    num_updated = max(
        sum(costs.num_updated(segment) * count for segment, count in rank_passes) for rank_passes in ranks
    )
    num_gradients = (
        num_updated
        if scenario.zero_level == 3
        else max(sum(costs.num_trained(of) * count for of, count in rank_passes) for rank_passes in ranks)
    )
    last_backward_s = max(
        sum(each.total for each in backward[rank :: parallelism.pipeline]) for rank in range(parallelism.pipeline)
    )
    first_forward_s = max(
        sum(each.total for each in forward[rank :: parallelism.pipeline]) for rank in range(parallelism.pipeline)
    )
    return StepBreakdown(
        **totals,
        pipeline_bubble=pipeline_s - sum(totals.values()),
        grad_sync=_exposed_grad_sync_seconds(costs, num_gradients, first_forward_s, last_backward_s),
        optimizer=update_seconds(scenario.optimizer, device, num_updated),
        other=scenario.stack.step_overhead_s,
    )


def _exposed_grad_sync_seconds(
    costs: SegmentCosts, num_weights: float, first_forward_s: float, last_backward_s: float
) -> float:
    """Exposed seconds of the all-reduce of `num_weights` gradients over replicas, overlapped with the last
    `last_backward_s` of backward, and, where replicas divide the optimizer state, of the all-gather of the new weights,
    overlapped with the first `first_forward_s` of forward."""
    scenario, replica_links = costs.scenario, costs.replica_links
    stack = scenario.stack
    if replica_links.ranks == 1:
        return 0.0
    comm_factor = stack.comm_factor
    if scenario.zero_level in (1, 2):
        reduce_s = float(
            collective_seconds("reduce_scatter", num_weights * stack.gradient_bytes, replica_links, comm_factor)
        )
        gather_s = float(collective_seconds("all_gather", num_weights * 2.0, replica_links, comm_factor))
    else:
        num_bytes = num_weights * stack.gradient_bytes * scenario.transport.wire_ratio
        reduce_s = float(collective_seconds("all_reduce", num_bytes, replica_links, comm_factor))
        gather_s = 0.0
    max_overlap = stack.max_overlap if scenario.transport.overlaps_backward else 0.0
    return float(
        exposed_seconds(reduce_s, last_backward_s, max_overlap)
        + exposed_seconds(gather_s, first_forward_s, stack.max_overlap)
    )


def exposed_seconds(comm_s: ArrayLike, compute_s: ArrayLike, max_overlap: float) -> ArrayLike:
    """What does not hide, and by how much it slows down what it hides behind. Numbers or arrays."""
    hidden_s = np.minimum(comm_s * max_overlap, compute_s)
    return comm_s - hidden_s + OVERLAP_SLOWDOWN * hidden_s


def update_seconds(optimizer: str, device: DeviceCosts, num_weights: ArrayLike) -> ArrayLike:
    """Seconds of an optimizer step on `num_weights` weights."""
    return num_weights * UPDATE_BYTES_PER_PARAMETER[optimizer] / (device.bandwidth * 0.8)
