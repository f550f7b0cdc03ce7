"""Which collectives of ranks count as different, and what a worker reports of its own."""

import sys
from types import FrameType

import pytest

from phalanx.train.distributed.collective_trace import Collective, count_issued, find_difference, is_in_collective

PAIR = [0, 1]


def test_ranks_that_issue_the_same_collectives_do_not_differ() -> None:
    own = {"0": (PAIR, {"1": "all_reduce of 4 Float", "2": "barrier"})}
    assert find_difference([own, own]) is None


def test_the_first_collective_that_differs_is_named_with_both_workers() -> None:
    first = {"0": (PAIR, {"9": "all_reduce of 4 Float", "10": "all_gather of 8 Float"})}
    second = {"0": (PAIR, {"9": "all_reduce of 4 Float", "10": "all_gather of 4 Float"})}
    assert find_difference([first, second]) == (
        "collective 10 of the process group of ranks 0, 1 is all_gather of 8 Float on worker 0 and "
        "all_gather of 4 Float on worker 1"
    )


def test_what_a_thread_of_one_rank_has_not_issued_yet_is_no_difference() -> None:
    assert find_difference([{"0": (PAIR, {"1": "barrier", "2": "barrier"})}, {"0": (PAIR, {"1": "barrier"})}]) is None


def test_groups_of_one_name_on_other_ranks_are_not_compared() -> None:
    one, other = {"5": ([0], {"1": "barrier"})}, {"5": ([1], {"1": "all_reduce of 1 Float"})}
    assert find_difference([one, other]) is None


@pytest.mark.parametrize(("first_record", "expected"), [(3, {"a of 0, 1": 7, "b of 0, 2": 0}), (12, {"a of 0, 1": 7})])
def test_of_a_group_that_the_ring_may_have_lost_nothing_is_said(first_record: int, expected: dict[str, int]) -> None:
    seen = [Collective("a", number, "barrier", False, 1, first_record + number) for number in (0, 7)]
    assert count_issued(seen, {"a": (0, 1), "b": (0, 2)}, first_record=3) == expected


def test_a_computation_is_no_wait() -> None:
    frame = sys._getframe()
    assert not is_in_collective(frame)
    assert is_in_collective(_Work().wait())  # by the line that this frame is at


class _Work:
    def wait(self) -> FrameType:
        caller = sys._getframe().f_back
        assert caller is not None
        return caller
