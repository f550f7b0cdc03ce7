"""`phalanx train --on slurm` on a real Slurm: the same run as on one machine, whatever happens to its nodes."""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.errors import ExitCode
from phalanx.jobs.backends.slurm.backend import SlurmBackend
from phalanx.run import Run
from phalanx.run.event_types import AttemptStarted, RunEnded, StepDone, WorkerStarted
from slurm_cluster import SlurmCluster
from train_harness import HarnessRun, TrainHarness, Values, count_steps, plan_fault, wait_until, write_faults


@pytest.fixture
def run(lab: TrainHarness) -> Run:
    return lab.new_run()


@pytest.fixture
def variables(lab: TrainHarness, tmp_path: Path) -> dict[str, str]:
    return {**os.environ, **lab.variables(), "PHALANX_STATE_DIR": str(tmp_path / "state"), "COLUMNS": "200"}


@pytest.fixture
def started(rig: SlurmCluster, variables: dict[str, str]) -> Iterator[list["subprocess.Popen[str]"]]:
    """Command lines on the login node, which do not outlive the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
    rig.run(["scancel", "--user=root"])


def train(
    rig: SlurmCluster,
    lab: TrainHarness,
    run: Run,
    variables: dict[str, str],
    started: list["subprocess.Popen[str]"],
    changes: Values,
    *more: str,
) -> "subprocess.Popen[str]":
    words = ["train", str(lab.recipe_file(changes)), "--run", str(run.path), "--nproc-per-node", "1", "--on", "slurm"]
    command = rig.inside([sys.executable, "-m", "phalanx", *words, "--nodes", "2", *more])
    pipe = subprocess.PIPE
    started.append(subprocess.Popen(command, env=variables, stdout=pipe, stderr=pipe, text=True))
    return started[-1]


def ended(process: "subprocess.Popen[str]", run: Run, seconds: float) -> HarnessRun:
    _, said = process.communicate(timeout=seconds)
    return HarnessRun(run, process.returncode, said)


def test_two_nodes_of_slurm_end_in_the_digest_of_one_machine(
    rig: SlurmCluster, lab: TrainHarness, run: Run, variables: dict[str, str], started: list["subprocess.Popen[str]"]
) -> None:
    found = ended(train(rig, lab, run, variables, started, {}), run, 90)
    assert found.code == ExitCode.DONE, found.message
    assert found.digest == lab.train_reference({}, 2).digest
    assert found.message is not None
    assert found.digest in found.message
    assert {event.host for event in found.events_of_kind(WorkerStarted)} == {"n1", "n2"}


def test_a_copy_of_the_recipes_folder_ends_in_the_same_digest(
    rig: SlurmCluster, lab: TrainHarness, run: Run, variables: dict[str, str], started: list["subprocess.Popen[str]"]
) -> None:
    found = ended(train(rig, lab, run, variables, started, {}, "--snapshot", "workdir"), run, 90)
    assert found.code == ExitCode.DONE, found.message
    assert found.digest == lab.train_reference({}, 2).digest
    environment = run.read_json(run.environment) or {}
    assert environment["folder"] == str(lab.folder)  # data stay where they are
    assert environment["environment_variables"]["PHALANX_SNAPSHOT_DIR"].startswith(variables["PHALANX_STATE_DIR"])


def test_two_nodes_end_in_the_digest_of_one_process_where_the_recipe_is_exact_over_replicas(
    rig: SlurmCluster, lab: TrainHarness, run: Run, variables: dict[str, str], started: list["subprocess.Popen[str]"]
) -> None:
    changes = {"determinism": "elastic"}
    found = ended(train(rig, lab, run, variables, started, changes), run, 90)
    assert found.code == ExitCode.DONE, found.message
    assert found.digest == lab.train_reference(changes, 1).digest


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("how", ["kill_node", "cut"])
def test_a_run_that_loses_a_node_goes_on_elsewhere_and_ends_in_the_same_digest(
    rig: SlurmCluster,
    lab: TrainHarness,
    run: Run,
    variables: dict[str, str],
    started: list["subprocess.Popen[str]"],
    which: int,
    how: str,
) -> None:
    write_faults(run, [plan_fault(1, "slow", delay=0.2)])
    process = train(rig, lab, run, variables, started, {})
    wait_until(lambda: count_steps(run) >= 7, 60, "the run to be in the middle")
    node = sorted({event.rank: event.host for event in HarnessRun(run, 0, None).events_of_kind(WorkerStarted)}.items())[
        which
    ][1]
    getattr(rig, how)(node)
    try:
        found = ended(process, run, 150)
        assert found.code == ExitCode.DONE, found.message
        assert found.digest == lab.train_reference({}, 2).digest
        last = [event.host for event in found.events_of_kind(WorkerStarted)][-2:]
        assert node not in last
    finally:
        rig.revive(node)


@pytest.mark.parametrize("which", [0, 1])
def test_a_run_that_may_train_on_fewer_nodes_keeps_the_rest_of_its_allocation(
    rig: SlurmCluster,
    lab: TrainHarness,
    run: Run,
    variables: dict[str, str],
    started: list["subprocess.Popen[str]"],
    which: int,
) -> None:
    changes = {"determinism": "elastic", "fault_tolerance": {"max_restarts": 5}}
    write_faults(run, [plan_fault(5, "kill-agent", ranks=[which])])
    found = ended(train(rig, lab, run, variables, started, changes, "--nodes", "1:2"), run, 120)
    assert found.code == ExitCode.DONE, found.message
    assert found.digest == lab.train_reference(changes, 2).digest
    assert [event.world_size for event in found.events_of_kind(AttemptStarted)] == [2, 1]


def job_of(rig: SlurmCluster) -> str:
    """The number of the only job that there is."""
    _, listed, _ = rig.run(["squeue", "--noheader", "--format=%i"])
    (number,) = listed.split()
    return number


def restart_the_controller(rig: SlurmCluster) -> None:
    rig.stop_controller()
    rig.start_controller()


def requeue(rig: SlurmCluster) -> None:
    """What preemption does, too, where a site gives it no time of grace."""
    assert rig.run(["scontrol", "requeue", job_of(rig)])[0] == 0


@pytest.mark.parametrize("happens", [restart_the_controller, requeue])
def test_whatever_slurm_does_to_the_job_it_ends_in_the_same_digest(
    rig: SlurmCluster,
    lab: TrainHarness,
    run: Run,
    variables: dict[str, str],
    started: list["subprocess.Popen[str]"],
    happens: Callable[[SlurmCluster], None],
) -> None:
    write_faults(run, [plan_fault(1, "slow", delay=0.2)])
    process = train(rig, lab, run, variables, started, {})
    wait_until(lambda: count_steps(run) >= 5, 60, "the run to be in the middle")
    happens(rig)
    found = ended(process, run, 150)
    assert found.code == ExitCode.DONE, found.message
    assert found.digest == lab.train_reference({}, 2).digest


def preempt(rig: SlurmCluster) -> None:
    """A job that comes first takes all nodes; the partition gives 10 s of grace."""
    options = ["--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null"]
    assert rig.run(["sbatch", *options, "--wrap=true"])[0] == 0


def reach_the_time_limit(rig: SlurmCluster) -> None:
    """Slurm warns 2 min before the end, and looks for jobs to warn every half minute. The next attempt has time."""
    limit = ["scontrol", "update", f"JobId={job_of(rig)}"]
    assert rig.run([*limit, "TimeLimit=2"])[0] == 0
    rig.wait_for(lambda: "RUNNING" not in rig.run(["squeue", "--noheader", "--format=%T"])[1], "the end of its time")
    assert rig.run([*limit, "TimeLimit=UNLIMITED"])[0] == 0


def test_a_run_that_is_preempted_and_later_reaches_its_time_limit_ends_in_the_same_digest(
    rig: SlurmCluster, lab: TrainHarness, run: Run, variables: dict[str, str], started: list["subprocess.Popen[str]"]
) -> None:
    write_faults(run, [plan_fault(1, "slow", delay=1.0), plan_fault(1, "slow", delay=6.0, attempt=1)])
    process = train(rig, lab, run, variables, started, {})
    wait_until(lambda: count_steps(run) >= 1, 60, "the run to be on its way")
    preempt(rig)
    (stopped,) = wait_until(lambda: HarnessRun(run, 0, None).events_of_kind(RunEnded), 60, "the run to save and leave")
    wait_until(lambda: count_steps(run) > stopped.step, 120, "the second attempt to be on its way")
    reach_the_time_limit(rig)
    found = ended(process, run, 150)
    assert found.code == ExitCode.DONE, found.message
    assert found.digest == lab.train_reference({}, 2).digest
    attempts = [event.attempt for event in found.events_of_kind(WorkerStarted)]
    assert attempts[:6] == [0, 0, 1, 1, 2, 2]  # Slurm may warn the third, too, before the limit is lifted
    assert [event.step for event in found.events_of_kind(StepDone)] == list(
        range(1, 13)
    )  # it saved: none was done again


def test_a_run_that_is_paused_is_held_and_ends_in_the_same_digest_after_it_is_resumed(
    rig: SlurmCluster, lab: TrainHarness, run: Run, variables: dict[str, str], started: list["subprocess.Popen[str]"]
) -> None:
    write_faults(run, [plan_fault(1, "slow", delay=1.0)])
    process = train(rig, lab, run, variables, started, {})
    wait_until(lambda: count_steps(run) >= 5, 60, "the run to be in the middle")
    slurm = SlurmBackend(
        rig.run, Path(variables["PHALANX_STATE_DIR"]) / "slurm", clock=itertools.count(step=10).__next__
    )
    job = job_of(rig)
    slurm.pause(job, "for power")
    wait_until(lambda: slurm.poll(job).reason == "paused: for power", 60, "the run to save and leave")
    (stopped,) = HarnessRun(run, 0, None).events_of_kind(RunEnded)
    time.sleep(15)  # a requeued job of this Slurm starts after 6 s
    assert slurm.poll(job).reason == "paused: for power"
    assert count_steps(run) == stopped.step < 12
    slurm.resume(job)
    found = ended(process, run, 150)
    assert found.code == ExitCode.DONE, found.message
    assert found.digest == lab.train_reference({}, 2).digest
    assert [event.step for event in found.events_of_kind(StepDone)] == list(range(1, 13))  # none was done again
