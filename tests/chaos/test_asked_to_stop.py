"""SIGTERM, SIGUSR1 and Ctrl-C: the run saves at the next step boundary, leaves with 75, and later goes on unharmed."""

import signal
from itertools import pairwise

import pytest

from lab import Ended, Lab, alive, fault, plan_faults, signal_at, steps_seen, wait_until
from phalanx.errors import ExitCode
from phalanx.run.event_types import EvaluationDone, RunEnded, RunWarning, StepDone
from phalanx.train.checkpoint import list_checkpoints, step_of

SLOW = fault(1, "slow", delay=0.05, attempt=None)
"""Steps so slow that the agent hears of each before the next is done."""


def assert_stopped(ended: Ended) -> int:
    """The run is saved at the step of its last event; returns that step."""
    assert (ended.code, ended.message) == (ExitCode.UNFINISHED, None)
    last = max(event.step for event in ended.kind(StepDone))
    assert ended.result["status"] == ended.kind(RunEnded)[-1].status == "interrupted"
    assert ended.result["steps"] == step_of(list_checkpoints(ended.run.checkpoints)[0]) == last < 12
    return last


@pytest.mark.parametrize("nproc", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGUSR1, signal.SIGINT))],
)
def test_a_signal_to_the_agent_saves_and_stops(lab: Lab, nproc: int, number: signal.Signals) -> None:
    ended = lab.train({}, nproc, faults=[SLOW], show=signal_at(3, number))
    assert assert_stopped(ended) <= 6
    assert [event for event in ended.kind(RunWarning) if "stopping" in event.text]
    assert lab.train({}, nproc, ended.run).digest == lab.reference({}, nproc).digest


@pytest.mark.parametrize("nproc", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_stopped_over_and_over_ends_in_the_same_weights(lab: Lab, nproc: int) -> None:
    run, stops = lab.place(), []
    for step in (2, 5, 8):
        stops.append(assert_stopped(lab.train({}, nproc, run, faults=[SLOW], show=signal_at(step))))
    assert all(before < after for before, after in pairwise(stops))
    assert lab.train({}, nproc, run).digest == lab.reference({}, nproc).digest


@pytest.mark.parametrize(("nproc", "rank"), [(1, 0), (3, 2)])
def test_a_signal_to_one_worker_stops_all(lab: Lab, nproc: int, rank: int) -> None:
    """As an engine does that signals every process of a job."""
    ended = lab.train({}, nproc, faults=[fault(5, "term", ranks=[rank])])
    assert assert_stopped(ended) in (5, 6)
    assert lab.train({}, nproc, ended.run).digest == lab.reference({}, nproc).digest


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_signal_before_the_first_step_is_not_lost(lab: Lab, nproc: int) -> None:
    ended = lab.train({}, nproc, faults=[fault(0, "term", when="start", ranks=[0])])
    assert assert_stopped(ended) == 1
    assert lab.train({}, nproc, ended.run).digest == lab.reference({}, nproc).digest


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_signal_during_an_evaluation_does_not_wait_for_its_end(lab: Lab, nproc: int) -> None:
    ended = lab.train({"task": "lab_tasks:StopsInEvaluation"}, nproc)
    assert assert_stopped(ended) in (5, 6)
    assert ended.kind(EvaluationDone) == []
    plain = lab.reference({"task": "lab_tasks:Plain"}, nproc)
    assert lab.train({"task": "lab_tasks:StopsInEvaluation"}, nproc, ended.run).digest == plain.digest


def test_a_second_signal_stops_workers_that_do_not_come_to_a_boundary(lab: Lab) -> None:
    handler = signal_at(3)

    def show(event: dict[str, object]) -> None:
        handler(event)
        if isinstance(event, RunWarning):
            signal.raise_signal(signal.SIGINT)

    ended = lab.train({}, 2, faults=[SLOW, fault(4, "block")], show=show)
    assert ended.code == ExitCode.UNFINISHED
    assert ended.result["status"] == "interrupted"
    assert alive(ended) == []
    assert lab.train({}, 2, ended.run).digest == lab.reference({}, 2).digest


def test_the_command_line_saves_on_sigterm_and_leaves_with_75(lab: Lab) -> None:
    run = lab.place()
    with lab.start(
        "train", lab.recipe_file({"steps": 5000}, "long"), "--run", run.path, "--nproc-per-node", "2"
    ) as process:
        wait_until(lambda: steps_seen(run) > 5)
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == ExitCode.UNFINISHED
    ended = lab.ended(run, process.returncode)
    assert ended.result["status"] == "interrupted"
    step = ended.result["steps"]
    assert f"saved at step {step}; go on with: phalanx train" in errors
    assert "Traceback" not in errors
    assert step_of(list_checkpoints(run.checkpoints)[0]) == step
    assert lab.processes() == set()


def test_ctrl_c_twice_stops_at_once_and_leaves_no_process(lab: Lab) -> None:
    run = lab.place()
    plan_faults(run, [fault(1, "slow", delay=0.12), fault(7, "block")])
    with lab.start("train", lab.recipe_file({}), "--run", run.path, "--nproc-per-node", "2") as process:
        wait_until(lambda: steps_seen(run) >= 5)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: [e for e in lab.ended(run, 0).kind(RunWarning) if "stopping" in e.text])
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)
    assert process.returncode == ExitCode.UNFINISHED
    assert "Traceback" not in errors
    assert lab.processes() == set()
