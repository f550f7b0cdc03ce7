"""Workers that torchrun starts instead of our agent: the same run."""

import signal
import subprocess

import pytest

from phalanx.errors import ExitCode
from phalanx.run import Run
from phalanx.run.event_types import AttemptStarted, CheckpointSaved, RecipeResolved, StepDone
from train_harness import TrainHarness, Values, count_steps, plan_fault, wait_until, write_faults

# Without `--` torchrun would take `--run` for an abbreviation of its own `--run-path`.
TORCHRUN = ["--standalone", "--nproc-per-node", "2", "-m", "phalanx", "--", "train"]
LAUNCHER = "torch.distributed.run"


def torchrun(lab: TrainHarness, run: Run, changes: Values) -> "subprocess.CompletedProcess[str]":
    return lab.command(*TORCHRUN, lab.recipe_file(changes, "outside"), "--run", run.path, module=LAUNCHER)


def test_the_same_run_as_under_our_agent_shown_in_the_same_way(lab: TrainHarness) -> None:
    run = lab.new_run()
    done = torchrun(lab, run, {})
    assert done.returncode == 0, done.stderr
    ended, reference = lab.from_command_line(run, 0), lab.train_reference({}, 2)
    assert ended.digest == reference.digest
    assert ended.losses == reference.losses
    assert [event.step for event in ended.events_of_kind(StepDone)] == list(range(1, 13))
    assert len(ended.events_of_kind(RecipeResolved)) == 1
    assert set(ended.result) == set(reference.result)
    assert "finished: 12 of 12 steps" in done.stderr
    assert done.stderr.count(f"digest   {ended.digest}") == 1
    assert lab.processes() == set()


def test_a_gpu_that_fails_there_ends_its_worker_with_77_and_a_sentence(lab: TrainHarness) -> None:
    run = lab.new_run()
    write_faults(run, [plan_fault(2, "lose-gpu", ranks=[1])])
    ended = torchrun(lab, run, {})
    assert "exitcode  : 77" in ended.stderr
    assert "failed: RuntimeError: CUDA error: uncorrectable ECC error encountered" in ended.stderr
    assert "Traceback" not in ended.stderr.partition("torch/distributed/elastic")[0]


@pytest.mark.slow
def test_stopped_there_and_finished_here(lab: TrainHarness) -> None:
    """SIGTERM to torchrun goes on to its workers; they save, and our agent can finish the run."""
    run = lab.new_run()
    write_faults(run, [plan_fault(1, "slow", delay=0.12)])
    recipe = lab.recipe_file({"steps": 400}, "outside-long")
    with lab.start(*TORCHRUN, recipe, "--run", run.path, module=LAUNCHER) as process:
        wait_until(lambda: process.poll() is not None or count_steps(run) >= 3, 60)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=40)
    ended = lab.from_command_line(run, ExitCode.UNFINISHED)
    step = ended.result["steps"]
    assert ended.result["status"] == "interrupted"
    assert ended.events_of_kind(CheckpointSaved)[-1].step == step
    wait_until(lambda: lab.processes() == set(), 5)
    again = lab.train({"steps": step + 3}, 2, run)
    assert again.code == ExitCode.DONE
    assert [(event.attempt, event.start_step) for event in again.events_of_kind(AttemptStarted)] == [(0, 0), (1, step)]


@pytest.mark.slow
def test_bad_input_ends_all_workers_with_78(lab: TrainHarness) -> None:
    ended = torchrun(lab, lab.new_run(), {"batch": {"global_size": 9}})
    assert ended.stderr.count("error: the leading worker could not make the run ready") == 1
    assert ended.stderr.count("batch.global_size: 9 samples cannot be divided among 2 workers") == 2
    assert "exitcode  : 78" in ended.stderr
