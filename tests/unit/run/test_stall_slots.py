"""Slots for evaluations and saves in a file that the jobs of a site share."""

import fcntl
import json
import os
import random
from pathlib import Path

import pytest

from phalanx.errors import UsageError
from phalanx.run.stall_slots import MAX_STALL_S, WAIT_LEASE_S, StallSlots, SwingShare

LIMIT_W = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def open_slots(folder: Path, clock: Clock, holder: str, watts: float) -> StallSlots:
    return StallSlots(SwingShare("s", str(folder / "stalls-s.json"), holder, watts, LIMIT_W), clock)


def test_jobs_stall_together_within_the_swing_and_others_wait(tmp_path: Path, clock: Clock) -> None:
    a, b, c = (open_slots(tmp_path / "new", clock, name, watts) for name, watts in (("a", 4.0), ("b", 6.0), ("c", 1.0)))
    assert [each.take(60.0, 1.0) for each in (a, b, c)] == [True, True, False]
    assert b.free()
    assert c.take(60.0, 1.0)


def test_a_job_that_swings_by_more_than_the_limit_stalls_alone(tmp_path: Path, clock: Clock) -> None:
    small, large = open_slots(tmp_path, clock, "small", 1.0), open_slots(tmp_path, clock, "large", 50.0)
    assert [large.take(60.0, 1.0), small.take(60.0, 1.0)] == [True, False]
    large.free()
    assert [small.take(60.0, 1.0), large.take(60.0, 1.0)] == [True, False]


def test_a_large_job_is_not_overtaken_by_small_ones(tmp_path: Path, clock: Clock) -> None:
    first, second, large = (open_slots(tmp_path, clock, *each) for each in (("1", 4.0), ("2", 4.0), ("large", 9.0)))
    assert first.take(60.0, 1.0)
    assert not large.take(60.0, 1.0)
    clock.now += 1.0
    assert not second.take(60.0, 1.0)  # there would be room
    first.free()
    assert large.take(60.0, 1.0)


def test_a_job_that_must_stall_does_and_others_see_it(tmp_path: Path, clock: Clock) -> None:
    a, b, c = (open_slots(tmp_path, clock, name, 6.0) for name in "abc")
    a.take(60.0, 1.0)
    assert not b.take(60.0, 1.0, must=True)
    a.free()
    assert not c.take(60.0, 1.0)


def test_a_job_that_died_blocks_others_only_for_its_time(tmp_path: Path, clock: Clock) -> None:
    stalled, waiting, other = (open_slots(tmp_path, clock, name, 9.0) for name in ("stalled", "waiting", "other"))
    stalled.take(60.0, 1.0)
    waiting.take(60.0, 1.0)
    clock.now += 1.0 + WAIT_LEASE_S + 0.1
    assert not other.take(60.0, 1.0)
    clock.now = 1060.1
    assert other.take(60.0, 1.0)


def test_a_job_that_restarts_takes_its_own_slot_again(tmp_path: Path, clock: Clock) -> None:
    assert [open_slots(tmp_path, clock, "a", 9.0).take(600.0, 1.0) for _ in range(2)] == [True, True]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", '{"jobs": {"a": 7}}', 1000 * "["),
        '{"jobs": {"a": {"watts": 9.0, "since": 0.0, "until": NaN, "stalls": true}}}',
        f'{{"jobs": {{"a": {{"watts": 9.0, "since": 0.0, "until": {1001.0 + 2 * MAX_STALL_S}, "stalls": true}}}}}}',
    ],
)
def test_a_damaged_file_or_a_stall_without_end_delays_no_job(tmp_path: Path, clock: Clock, text: str) -> None:
    (tmp_path / "stalls-s.json").write_text(text)
    assert open_slots(tmp_path, clock, "b", 9.0).take(60.0, 1.0)
    assert json.loads((tmp_path / "stalls-s.json").read_text())["jobs"].keys() == {"b"}


def test_a_stall_of_any_length_is_seen_by_others_whose_clock_is_behind(tmp_path: Path, clock: Clock) -> None:
    open_slots(tmp_path, clock, "a", 9.0).take(1e9, 1.0)
    clock.now -= 60.0
    assert not open_slots(tmp_path, clock, "b", 9.0).take(60.0, 1.0)


def test_while_another_job_has_the_lock_a_job_asks_again(tmp_path: Path, clock: Clock) -> None:
    slots, other = open_slots(tmp_path, clock, "a", 1.0), open_slots(tmp_path, clock, "b", 9.0)
    slots.take(60.0, 1.0)
    fd = os.open(tmp_path / "stalls-s.json", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert [other.take(60.0, 1.0), slots.free()] == [False, False]
    os.close(fd)
    assert [slots.free(), other.take(60.0, 1.0)] == [True, True]


def test_what_cannot_be_written_is_named(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"json: the slots for evaluations and saves cannot be written: "):
        open_slots(tmp_path / "file", clock, "a", 1.0).take(60.0, 1.0)


def test_in_random_histories_no_more_jobs_stall_together_than_allowed(tmp_path: Path, clock: Clock) -> None:
    """Jobs of random sizes ask, stall, end and die at random; those that have to stall are not counted."""
    rng = random.Random(11)
    watts = {str(number): rng.choice([1.0, 2.0, 4.0, 7.0, 12.0]) for number in range(8)}
    stalls_until: dict[str, float] = {}
    num_grants = 0
    for _ in range(2000):
        clock.now += rng.choice([0.1, 1.0, 5.0])
        stalls_until = {name: until for name, until in stalls_until.items() if until > clock.now}
        name = rng.choice(list(watts))
        slots = open_slots(tmp_path, clock, name, watts[name])
        if name in stalls_until:
            if rng.random() < 0.7:  # else it has died, and its slot ends by itself
                slots.free()
                del stalls_until[name]
        elif slots.take(20.0, 1.0):
            num_grants += 1
            stalls_until[name] = clock.now + 20.0
        together_w = sum(watts[each] for each in stalls_until)
        assert together_w <= LIMIT_W or len(stalls_until) == 1
    assert num_grants > 100
