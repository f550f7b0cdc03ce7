"""Pipelines: which segments of a model each stage has, schedules as orders of work, and how long they take: a
simulation of events, one queue a rank.

GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019 (PipeDream-Flush). Interleaved: Narayanan et al. 2021, section
2.2. Zero bubble (ZB-H1): Qi et al. 2023, where backward is two halves, for inputs and for weights, of which the second
waits for idle time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.planner.model_profile import ModelProfile, ModelSegment
from phalanx.planner.scenario import PipelineSchedule, Scenario

PipelineOpKind = Literal["F", "B", "W"]
"""Forward; backward, or with zero bubble that of inputs alone; that of weights."""


@dataclass(frozen=True)
class ScheduledOp:
    """One piece of work as it was simulated, seconds from the start of the step."""

    rank: int
    op: PipelineOpKind
    virtual_stage: int
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage for one micro-batch."""

    forward_s: float
    backward_s: float


def rank_schedule(
    schedule: PipelineSchedule, rank: int, num_ranks: int, virtual_stages: int, num_micro_batches: int
) -> list[tuple[PipelineOpKind, int, int]]:
    """What one rank does, as (kind, chunk, micro-batch), in order."""
    if schedule == "gpipe":
        forward: list[tuple[PipelineOpKind, int, int]] = [("F", 0, micro) for micro in range(num_micro_batches)]
        return forward + [("B", 0, micro) for micro in range(num_micro_batches)]
    if virtual_stages > 1 and schedule == "interleaved":
        return _interleaved_schedule(rank, num_ranks, virtual_stages, num_micro_batches)
    warmup = min(num_ranks - rank - 1, num_micro_batches)
    ops: list[tuple[PipelineOpKind, int, int]] = [("F", 0, micro) for micro in range(warmup)]
    for micro in range(warmup, num_micro_batches):
        ops += [("F", 0, micro), ("B", 0, micro - warmup)]
    ops += [("B", 0, micro) for micro in range(num_micro_batches - warmup, num_micro_batches)]
    return _split_backward(ops, rank) if schedule == "zero-bubble" else ops


def _interleaved_schedule(
    rank: int, num_ranks: int, virtual_stages: int, num_micro_batches: int
) -> list[tuple[PipelineOpKind, int, int]]:
    """Micro-batches go in groups of as many as there are ranks, the last of what is left, each group through one chunk
    after the other."""
    groups = [range(at, min(at + num_ranks, num_micro_batches)) for at in range(0, num_micro_batches, num_ranks)]
    forward: list[tuple[PipelineOpKind, int, int]] = []
    backward: list[tuple[PipelineOpKind, int, int]] = []
    for group in groups:
        forward += [("F", chunk, micro) for chunk in range(virtual_stages) for micro in group]
        backward += [("B", chunk, micro) for chunk in reversed(range(virtual_stages)) for micro in group]
    total = num_micro_batches * virtual_stages
    # Where the last group is smaller, or the only one, all forwards come first: ranks would wait for each other.
    warmup = (
        total
        if num_micro_batches % num_ranks or num_micro_batches == num_ranks
        else min(total, 2 * (num_ranks - rank - 1) + (virtual_stages - 1) * num_ranks)
    )
    ops = forward[:warmup]
    for index in range(warmup, total):
        ops += [forward[index], backward[index - warmup]]
    return ops + backward[total - warmup :]


def _split_backward(
    schedule: list[tuple[PipelineOpKind, int, int]], rank: int
) -> list[tuple[PipelineOpKind, int, int]]:
    """Each backward split in two; a rank further down puts the second half off by as many micro-batches."""
    ops: list[tuple[PipelineOpKind, int, int]] = []
    deferred: list[tuple[PipelineOpKind, int, int]] = []
    for kind, chunk, micro in schedule:
        ops.append((kind, chunk, micro))
        if kind == "B":
            deferred.append(("W", chunk, micro))
            if len(deferred) > rank:
                ops.append(deferred.pop(0))
    return ops + deferred


def simulate_schedule(
    schedule: PipelineSchedule, stages: Sequence[StageTime], num_ranks: int, num_micro_batches: int, send_s: float
) -> list[ScheduledOp]:
    """All work of a step. Stage s stands on rank s % ranks; `send_s` seconds lie between a stage and the next."""
    virtual_stages = len(stages) // num_ranks
    queues = [rank_schedule(schedule, rank, num_ranks, virtual_stages, num_micro_batches) for rank in range(num_ranks)]
    end_times: dict[tuple[PipelineOpKind, int, int], float] = {}
    free_at, positions, spans = [0.0] * num_ranks, [0] * num_ranks, list[ScheduledOp]()
    split = schedule == "zero-bubble"
    remaining = sum(len(queue) for queue in queues)
    while remaining:
        previous = remaining
        for rank, queue in enumerate(queues):
            while positions[rank] < len(queue):
                kind, chunk, micro = queue[positions[rank]]
                stage = chunk * num_ranks + rank
                ready_s = _ready_time(kind, stage, micro, len(stages), end_times, send_s)
                if ready_s is None:
                    break
                seconds = stages[stage].forward_s if kind == "F" else stages[stage].backward_s / (2 if split else 1)
                start = max(free_at[rank], ready_s)
                free_at[rank] = start + seconds
                end_times[(kind, stage, micro)] = free_at[rank]
                spans.append(ScheduledOp(rank, kind, chunk, micro, start, free_at[rank]))
                positions[rank] += 1
                remaining -= 1
        if remaining == previous:
            raise ValueError(f"{schedule} with {num_ranks} ranks and {num_micro_batches} micro-batches deadlocks")
    return spans


def _ready_time(
    kind: PipelineOpKind,
    stage: int,
    micro_batch: int,
    num_stages: int,
    end_times: dict[tuple[PipelineOpKind, int, int], float],
    send_s: float,
) -> float | None:
    """When what a piece of work needs is there; None while it is not known."""
    if kind == "W":
        return end_times.get(("B", stage, micro_batch))
    if kind == "F":
        if stage == 0:
            return 0.0
        end = end_times.get(("F", stage - 1, micro_batch))
        return None if end is None else end + send_s
    if stage == num_stages - 1:
        return end_times.get(("F", stage, micro_batch))
    end = end_times.get(("B", stage + 1, micro_batch))
    return None if end is None else end + send_s


def pipeline_seconds(
    schedule: PipelineSchedule, stages: Sequence[StageTime], num_ranks: int, num_micro_batches: int, send_s: float
) -> float:
    """Seconds of the forwards and backwards of a step. Once the pipeline is full, each further micro-batch takes as
    long as the one before, which is longer than the slowest rank needs where ranks wait for messages. So only as many
    are simulated as fill the pipeline."""
    if num_ranks == 1:
        return num_micro_batches * sum(each.forward_s + each.backward_s for each in stages)

    def end(count: int) -> float:
        return max(span.end_s for span in simulate_schedule(schedule, stages, num_ranks, count, send_s))

    steady_state = 3 * num_ranks + num_micro_batches % num_ranks
    if num_micro_batches <= steady_state + num_ranks:
        return end(num_micro_batches)
    steady_end = end(steady_state + num_ranks)
    return steady_end + (num_micro_batches - steady_state - num_ranks) / num_ranks * (steady_end - end(steady_state))


@dataclass(frozen=True, eq=False)
class StageSegments:
    """What one rank has of the model for one pipeline stage: segments, each so often. Stages with the same segments are
    one object."""

    segments: tuple[tuple[ModelSegment, int], ...]


def split_into_stages(scenario: Scenario) -> list[StageSegments]:
    """The stages of the pipeline, in order: blocks as evenly as they go, what stands before and after them with the
    first and the last."""
    return split_profile(
        scenario.profile, scenario.parallelism.pipeline * scenario.virtual_stages, scenario.parallelism.layers_per_stage
    )


def split_profile(
    profile: ModelProfile, num_stages: int, layers_per_stage: Sequence[int] | None = None
) -> list[StageSegments]:
    """A model in `num_stages` stages, `layers_per_stage` blocks in each where it is given."""
    blocks: list[ModelSegment] = []
    first_segments: list[ModelSegment] = []
    last_segments: list[ModelSegment] = []
    for segment in profile.segments:
        if segment.is_block:
            blocks += [segment] * segment.repeats
        elif blocks:
            last_segments.append(segment)
        else:
            first_segments.append(segment)
    blocks_per_stage = layers_per_stage or balance_stages(len(blocks), num_stages)
    stages_found, first_block = [], 0
    distinct: dict[tuple[tuple[int, int], ...], StageSegments] = {}
    for index, count in enumerate(blocks_per_stage):
        stage_segments = [(each, 1) for each in first_segments] if index == 0 else []
        for block in blocks[first_block : first_block + count]:
            if stage_segments and stage_segments[-1][0] is block:
                stage_segments[-1] = (block, stage_segments[-1][1] + 1)
            else:
                stage_segments.append((block, 1))
        first_block += count
        if index == len(blocks_per_stage) - 1:
            stage_segments += [(each, 1) for each in last_segments]
        key = tuple((id(segment), repeats) for segment, repeats in stage_segments)
        stages_found.append(distinct.setdefault(key, StageSegments(tuple(stage_segments))))
    return stages_found


def balance_stages(num_blocks: int, num_stages: int) -> list[int]:
    """Divide `num_blocks` blocks over `num_stages` stages. The remainder goes to the middle stages: the ends do more
    than blocks."""
    blocks_each, remainder = divmod(num_blocks, num_stages)
    larger_stages = sorted(range(num_stages), key=lambda stage: (-min(stage, num_stages - 1 - stage), stage))[
        :remainder
    ]
    return [blocks_each + (stage in larger_stages) for stage in range(num_stages)]
