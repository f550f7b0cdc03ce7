"""Who goes next in the local queue."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.jobs.queue.schedule import AGEING, Running, Size, Waiting, devices_for, ordered, starts

MACHINE = Size(4, 8)
NOW = 1000.0


def waiting(
    ident: int, devices: int = 1, *, priority: int = 0, since: float = 0.0, limit: float | None = None
) -> Waiting:
    return Waiting(ident, Size(devices, devices), priority, since, limit)


def running(devices: int, until: float | None) -> Running:
    return Running(99, Size(devices, devices), until)


def test_who_came_first_goes_first() -> None:
    assert starts([waiting(2, 2, since=5), waiting(1, 2, since=4), waiting(3, 2, since=6)], [], MACHINE, NOW) == [1, 2]


def test_a_higher_priority_goes_first() -> None:
    assert starts([waiting(1, 4), waiting(2, 4, priority=1)], [], MACHINE, NOW) == [2]


def test_long_waiting_outweighs_priority() -> None:
    old = waiting(1, 4, since=0.0)
    for hours, first in ((1, 2), (3, 1)):
        urgent = waiting(2, 4, priority=2, since=hours * AGEING)
        assert ordered([old, urgent], hours * AGEING)[0].id == first


def test_a_gang_gets_all_its_devices_or_none() -> None:
    assert starts([waiting(1, 3)], [running(2, None)], MACHINE, NOW) == []


def test_cores_count_as_well_as_devices() -> None:
    assert starts([Waiting(1, Size(0, 8), 0, 0.0)], [Running(9, Size(0, 1), None)], MACHINE, NOW) == []


def test_a_short_job_overtakes_where_it_delays_nobody() -> None:
    big, short, long = waiting(1, 4), waiting(2, 2, since=1, limit=50.0), waiting(3, 2, since=2, limit=500.0)
    assert starts([big, short, long], [running(2, NOW + 60)], MACHINE, NOW) == [2]


def test_a_job_without_a_limit_overtakes_only_beside_the_one_that_waits() -> None:
    waits, small, large = waiting(1, 3), waiting(2, 1, since=1), waiting(3, 1, since=2)
    assert starts([waits, small, large], [running(2, NOW + 60)], MACHINE, NOW) == [2]


def test_while_nobody_knows_when_the_first_can_start_only_what_leaves_room_for_it_overtakes() -> None:
    assert starts([waiting(1, 4), waiting(2, 1, since=1)], [running(2, None)], MACHINE, NOW) == []


def test_a_job_gets_the_lowest_devices_that_are_free() -> None:
    assert devices_for(2, 4, [0, 2]) == [1, 3]


sizes = st.builds(Size, st.integers(0, 4), st.integers(1, 8))
limits = st.none() | st.floats(1.0, 500.0)
queues = st.lists(
    st.builds(Waiting, st.just(0), sizes, st.integers(-2, 2), st.floats(0.0, NOW), limits), max_size=8
).map(lambda jobs: [Waiting(index, job.size, job.priority, job.since, job.limit) for index, job in enumerate(jobs)])


@given(queues)
def test_what_is_started_fits_together_and_is_started_once(queue: list[Waiting]) -> None:
    chosen = starts(queue, [], MACHINE, NOW)
    total = sum((queue[ident].size for ident in chosen), Size(0, 0))
    assert MACHINE.holds(total)
    assert len(set(chosen)) == len(chosen)


@given(queues, st.lists(st.builds(Running, st.just(0), sizes, st.floats(NOW, NOW + 500)), max_size=3))
def test_nobody_delays_the_first_that_waits(queue: list[Waiting], busy: list[Running]) -> None:
    """When all who were started take as long as they may, the first can start when it could have without those that
    overtook it."""
    total = sum((job.size for job in busy), Size(0, 0))
    if not MACHINE.holds(total) or not queue:
        return
    chosen = starts(queue, busy, MACHINE, NOW)
    order = [job.id for job in ordered(queue, NOW)]
    left = [ident for ident in order if ident not in chosen]
    if not left:
        return
    head = queue[left[0]]
    before = [queue[ident] for ident in order[: order.index(head.id)]]
    overtook = [queue[ident] for ident in chosen if order.index(ident) > order.index(head.id)]

    def earliest(others: list[Waiting]) -> float:
        ends = [(job.until or 0.0, job.size) for job in busy]
        ends += [(float("inf") if job.limit is None else NOW + job.limit, job.size) for job in others]
        for moment in sorted({NOW, *(end for end, _ in ends)}):
            held = sum((size for end, size in ends if end > moment), Size(0, 0))
            if (MACHINE - held).holds(head.size):
                return moment
        return float("inf")

    assert earliest([*before, *overtook]) == pytest.approx(earliest(before))
