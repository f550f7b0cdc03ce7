"""Workers of trials: measured, killed, started again, failing; by the fork server of the lab."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from phalanx.jobs.agent.fork_server_client import ForkServerClient
from phalanx.jobs.agent.trial_workers import NUM_WARMUP_STEPS, TrialWorkers, WorkersFailedError
from phalanx.run import Run
from phalanx.run.process_messages import Command
from train_harness import TrainHarness


@pytest.fixture
def fork_server(lab: TrainHarness) -> ForkServerClient:
    return lab.fork_server


def make(folder: Path, function: str = "steps", num_workers: int = 1, **payload: Any) -> TrialWorkers:
    run = Run(folder)
    run.create()
    payload = {"folder": str(folder), "seconds": 0.01, **payload}
    command = Command(function=f"trial_worker_calls:{function}", payload=payload)
    return TrialWorkers(run.logs, num_workers, command, timeout_s=payload.get("timeout_s", 60.0))


def test_events_of_whole_steps_are_returned(fork_server: ForkServerClient, tmp_path: Path) -> None:
    workers = make(tmp_path)
    workers.start(fork_server)
    try:
        steps = workers.measure_steps(0.1)
        more_steps = workers.measure_steps(0.0, min_steps=5)
    finally:
        workers.close()
    assert steps[0].step > NUM_WARMUP_STEPS
    assert {step.duration_s for step in steps} == {0.01}
    assert len(more_steps) >= 5
    assert more_steps[0].step > steps[-1].step


def test_closed_workers_leave_no_process_and_can_start_again(fork_server: ForkServerClient, tmp_path: Path) -> None:
    workers = make(tmp_path, num_workers=2)
    for _ in range(2):
        workers.start(fork_server)
        assert workers.measure_steps(0.02)
        workers.close()
        children = psutil.Process(fork_server.process.pid).children()
        # the store of several workers stays with the fork server
        assert len([child for child in children if child.status() != psutil.STATUS_ZOMBIE]) <= 1
    assert len(workers.startup_seconds) == 2


def test_a_worker_that_is_killed_ends_the_measurement_with_the_reason(
    fork_server: ForkServerClient, tmp_path: Path
) -> None:
    workers = make(tmp_path, num_workers=2, last_step=NUM_WARMUP_STEPS + 2)
    workers.start(fork_server)
    with pytest.raises(WorkersFailedError, match=r"was killed by SIGKILL .*memory"):
        workers.measure_steps(5.0)
    assert not workers.is_running


def test_a_mistake_in_the_recipe_is_reported_as_the_worker_reports_it(
    fork_server: ForkServerClient, tmp_path: Path
) -> None:
    with pytest.raises(WorkersFailedError, match=r"^model\.build: no such thing$"):
        make(tmp_path, "refuse").start(fork_server)


def test_workers_that_do_not_train_in_time_are_killed(fork_server: ForkServerClient, tmp_path: Path) -> None:
    with pytest.raises(WorkersFailedError, match="took longer than 0 s"):
        make(tmp_path, "hang", timeout_s=0.3).start(fork_server)
    workers = make(tmp_path)
    workers.start(fork_server)  # the fork server is free again
    assert workers.measure_steps(0.02)
    workers.close()
