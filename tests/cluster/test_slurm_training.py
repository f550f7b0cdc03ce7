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
from phalanx.run.event_types import AttemptStarted, RunEnded, StepDone, WorkerStarted
from slurm_cluster import SlurmCluster
from train_harness import HarnessRun, TrainHarness, Values, count_steps, plan_fault, wait_until, write_faults


class Training:
    """A run that the command line starts on the login node; the command does not outlive the test."""

    def __init__(self, rig: SlurmCluster, lab: TrainHarness, state: Path):
        self._rig, self._lab = rig, lab
        self.run, self.state = lab.new_run(), state
        self._changes: Values = {}
        self.process: subprocess.Popen[str] | None = None

    def start(self, changes: Values, *more: str) -> None:
        self._changes = changes
        recipe = str(self._lab.recipe_file(changes))
        words = ["train", recipe, "--run", str(self.run.path), "--nproc-per-node", "1", "--on", "slurm", "--nodes", "2"]
        self.process = subprocess.Popen(
            self._rig.inside([sys.executable, "-m", "phalanx", *words, *more]),
            env={**os.environ, **self._lab.variables(), "PHALANX_STATE_DIR": str(self.state), "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def start_slow(self, *faults: Values, steps: int = 5) -> None:
        """Start the run and wait for a number of steps."""
        write_faults(self.run, faults or [plan_fault(1, "slow", delay=0.2)])
        self.start({})
        wait_until(lambda: count_steps(self.run) >= steps, 120, "the run to be on its way")

    def so_far(self) -> HarnessRun:
        return HarnessRun(self.run, 0, None)

    def end(self, seconds: float = 150, workers: int = 2) -> HarnessRun:
        """Wait for the end of the run, which must have the digest of as many workers on one machine."""
        assert self.process is not None
        _, said = self.process.communicate(timeout=seconds)
        found = HarnessRun(self.run, self.process.returncode, said)
        assert found.code == ExitCode.DONE, found.message
        assert found.digest == self._lab.train_reference(self._changes, workers).digest
        return found


@pytest.fixture
def training(rig: SlurmCluster, lab: TrainHarness, tmp_path: Path) -> Iterator[Training]:
    training = Training(rig, lab, tmp_path / "state")
    yield training
    if training.process is not None:
        with training.process as process:
            process.kill()
    rig.run(["scancel", "--user=root"])


def test_two_nodes_of_slurm_end_in_the_digest_of_one_machine(training: Training) -> None:
    training.start({})
    found = training.end(90)
    assert found.message is not None
    assert found.digest in found.message
    assert {event.host for event in found.events_of_kind(WorkerStarted)} == {"n1", "n2"}


def test_a_copy_of_the_recipes_folder_ends_in_the_same_digest(lab: TrainHarness, training: Training) -> None:
    training.start({}, "--snapshot", "workdir")
    training.end(90)
    environment = training.run.read_json(training.run.environment) or {}
    assert environment["folder"] == str(lab.folder)  # data stay where they are
    assert environment["environment_variables"]["PHALANX_SNAPSHOT_DIR"].startswith(str(training.state))


def test_two_nodes_end_in_the_digest_of_one_process_where_the_recipe_is_exact_over_replicas(training: Training) -> None:
    training.start({"determinism": "elastic"})
    training.end(90, workers=1)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("how", ["kill_node", "cut"])
def test_a_run_that_loses_a_node_goes_on_elsewhere_and_ends_in_the_same_digest(
    rig: SlurmCluster, training: Training, which: int, how: str
) -> None:
    training.start_slow(steps=7)
    node = {event.rank: event.host for event in training.so_far().events_of_kind(WorkerStarted)}[which]
    getattr(rig, how)(node)
    try:
        assert node not in [event.host for event in training.end().events_of_kind(WorkerStarted)][-2:]
    finally:
        rig.revive(node)


@pytest.mark.parametrize("which", [0, 1])
def test_a_run_that_may_train_on_fewer_nodes_keeps_the_rest_of_its_allocation(training: Training, which: int) -> None:
    write_faults(training.run, [plan_fault(5, "kill-agent", ranks=[which])])
    training.start({"determinism": "elastic", "fault_tolerance": {"max_restarts": 5}}, "--nodes", "1:2")
    assert [event.world_size for event in training.end(120).events_of_kind(AttemptStarted)] == [2, 1]


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
    rig: SlurmCluster, training: Training, happens: Callable[[SlurmCluster], None]
) -> None:
    training.start_slow()
    happens(rig)
    training.end()


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
    rig: SlurmCluster, training: Training
) -> None:
    training.start_slow(plan_fault(1, "slow", delay=1.0), plan_fault(1, "slow", delay=6.0, attempt=1), steps=1)
    preempt(rig)
    (stopped,) = wait_until(lambda: training.so_far().events_of_kind(RunEnded), 60, "the run to save and leave")
    wait_until(lambda: count_steps(training.run) > stopped.step, 120, "the second attempt to be on its way")
    reach_the_time_limit(rig)
    found = training.end()
    attempts = [event.attempt for event in found.events_of_kind(WorkerStarted)]
    assert attempts[:6] == [0, 0, 1, 1, 2, 2]  # Slurm may warn the third, too, before the limit is lifted
    steps = [event.step for event in found.events_of_kind(StepDone)]
    assert steps == list(range(1, 13))  # it saved: none was done again


def test_a_run_that_is_paused_is_held_and_ends_in_the_same_digest_after_it_is_resumed(
    rig: SlurmCluster, training: Training
) -> None:
    training.start_slow(plan_fault(1, "slow", delay=1.0))
    slurm = SlurmBackend(rig.run, training.state / "slurm", clock=itertools.count(step=10).__next__)
    job = job_of(rig)
    slurm.pause(job, "for power")
    wait_until(lambda: slurm.poll(job).reason == "paused: for power", 60, "the run to save and leave")
    (stopped,) = training.so_far().events_of_kind(RunEnded)
    time.sleep(15)  # a requeued job of this Slurm starts after 6 s
    assert slurm.poll(job).reason == "paused: for power"
    assert count_steps(training.run) == stopped.step < 12
    slurm.resume(job)
    found = training.end()
    assert [event.step for event in found.events_of_kind(StepDone)] == list(range(1, 13))  # none was done again
