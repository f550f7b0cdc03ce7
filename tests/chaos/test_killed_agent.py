"""The agent, the fork server or the store is killed: nothing outlives the run; the next start has the same bits."""

import os
import signal
import subprocess
import time

import psutil
import pytest

from phalanx.errors import ExitCode
from phalanx.observe.goodput import compute_device_time
from phalanx.observe.history import read_history
from phalanx.run import Event, Run
from phalanx.run.event_types import WorkerFailure, WorkerStarted
from train_harness import (
    HarnessRun,
    TrainHarness,
    Values,
    count_steps,
    list_live_workers,
    plan_fault,
    wait_until,
    write_faults,
)


def train(lab: TrainHarness, run: Run, faults: list[Values], nproc: int = 2) -> "subprocess.CompletedProcess[str]":
    write_faults(run, faults)
    return lab.command("train", lab.recipe_file({}), "--run", run.path, "--nproc-per-node", str(nproc))


def gone(lab: TrainHarness) -> bool:
    """Whether nothing of what this lab's command lines started lives any more."""
    return lab.processes() == set()


def pids(ended: HarnessRun) -> list[int]:
    return [event.pid for event in ended.events_of_kind(WorkerStarted)]


@pytest.mark.parametrize(
    ("nproc", "step", "more"),
    [(2, 7, {}), pytest.param(1, 9, {"when": "within", "delay": 0.004}, marks=pytest.mark.slow)],
)
def test_a_killed_agent_takes_everything_with_it_and_the_next_start_ends_the_same(
    lab: TrainHarness, nproc: int, step: int, more: Values
) -> None:
    run = lab.new_run()
    killed = train(lab, run, [plan_fault(step, "kill-agent", ranks=[0], **more)], nproc)
    assert killed.returncode == -signal.SIGKILL
    wait_until(
        lambda: gone(lab) and not list_live_workers(lab.from_command_line(run, 0)), 5, "all to end with their agent"
    )
    again = train(lab, run, [], nproc)
    assert again.returncode == ExitCode.DONE, again.stderr
    ended = lab.from_command_line(run, again.returncode)
    assert ended.digest == lab.train_reference({}, nproc).digest
    assert ended.digest in again.stderr
    assert gone(lab)


def test_nothing_outlives_a_run_whose_worker_crashed_nor_one_that_gave_up(lab: TrainHarness) -> None:
    run = lab.new_run()
    crashed = train(lab, run, [plan_fault(5, ranks=[1])])
    assert crashed.returncode == ExitCode.DONE, crashed.stderr
    assert gone(lab)
    ended = lab.from_command_line(run, crashed.returncode)
    assert len(pids(ended)) == 4
    assert list_live_workers(ended) == []
    assert ended.digest == lab.train_reference({}, 2).digest


def test_a_killed_fork_server_ends_the_run_with_a_message_and_it_can_be_started_again(lab: TrainHarness) -> None:
    run = lab.new_run()
    write_faults(run, [plan_fault(1, "slow", delay=0.12), plan_fault(7, "block")])
    with lab.start("train", lab.recipe_file({}), "--run", run.path, "--nproc-per-node", "2") as process:
        wait_until(lambda: count_steps(run) >= 5)
        worker = psutil.Process(pids(lab.from_command_line(run, 0))[0])
        os.kill(worker.ppid(), signal.SIGKILL)
        _, errors = process.communicate(timeout=90)
    assert process.returncode == ExitCode.UNFINISHED
    assert "error: the process that forks workers died" in errors
    assert "Traceback" not in errors
    wait_until(lambda: gone(lab), 5)
    assert lab.train({}, 2, run).digest == lab.train_reference({}, 2).digest
    (loss,) = compute_device_time(read_history(run.events)).failure_costs
    assert loss.description == "rank 0: fork server died"
    assert loss.unavailable_s > 0
    assert loss.startup_s > 0


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_store_that_is_killed_while_workers_get_ready_costs_seconds(lab: TrainHarness, attempt: int) -> None:
    killed: list[psutil.Process] = []

    def show(event: Event) -> None:
        if isinstance(event, WorkerStarted) and event.attempt == attempt and not killed:
            below = psutil.Process(lab.fork_server.process.pid).children()
            killed.append(min(below, key=lambda child: child.pid))  # forked before the workers
            killed[0].kill()

    begun = time.monotonic()
    ended = lab.train({}, 2, faults=[plan_fault(7, ranks=[1])], show=show)
    assert killed
    assert ended.digest == lab.train_reference({}, 2).digest
    assert {event.what for event in ended.events_of_kind(WorkerFailure)} <= {
        "SIGKILL",
        "store died",
        "peer disconnected",
    }
    assert time.monotonic() - begun < 30


def test_a_fork_server_that_is_killed_before_the_first_step_ends_the_command_with_75(lab: TrainHarness) -> None:
    run = lab.new_run()
    with lab.start("train", lab.recipe_file({}), "--run", run.path) as process:
        wait_until(lambda: len(psutil.Process(process.pid).children()) > 0)
        psutil.Process(process.pid).children()[0].kill()
        _, errors = process.communicate(timeout=90)
    assert process.returncode == ExitCode.UNFINISHED, errors
    assert "was killed by SIGKILL" in errors
    assert "Traceback" not in errors


def test_workers_end_between_runs_of_one_fork_server(lab: TrainHarness) -> None:
    """Also that several runs of several workers can share one: their meetings do not mix."""
    for nproc in (2, 3, 2):
        ended = lab.train({}, nproc, faults=[plan_fault(3, ranks=[0])])
        assert ended.code == ExitCode.DONE
        assert list_live_workers(ended) == []
