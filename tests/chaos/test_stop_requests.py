"""SIGTERM, SIGUSR1 and Ctrl-C: the run saves at the next step boundary, leaves with 75, and later goes on unharmed."""

import signal
from itertools import pairwise

import pytest

from phalanx.errors import ExitCode
from phalanx.run.event_types import EvaluationDone, RunEnded, RunWarning, StepDone
from phalanx.train.checkpoint.format import list_checkpoints, parse_step
from train_harness import (
    HarnessRun,
    TrainHarness,
    count_steps,
    list_live_workers,
    plan_fault,
    send_signal_at_step,
    wait_until,
    write_faults,
)

SLOW = plan_fault(1, "slow", delay=0.05, attempt=None)
"""Steps so slow that the agent hears of each before the next is done."""


def assert_stopped(ended: HarnessRun) -> int:
    """The run is saved at the step of its last event; returns that step."""
    assert (ended.code, ended.message) == (ExitCode.UNFINISHED, None)
    last = max(event.step for event in ended.events_of_kind(StepDone))
    assert ended.result["status"] == ended.events_of_kind(RunEnded)[-1].status == "interrupted"
    assert ended.result["steps"] == parse_step(list_checkpoints(ended.run.checkpoints)[0]) == last < 12
    return last


@pytest.mark.parametrize("nproc", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGUSR1, signal.SIGINT))],
)
def test_a_signal_to_the_agent_saves_and_stops(lab: TrainHarness, nproc: int, number: signal.Signals) -> None:
    ended = lab.train({}, nproc, faults=[SLOW], show=send_signal_at_step(3, number))
    assert assert_stopped(ended) <= 6
    assert [event for event in ended.events_of_kind(RunWarning) if "stopping" in event.text]
    assert lab.train({}, nproc, ended.run).digest == lab.train_reference({}, nproc).digest


@pytest.mark.parametrize("nproc", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_stopped_over_and_over_ends_in_the_same_weights(lab: TrainHarness, nproc: int) -> None:
    run, stops = lab.new_run(), []
    for step in (2, 5, 8):
        stops.append(assert_stopped(lab.train({}, nproc, run, faults=[SLOW], show=send_signal_at_step(step))))
    assert all(before < after for before, after in pairwise(stops))
    assert lab.train({}, nproc, run).digest == lab.train_reference({}, nproc).digest


@pytest.mark.parametrize(("nproc", "rank"), [(1, 0), (3, 2)])
def test_a_signal_to_one_worker_stops_all(lab: TrainHarness, nproc: int, rank: int) -> None:
    """As an engine does that signals every process of a job."""
    ended = lab.train({}, nproc, faults=[plan_fault(5, "term", ranks=[rank])])
    assert assert_stopped(ended) in (5, 6)
    assert lab.train({}, nproc, ended.run).digest == lab.train_reference({}, nproc).digest


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_signal_before_the_first_step_is_not_lost(lab: TrainHarness, nproc: int) -> None:
    ended = lab.train({}, nproc, faults=[plan_fault(0, "term", when="start", ranks=[0])])
    assert assert_stopped(ended) == 1
    assert lab.train({}, nproc, ended.run).digest == lab.train_reference({}, nproc).digest


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_signal_during_an_evaluation_does_not_wait_for_its_end(lab: TrainHarness, nproc: int) -> None:
    ended = lab.train({"task": "user_tasks:StopDuringEvaluationTask"}, nproc)
    assert assert_stopped(ended) in (5, 6)
    assert ended.events_of_kind(EvaluationDone) == []
    plain = lab.train_reference({"task": "user_tasks:NextByteTask"}, nproc)
    assert lab.train({"task": "user_tasks:StopDuringEvaluationTask"}, nproc, ended.run).digest == plain.digest


def test_a_second_signal_stops_workers_that_do_not_come_to_a_boundary(lab: TrainHarness) -> None:
    handler = send_signal_at_step(3)

    def show(event: dict[str, object]) -> None:
        handler(event)
        if isinstance(event, RunWarning):
            signal.raise_signal(signal.SIGINT)

    ended = lab.train({}, 2, faults=[SLOW, plan_fault(4, "block")], show=show)
    assert ended.code == ExitCode.UNFINISHED
    assert ended.result["status"] == "interrupted"
    assert list_live_workers(ended) == []
    assert lab.train({}, 2, ended.run).digest == lab.train_reference({}, 2).digest


def test_the_command_line_saves_on_sigterm_and_leaves_with_75(lab: TrainHarness) -> None:
    run = lab.new_run()
    with lab.start(
        "train", lab.recipe_file({"steps": 5000}, "long"), "--run", run.path, "--nproc-per-node", "2"
    ) as process:
        wait_until(lambda: count_steps(run) > 5)
        process.terminate()
        _, errors = process.communicate(timeout=90)
    assert process.returncode == ExitCode.UNFINISHED
    ended = lab.from_command_line(run, process.returncode)
    assert ended.result["status"] == "interrupted"
    step = ended.result["steps"]
    assert f"saved at step {step}; resume with: phalanx train" in errors
    assert "Traceback" not in errors
    assert parse_step(list_checkpoints(run.checkpoints)[0]) == step
    assert lab.processes() == set()


def test_ctrl_c_twice_stops_at_once_and_leaves_no_process(lab: TrainHarness) -> None:
    run = lab.new_run()
    write_faults(run, [plan_fault(1, "slow", delay=0.12), plan_fault(7, "block")])
    with lab.start("train", lab.recipe_file({}), "--run", run.path, "--nproc-per-node", "2") as process:
        wait_until(lambda: count_steps(run) >= 5)
        process.send_signal(signal.SIGINT)
        wait_until(
            lambda: [e for e in lab.from_command_line(run, 0).events_of_kind(RunWarning) if "stopping" in e.text]
        )
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)
    assert process.returncode == ExitCode.UNFINISHED
    assert "Traceback" not in errors
    assert lab.processes() == set()
