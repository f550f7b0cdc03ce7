"""The agent, the nursery or the store is killed: nothing outlives the run, and the next start ends in the same bits."""

import os
import signal
import subprocess
import time

import psutil
import pytest

from lab import Ended, Lab, Values, alive, fault, plan_faults, steps_seen, wait_until
from phalanx.errors import ExitCode
from phalanx.observe.history import read_history
from phalanx.observe.ledger import ledger_of
from phalanx.run import Event, Run
from phalanx.run.event_types import WorkerFailure, WorkerStarted


def train(lab: Lab, run: Run, faults: list[Values], nproc: int = 2) -> "subprocess.CompletedProcess[str]":
    plan_faults(run, faults)
    return lab.command("train", lab.recipe_file({}), "--run", run.path, "--nproc-per-node", str(nproc))


def gone(lab: Lab) -> bool:
    """Whether nothing of what this lab's command lines started lives any more."""
    return lab.processes() == set()


def pids(ended: Ended) -> list[int]:
    return [event.pid for event in ended.kind(WorkerStarted)]


@pytest.mark.parametrize(
    ("nproc", "step", "more"),
    [(2, 7, {}), pytest.param(1, 9, {"when": "within", "delay": 0.004}, marks=pytest.mark.slow)],
)
def test_a_killed_agent_takes_everything_with_it_and_the_next_start_ends_the_same(
    lab: Lab, nproc: int, step: int, more: Values
) -> None:
    run = lab.place()
    killed = train(lab, run, [fault(step, "kill-agent", ranks=[0], **more)], nproc)
    assert killed.returncode == -signal.SIGKILL
    wait_until(lambda: gone(lab) and not alive(lab.ended(run, 0)), 5, "all to end with their agent")
    again = train(lab, run, [], nproc)
    assert again.returncode == ExitCode.DONE, again.stderr
    ended = lab.ended(run, again.returncode)
    assert ended.digest == lab.reference({}, nproc).digest
    assert ended.digest in again.stderr
    assert gone(lab)


def test_nothing_outlives_a_run_whose_worker_crashed_nor_one_that_gave_up(lab: Lab) -> None:
    run = lab.place()
    crashed = train(lab, run, [fault(5, ranks=[1])])
    assert crashed.returncode == ExitCode.DONE, crashed.stderr
    assert gone(lab)
    ended = lab.ended(run, crashed.returncode)
    assert len(pids(ended)) == 4
    assert alive(ended) == []
    assert ended.digest == lab.reference({}, 2).digest


def test_a_killed_nursery_ends_the_run_with_a_message_and_it_can_be_started_again(lab: Lab) -> None:
    run = lab.place()
    plan_faults(run, [fault(1, "slow", delay=0.12), fault(7, "block")])
    with lab.start("train", lab.recipe_file({}), "--run", run.path, "--nproc-per-node", "2") as process:
        wait_until(lambda: steps_seen(run) >= 5)
        worker = psutil.Process(pids(lab.ended(run, 0))[0])
        os.kill(worker.ppid(), signal.SIGKILL)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == ExitCode.UNFINISHED
    assert "error: the process that forks workers died" in errors
    assert "Traceback" not in errors
    wait_until(lambda: gone(lab), 5)
    assert lab.train({}, 2, run).digest == lab.reference({}, 2).digest
    (loss,) = ledger_of(read_history(run.events)).losses
    assert loss.what == "rank 0: fork server died"
    assert loss.unavailable > 0
    assert loss.starting > 0


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_store_that_is_killed_while_workers_get_ready_costs_seconds(lab: Lab, attempt: int) -> None:
    killed: list[psutil.Process] = []

    def show(event: Event) -> None:
        if isinstance(event, WorkerStarted) and event.attempt == attempt and not killed:
            below = psutil.Process(lab.nursery.process.pid).children()
            killed.append(min(below, key=lambda child: child.pid))  # forked before the workers
            killed[0].kill()

    begun = time.monotonic()
    ended = lab.train({}, 2, faults=[fault(7, ranks=[1])], show=show)
    assert killed
    assert ended.digest == lab.reference({}, 2).digest
    assert {event.what for event in ended.kind(WorkerFailure)} <= {"SIGKILL", "store died", "peer disconnected"}
    assert time.monotonic() - begun < 30


def test_a_nursery_that_is_killed_before_the_first_step_ends_the_command_with_75(lab: Lab) -> None:
    run = lab.place()
    with lab.start("train", lab.recipe_file({}), "--run", run.path) as process:
        wait_until(lambda: len(psutil.Process(process.pid).children()) > 0)
        psutil.Process(process.pid).children()[0].kill()
        _, errors = process.communicate(timeout=20)
    assert process.returncode == ExitCode.UNFINISHED, errors
    assert "was killed by SIGKILL" in errors
    assert "Traceback" not in errors


def test_workers_end_between_runs_of_one_nursery(lab: Lab) -> None:
    """Also that several runs of several workers can share one: their meetings do not mix."""
    for nproc in (2, 3, 2):
        ended = lab.train({}, nproc, faults=[fault(3, ranks=[0])])
        assert ended.code == ExitCode.DONE
        assert alive(ended) == []
