"""Who goes next in the local queue."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.jobs.local_queue.policy import (
    AGING_S_PER_PRIORITY,
    PendingJob,
    Resources,
    RunningJob,
    predict_starts,
    select_gpus,
    select_jobs_to_start,
    sort_by_priority,
)

MACHINE = Resources(4, 8)
NOW = 1000.0


def waiting(
    ident: int, devices: int = 1, *, priority: int = 0, since: float = 0.0, limit: float | None = None
) -> PendingJob:
    return PendingJob(ident, Resources(devices, devices), priority, since, limit)


def running(devices: int, until: float | None) -> RunningJob:
    return RunningJob(99, Resources(devices, devices), until)


def test_who_came_first_goes_first() -> None:
    assert select_jobs_to_start(
        [waiting(2, 2, since=5), waiting(1, 2, since=4), waiting(3, 2, since=6)], [], MACHINE, NOW
    ) == [1, 2]


def test_a_higher_priority_goes_first() -> None:
    assert select_jobs_to_start([waiting(1, 4), waiting(2, 4, priority=1)], [], MACHINE, NOW) == [2]


def test_long_waiting_outweighs_priority() -> None:
    old = waiting(1, 4, since=0.0)
    for hours, first in ((1, 2), (3, 1)):
        urgent = waiting(2, 4, priority=2, since=hours * AGING_S_PER_PRIORITY)
        assert sort_by_priority([old, urgent], hours * AGING_S_PER_PRIORITY)[0].id == first


def test_a_gang_gets_all_its_devices_or_none() -> None:
    assert select_jobs_to_start([waiting(1, 3)], [running(2, None)], MACHINE, NOW) == []


def test_cores_count_as_well_as_devices() -> None:
    assert (
        select_jobs_to_start(
            [PendingJob(1, Resources(0, 8), 0, 0.0)], [RunningJob(9, Resources(0, 1), None)], MACHINE, NOW
        )
        == []
    )


def test_a_short_job_overtakes_where_it_delays_nobody() -> None:
    big, short, long = waiting(1, 4), waiting(2, 2, since=1, limit=50.0), waiting(3, 2, since=2, limit=500.0)
    assert select_jobs_to_start([big, short, long], [running(2, NOW + 60)], MACHINE, NOW) == [2]


def test_a_job_without_a_limit_overtakes_only_beside_the_one_that_waits() -> None:
    waits, small, large = waiting(1, 3), waiting(2, 1, since=1), waiting(3, 1, since=2)
    assert select_jobs_to_start([waits, small, large], [running(2, NOW + 60)], MACHINE, NOW) == [2]


def test_while_nobody_knows_when_the_first_can_start_only_what_leaves_room_for_it_overtakes() -> None:
    assert select_jobs_to_start([waiting(1, 4), waiting(2, 1, since=1)], [running(2, None)], MACHINE, NOW) == []


def test_a_job_gets_the_lowest_devices_that_are_free() -> None:
    assert select_gpus(2, 4, [0, 2]) == [1, 3]


sizes = st.builds(Resources, st.integers(0, 4), st.integers(1, 8))
limits = st.none() | st.floats(1.0, 500.0)
queues = st.lists(
    st.builds(PendingJob, st.just(0), sizes, st.integers(-2, 2), st.floats(0.0, NOW), limits), max_size=8
).map(
    lambda jobs: [
        PendingJob(index, job.resources, job.priority, job.queued_since, job.time_limit_s)
        for index, job in enumerate(jobs)
    ]
)


@given(queues)
def test_what_is_started_fits_together_and_is_started_once(queue: list[PendingJob]) -> None:
    chosen = select_jobs_to_start(queue, [], MACHINE, NOW)
    total = sum((queue[ident].resources for ident in chosen), Resources(0, 0))
    assert MACHINE.fits(total)
    assert len(set(chosen)) == len(chosen)


@given(queues, st.lists(st.builds(RunningJob, st.just(0), sizes, st.floats(NOW, NOW + 500)), max_size=3))
def test_nobody_delays_the_first_that_waits(queue: list[PendingJob], busy: list[RunningJob]) -> None:
    """When all who were started take as long as they may, the first can start when it could have without those that
    overtook it."""
    total = sum((job.resources for job in busy), Resources(0, 0))
    if not MACHINE.fits(total) or not queue:
        return
    chosen = select_jobs_to_start(queue, busy, MACHINE, NOW)
    order = [job.id for job in sort_by_priority(queue, NOW)]
    left = [ident for ident in order if ident not in chosen]
    if not left:
        return
    head = queue[left[0]]
    before = [queue[ident] for ident in order[: order.index(head.id)]]
    overtook = [queue[ident] for ident in chosen if order.index(ident) > order.index(head.id)]

    def earliest(others: list[PendingJob]) -> float:
        ends = [(job.ends_by or 0.0, job.resources) for job in busy]
        ends += [
            (float("inf") if job.time_limit_s is None else NOW + job.time_limit_s, job.resources) for job in others
        ]
        for moment in sorted({NOW, *(end for end, _ in ends)}):
            held = sum((size for end, size in ends if end > moment), Resources(0, 0))
            if (MACHINE - held).fits(head.resources):
                return moment
        return float("inf")

    assert earliest([*before, *overtook]) == pytest.approx(earliest(before))


def test_starts_are_predicted_from_known_ends() -> None:
    pending = [waiting(1, 4, since=1, limit=100.0), waiting(2, 4, since=2, limit=50.0), waiting(3, 4, since=3)]
    assert predict_starts(pending, [running(4, NOW + 30)], MACHINE, NOW) == {1: NOW + 30, 2: NOW + 130, 3: NOW + 180}


def test_a_job_that_fits_starts_now_and_what_waits_for_an_unknown_end_is_left_out() -> None:
    pending = [waiting(1, 2, since=1), waiting(2, 4, since=2, limit=5.0)]
    assert predict_starts(pending, [running(2, NOW + 10)], MACHINE, NOW) == {1: NOW}
    assert predict_starts([waiting(1, 4)], [running(4, None)], MACHINE, NOW) == {}


def test_a_late_end_is_predicted_for_now() -> None:
    assert predict_starts([waiting(1, 4)], [running(4, NOW - 60)], MACHINE, NOW) == {1: NOW}


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 100)), max_size=12),
    st.lists(st.integers(1, 100), max_size=4),
)
def test_predicted_starts_are_those_that_the_policy_gives_when_time_passes(
    jobs: list[tuple[int, int, int]], ends: list[int]
) -> None:
    pending = [waiting(id, gpus, priority=level, limit=float(limit)) for id, (gpus, level, limit) in enumerate(jobs)]
    started = [RunningJob(100 + number, Resources(1, 1), NOW + end) for number, end in enumerate(ends)]
    found = predict_starts(pending, started, MACHINE, NOW)
    assert found.keys() == {job.id for job in pending}
    for moment in found.values():  # nothing is ever given twice
        active = [job for job in started if job.ends_by is not None and job.ends_by > moment]
        used = sum(job.resources.gpus for job in active) + sum(
            job.resources.gpus
            for job in pending
            if found[job.id] <= moment and found[job.id] + (job.time_limit_s or 0.0) > moment
        )
        assert used <= MACHINE.gpus
