"""Workers that hang: who, where and in what is told in seconds, and the run ends in the weights it would have had."""

import signal
import time

import pytest

from phalanx.errors import ExitCode
from phalanx.jobs.agent.hang_detection import MIN_SILENCE_S
from phalanx.run import Event
from phalanx.run.event_types import HangDetected, StragglerDetected, WorkerFailure
from train_harness import TrainHarness, plan_fault


@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_worker_that_is_held_still_is_started_again(lab: TrainHarness, nproc: int) -> None:
    ended = lab.train({}, nproc, faults=[plan_fault(6, "freeze", ranks=[nproc - 1])])
    assert ended.digest == lab.train_reference({}, nproc).digest
    (hang,) = ended.events_of_kind(HangDetected)
    assert (hang.rank, hang.is_stopped, hang.stack) == (nproc - 1, True, None)
    assert hang.silence_s < 2 * MIN_SILENCE_S
    (told,) = ended.events_of_kind(WorkerFailure)
    assert (told.rank, told.what) == (nproc - 1, "hang")
    assert ended.result["num_restarts"] == 1


def test_a_worker_that_is_held_still_after_the_others_have_ended_is_not_waited_for(lab: TrainHarness) -> None:
    ended = lab.train({}, 2, faults=[plan_fault(0, "freeze", ranks=[1], when="end")])
    assert ended.digest == lab.train_reference({}, 2).digest
    assert (ended.code, ended.result["num_restarts"]) == (ExitCode.DONE, 1)
    assert ended.events_of_kind(HangDetected)[0].rank == 1


def test_a_worker_that_waits_for_ever_is_told_with_its_stack_and_started_again(lab: TrainHarness) -> None:
    changes = {"fault_tolerance": {"hang_timeout_s": 7.5}}
    ended = lab.train(changes, 2, faults=[plan_fault(6, "block", ranks=[1])])
    assert ended.digest == lab.train_reference({}, 2).digest
    (hang,) = ended.events_of_kind(HangDetected)
    assert (hang.rank, hang.is_stopped) == (1, False)
    assert hang.silence_s < 2 * MIN_SILENCE_S
    assert "in inject" in hang.stack
    assert "faults.py" in hang.stack
    assert ended.events_of_kind(WorkerFailure)[0].what == "hang"


def test_workers_in_different_collectives_are_started_again_in_seconds(lab: TrainHarness) -> None:
    started = time.monotonic()
    ended = lab.train({}, 2, faults=[plan_fault(6, "lone-collective", ranks=[0])])
    assert ended.digest == lab.train_reference({}, 2).digest
    (hang,) = ended.events_of_kind(HangDetected)
    assert "deadlock" in hang.phase
    assert "faults.py" in hang.stack
    assert "worker 0:" in hang.stack
    assert "worker 1:" in hang.stack
    (told,) = ended.events_of_kind(WorkerFailure)
    assert "broadcast" in told.message
    assert time.monotonic() - started < 60  # and not hang_timeout_s, which is 600


def test_a_run_that_hangs_obeys_a_stop_request(lab: TrainHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.jobs.agent.heartbeat_checks.STOP_TIMEOUT_S", 2.0)

    def stop(event: Event) -> None:
        if isinstance(event, HangDetected):
            signal.raise_signal(signal.SIGTERM)

    ended = lab.train({}, 2, faults=[plan_fault(6, "block", ranks=[1])], show=stop)
    assert ended.code == ExitCode.UNFINISHED
    assert "asked to stop" in (ended.message or "")
    assert lab.train({}, 2, ended.run).digest == lab.train_reference({}, 2).digest


@pytest.mark.slow
def test_a_run_that_is_alone_is_watched_too(lab: TrainHarness) -> None:
    ended = lab.train({"fault_tolerance": {"hang_timeout_s": 7.5}}, 1, faults=[plan_fault(6, "block")])
    assert ended.digest == lab.train_reference({}, 1).digest
    assert len(ended.events_of_kind(HangDetected)) == 1


@pytest.mark.slow
def test_a_worker_that_is_only_slow_is_left_alone(lab: TrainHarness) -> None:
    ended = lab.train({"steps": 8}, 2, faults=[plan_fault(7, "slow", ranks=[0], delay=3.0)])
    assert ended.events_of_kind(HangDetected) == []
    assert ended.result["num_restarts"] == 0


@pytest.mark.slow
def test_a_worker_that_is_slower_than_its_peers_is_named_once(
    lab: TrainHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.jobs.agent.heartbeat_checks.WINDOW_S", 0.5)
    model = {"build": "user_models:slow_on_one", "args": {"rank": 1}}
    ended = lab.train({"model": model, "steps": 40}, 2)
    (found,) = ended.events_of_kind(StragglerDetected)
    assert found.rank == 1
    assert found.slowdown > 1.25
    assert 0.05 < found.wait_s_per_step < 1.0  # six micro-batches of 30 ms a step, less what the machine makes of it
    assert 0.1 < found.wait_fraction <= 1.0
