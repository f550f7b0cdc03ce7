"""Telling who is stuck from who is slow, from signs of life alone."""

import pytest

from phalanx.jobs.watch import HEARTBEAT, NEXT, PREPARING, heartbeat, stuck
from phalanx.run.pulse import PLACES, Beat

NOW = 1000.0


def beat(count: int = 50, *, ago: float = 30.0, place: str = "forward", step: int = 9) -> Beat:
    return Beat(pid=1, count=count, step=step, place=place, t=NOW - ago)


def test_workers_that_gave_a_sign_a_moment_ago_are_well() -> None:
    assert stuck({0: beat(ago=60), 1: beat(ago=HEARTBEAT - 0.1)}, NOW, 0.1, ()) is None


def test_the_one_that_gave_the_fewest_signs_is_waited_for() -> None:
    found = stuck({0: beat(51), 1: beat(49, place="data"), 2: beat(51)}, NOW, 0.1, ())
    assert found is not None
    assert (found.rank, found.step, found.doing, found.certain) == (1, 9, "forward", False)
    assert found.silent == pytest.approx(30.0)


def test_of_equals_the_one_that_is_held_still_is_waited_for() -> None:
    found = stuck({0: beat(ago=40), 1: beat(ago=30), 2: beat(ago=35)}, NOW, 0.1, {1})
    assert found is not None
    assert (found.rank, found.stopped, found.certain) == (1, True, True)


def test_one_that_is_held_still_is_to_blame_whatever_the_others_have_counted() -> None:
    found = stuck({0: beat(48), 1: beat(50)}, NOW, 0.1, {1})
    assert found is not None
    assert (found.rank, found.certain) == (1, True)


def test_when_all_are_held_still_somebody_means_it() -> None:
    found = stuck({0: beat(), 1: beat()}, NOW, 0.1, {0, 1})
    assert found is not None
    assert not found.certain


def test_the_last_worker_is_stuck_when_it_is_held_still_after_the_others_have_ended() -> None:
    found = stuck({1: beat(place="ending")}, NOW, 0.1, {1}, others_ended=True)
    assert found is not None
    assert (found.rank, found.certain) == (1, True)


@pytest.mark.parametrize("usual", [None, 0.1, 1.0])
def test_short_steps_are_allowed_a_heartbeat(usual: float | None) -> None:
    assert heartbeat(usual) == HEARTBEAT


def test_long_steps_are_allowed_more() -> None:
    assert stuck({0: beat(ago=30)}, NOW, 10.0, ()) is None
    assert stuck({0: beat(ago=51)}, NOW, 10.0, ()) is not None


@pytest.mark.parametrize("place", sorted(PREPARING))
def test_compiling_and_loading_may_take_minutes_in_silence(place: str) -> None:
    assert stuck({0: beat(ago=500, place=place)}, NOW, None, ()) is None


def test_a_worker_that_is_held_still_while_it_prepares_is_stuck_all_the_same() -> None:
    found = stuck({0: beat(3, place="starting"), 1: beat(3, place="starting")}, NOW, None, {0})
    assert found is not None
    assert (found.rank, found.certain) == (0, True)


def test_all_that_are_held_still_while_they_prepare_are_reported_and_may_be_meant_to_be() -> None:
    found = stuck({0: beat(3, place="starting")}, NOW, None, {0})
    assert found is not None
    assert (found.stopped, found.certain) == (True, False)


def test_before_all_have_begun_nothing_is_said() -> None:
    assert stuck({0: beat(), 1: None}, NOW, 0.1, ()) is None
    assert stuck({}, NOW, 0.1, ()) is None


def test_slow_storage_is_named_where_it_may_be_the_cause() -> None:
    waiting, computing = (stuck({0: beat(place=place)}, NOW, 0.1, ()) for place in ("checkpoint", "data"))
    assert waiting is not None
    assert "slow storage" in waiting.doing
    assert computing is not None
    assert "slow storage" not in computing.doing


def test_every_place_of_a_step_is_followed_by_something() -> None:
    assert set(NEXT) | PREPARING == set(PLACES)


def test_it_is_told_in_words() -> None:
    found = stuck({0: beat(51), 1: beat(49, ago=12.4)}, NOW, 0.1, {1})
    assert found is not None
    assert found.words == "worker 1 is held still by a signal for 12 s, in step 9, doing: backward"


def test_the_first_step_may_take_as_long_as_it_likes() -> None:
    assert stuck({0: beat(ago=300, step=1)}, NOW, None, ()) is None


def test_who_was_suspected_stays_so_while_nobody_is_further_back() -> None:
    beats = {0: beat(50, ago=30.0), 1: beat(50, ago=30.001), 2: beat(51)}
    for suspect, expected in ((None, 1), (0, 0), (2, 1)):
        found = stuck(beats, NOW, 0.1, (), suspect)
        assert found is not None
        assert found.rank == expected
