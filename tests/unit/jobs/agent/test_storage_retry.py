"""Storage that fails is waited for: until it can be used, not without end, and not without a word."""

import os
from collections.abc import Callable
from itertools import pairwise

import pytest

from phalanx.jobs.agent.leader_agent import (
    MAX_DELAY_S,
    MAX_OUTAGE_S,
    MIN_DELAY_S,
    StorageBackoff,
    find_storage_problem,
)
from phalanx.run import Event, Run
from phalanx.run.event_types import RunWarning


class Waiting:
    """A clock that goes on while somebody rests, and what happens then."""

    def __init__(self, act: Callable[[float], bool] = lambda now: False):
        self.now, self.said, self._act = 0.0, list[str](), act

    def rest(self, seconds: float) -> bool:
        self.now += seconds
        return self._act(self.now)

    def outlast(self, outage: StorageBackoff, run: Run) -> str | None:
        return outage.wait_until_usable(run, lambda: self.now, self.rest, self.emit)

    def emit(self, event: Event) -> None:
        assert isinstance(event, RunWarning)
        self.said.append(event.text)


@pytest.fixture
def lost(run: Run) -> Run:
    """A run whose checkpoints cannot be reached."""
    run.checkpoints.rmdir()
    run.checkpoints.symlink_to(run.checkpoints)
    return run


def test_what_is_wrong_is_told_with_the_place(lost: Run) -> None:
    assert find_storage_problem(lost) == f"{lost.checkpoints}: Too many levels of symbolic links"
    lost.checkpoints.unlink()
    assert find_storage_problem(lost) == f"{lost.checkpoints}: No such file or directory"


def test_storage_that_takes_a_file_and_does_not_keep_it_is_in_trouble(run: Run) -> None:
    def refuse(fd: int) -> None:
        raise OSError(5, "Input/output error")

    assert find_storage_problem(run, refuse) == "Input/output error"
    assert os.listdir(run.checkpoints) == []


def test_each_attempt_waits_longer_than_the_one_before_it_up_to_a_limit(run: Run) -> None:
    outage, waiting, begun = StorageBackoff(0.0), Waiting(), [0.0]
    for _ in range(7):
        assert waiting.outlast(outage, run) is None
        begun.append(waiting.now)
    pauses = [after - before for before, after in pairwise(begun)]
    assert pauses == [min(MAX_DELAY_S, MIN_DELAY_S * 2**i) for i in range(7)]
    assert waiting.said == []


def test_it_ends_when_storage_is_back_and_is_told_once(lost: Run) -> None:
    def mend(now: float) -> bool:
        if now == 20.0:
            lost.checkpoints.unlink()
            lost.checkpoints.mkdir()
        return False

    waiting = Waiting(mend)
    assert waiting.outlast(StorageBackoff(0.0), lost) is None
    assert waiting.now == 20.0
    assert waiting.said == [f"waiting for storage: {lost.checkpoints}: Too many levels of symbolic links"]


def test_it_does_not_wait_without_end(lost: Run) -> None:
    waiting = Waiting()
    assert "storage has failed for 600 s" in str(waiting.outlast(StorageBackoff(0.0), lost))
    assert MAX_OUTAGE_S < waiting.now < MAX_OUTAGE_S + 10.0


def test_who_is_to_stop_does_not_wait(lost: Run) -> None:
    waiting = Waiting(lambda now: True)
    assert waiting.outlast(StorageBackoff(0.0), lost) == "asked to stop while storage failed"
