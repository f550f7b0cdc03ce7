"""Worlds that train in bouts: held still, going on, failing. Two nurseries, which this file starts once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from phalanx.jobs.agent.fork_server_client import ForkServerClient
from phalanx.jobs.agent.pausable_workers import PausableWorkers, WorkersFailedError, data_wait_share
from phalanx.run import Run
from phalanx.run.process_messages import Command


@pytest.fixture(scope="module")
def nurseries() -> Iterator[list[ForkServerClient]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[3] / "helpers"))
        first, second = ForkServerClient(), ForkServerClient()
    with first, second:
        yield [first, second]


def make(
    nursery: ForkServerClient, folder: Path, function: str = "steps", workers: int = 1, **payload: Any
) -> PausableWorkers:
    run = Run(folder)
    run.create()
    given = {"folder": str(folder), "seconds": 0.01, **payload}
    command = Command(function=f"pausable_worker_calls:{function}", payload=given)
    return PausableWorkers(nursery, run, workers, command, timeout_s=payload.get("patience", 60.0))


def done(folder: Path, rank: int = 0) -> int:
    return len((folder / f"count-{rank}").read_text())


def test_a_world_stands_still_between_its_bouts(nurseries: list[ForkServerClient], tmp_path: Path) -> None:
    one, other = (make(nursery, tmp_path / str(number)) for number, nursery in enumerate(nurseries))
    try:
        one.run_for(0.05)
        before = done(tmp_path / "0")
        assert len(other.run_for(0.2)) >= 3
        assert done(tmp_path / "0") <= before + 1  # the step in which the signal came
        assert len(one.run_for(0.05, min_steps=5)) >= 5
        assert done(tmp_path / "0") > before
    finally:
        one.close()
        other.close()


def test_events_of_whole_steps_are_returned(nurseries: list[ForkServerClient], tmp_path: Path) -> None:
    world = make(nurseries[0], tmp_path)
    try:
        events = world.run_for(0.1)
    finally:
        world.close()
    assert {step.duration_s for step in events} == {0.01}
    assert data_wait_share(events) == pytest.approx(0.25)


def test_a_closed_world_leaves_no_process_and_can_start_again(
    nurseries: list[ForkServerClient], tmp_path: Path
) -> None:
    world = make(nurseries[0], tmp_path, workers=2)
    for _ in range(2):
        assert world.run_for(0.02)
        world.close()
        nursery = psutil.Process(nurseries[0].process.pid)
        # the store of worlds of several stays with its nursery
        assert len([child for child in nursery.children() if child.status() != psutil.STATUS_ZOMBIE]) <= 1
    assert len(world.startup_seconds) == 2


def test_a_worker_that_is_killed_ends_the_world_with_the_reason(
    nurseries: list[ForkServerClient], tmp_path: Path
) -> None:
    world = make(nurseries[0], tmp_path, workers=2, fall=5)
    with pytest.raises(WorkersFailedError, match=r"was killed by SIGKILL .*memory"):
        world.run_for(5.0)
    assert not world.is_running


def test_a_users_mistake_is_told_as_the_worker_tells_it(nurseries: list[ForkServerClient], tmp_path: Path) -> None:
    with pytest.raises(WorkersFailedError, match=r"^model\.build: no such thing$"):
        make(nurseries[0], tmp_path, "refuse").start()


def test_any_other_mistake_is_told_with_its_last_line(nurseries: list[ForkServerClient], tmp_path: Path) -> None:
    with pytest.raises(WorkersFailedError, match="LookupError: not compiled"):
        make(nurseries[0], tmp_path, "fail").start()


def test_a_world_that_does_not_get_going_is_given_up(nurseries: list[ForkServerClient], tmp_path: Path) -> None:
    with pytest.raises(WorkersFailedError, match="took longer than 0 s"):
        make(nurseries[0], tmp_path, "hang", patience=0.3).start()
    world = make(nurseries[0], tmp_path)
    assert world.run_for(0.02)  # the nursery is free again
    world.close()
