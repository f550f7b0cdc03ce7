"""Pipeline schedules: closed forms where stages are alike, and what must hold of every schedule."""

import random
from itertools import pairwise

import pytest

from phalanx.planner.pipeline import (
    PipelineOpKind,
    PipelineSchedule,
    ScheduledOp,
    StageTime,
    pipeline_seconds,
    rank_schedule,
    simulate_schedule,
)

ALIKE = StageTime(1.0, 2.0)
SCHEDULES: list[tuple[PipelineSchedule, int]] = [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2)]
"""With the stages of a rank."""


def end(spans: list[ScheduledOp]) -> float:
    return max(span.end_s for span in spans)


def uneven(count: int, seed: int = 0) -> list[StageTime]:
    rng = random.Random(seed)
    return [StageTime(rng.uniform(0.5, 1.5), rng.uniform(1.0, 3.0)) for _ in range(count)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micros"), [(2, 2), (4, 4), (4, 7), (4, 16), (8, 3)])
def test_alike_stages_take_a_turn_for_each_micro_batch_and_for_each_further_stage(
    schedule: PipelineSchedule, ranks: int, micros: int
) -> None:
    assert end(simulate_schedule(schedule, [ALIKE] * ranks, ranks, micros, 0.0)) == pytest.approx(
        (micros + ranks - 1) * 3.0
    )


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(chunks: int) -> None:
    ranks, micros = 4, 8
    stages = [StageTime(1.0 / chunks, 2.0 / chunks)] * (ranks * chunks)
    bubble = end(simulate_schedule("interleaved", stages, ranks, micros, 0.0)) - 3.0 * micros
    assert bubble == pytest.approx(3.0 * (ranks - 1) / chunks)


@pytest.mark.parametrize(("ranks", "micros"), [(2, 4), (4, 4), (4, 9), (8, 16)])
def test_zero_bubble_is_faster_than_1f1b(ranks: int, micros: int) -> None:
    plain, split = (pipeline_seconds(name, [ALIKE] * ranks, ranks, micros, 0.0) for name in ("1f1b", "zero-bubble"))  # type: ignore[arg-type]
    assert split < plain
    assert split >= 3.0 * micros


@pytest.mark.parametrize("seed", range(5))
def test_zero_bubble_is_no_slower_than_1f1b_with_unlike_stages(seed: int) -> None:
    stages = uneven(4, seed)
    assert pipeline_seconds("zero-bubble", stages, 4, 12, 0.0) <= pipeline_seconds("1f1b", stages, 4, 12, 0.0) + 1e-9


@pytest.mark.parametrize("micros", [1, 3, 4, 5, 8, 14])
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_each_rank_does_each_micro_batch_of_each_chunk_once(
    schedule: PipelineSchedule, chunks: int, micros: int
) -> None:
    kinds: tuple[PipelineOpKind, ...] = ("F", "B", "W") if schedule == "zero-bubble" else ("F", "B")
    wanted = sorted((kind, chunk, micro) for kind in kinds for chunk in range(chunks) for micro in range(micros))
    for rank in range(4):
        assert sorted(rank_schedule(schedule, rank, 4, chunks, micros)) == wanted


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("micros", [1, 5, 6, 11, 24])
def test_interleaving_ends_however_many_micro_batches_there_are(ranks: int, chunks: int, micros: int) -> None:
    spans = simulate_schedule("interleaved", [ALIKE] * (ranks * chunks), ranks, micros, 0.0)
    assert len(spans) == 2 * ranks * chunks * micros


@pytest.mark.parametrize("micros", [1, 4, 6, 13])
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_nothing_begins_before_what_it_needs_has_arrived(schedule: PipelineSchedule, chunks: int, micros: int) -> None:
    ranks, send = 4, 0.25
    spans = simulate_schedule(schedule, uneven(ranks * chunks), ranks, micros, send)
    ends = {(span.op, span.virtual_stage * ranks + span.rank, span.micro_batch): span.end_s for span in spans}
    last = ranks * chunks - 1
    for span in spans:
        stage = span.virtual_stage * ranks + span.rank
        if span.op == "F" and stage > 0:
            assert span.start_s >= ends["F", stage - 1, span.micro_batch] + send - 1e-9
        if span.op == "B":
            assert span.start_s >= ends["F", stage, span.micro_batch] - 1e-9
            if stage < last:
                assert span.start_s >= ends["B", stage + 1, span.micro_batch] + send - 1e-9
        if span.op == "W":
            assert span.start_s >= ends["B", stage, span.micro_batch] - 1e-9


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_a_rank_does_one_thing_at_a_time(schedule: PipelineSchedule, chunks: int) -> None:
    spans = simulate_schedule(schedule, uneven(4 * chunks), 4, 8, 0.1)
    for rank in range(4):
        mine = sorted((span.start_s, span.end_s) for span in spans if span.rank == rank)
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(mine))


@pytest.mark.parametrize("send", [0.0, 0.3])
@pytest.mark.parametrize("micros", [60, 61, 63])
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_many_micro_batches_take_as_long_as_all_of_them_simulated(
    schedule: PipelineSchedule, chunks: int, micros: int, send: float
) -> None:
    stages = uneven(4 * chunks, seed=7)
    full = end(simulate_schedule(schedule, stages, 4, micros, send))
    assert pipeline_seconds(schedule, stages, 4, micros, send) == pytest.approx(full, rel=0.005)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_sending_takes_time(schedule: PipelineSchedule, chunks: int) -> None:
    times = [pipeline_seconds(schedule, [ALIKE] * (4 * chunks), 4, 8, send) for send in (0.0, 0.1, 0.5)]
    assert times == sorted(set(times))
    assert times[1] - times[0] >= 0.1 * 2 * 3  # there and back, between four stages


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("slow", range(4))
def test_the_slowest_rank_sets_the_pace(schedule: PipelineSchedule, chunks: int, slow: int) -> None:
    stages = [StageTime(2.0, 4.0) if stage % 4 == slow else ALIKE for stage in range(4 * chunks)]
    further = pipeline_seconds(schedule, stages, 4, 200, 0.0) - pipeline_seconds(schedule, stages, 4, 100, 0.0)
    assert further == pytest.approx(100 * 6.0 * chunks, rel=0.01)


def test_one_rank_has_no_bubble() -> None:
    assert pipeline_seconds("1f1b", [StageTime(0.5, 1.5)], 1, 10, 9.0) == 20.0
