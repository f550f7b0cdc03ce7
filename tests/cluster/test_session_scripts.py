"""Training loops of the user's own as scripts that Python, torchrun, a notebook or the command line starts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.errors import ExitCode
from phalanx.run import Run
from phalanx.run.event_types import AttemptStarted
from phalanx.train.checkpoint.format import list_checkpoints
from read_trackers import read_tensorboard
from session_runs import EXAMPLES, SLOW, STEPS, run_session_once, write_session_scripts
from train_harness import TrainHarness, wait_until, write_faults


@pytest.fixture(scope="module")
def scripts(lab: TrainHarness) -> Path:
    return write_session_scripts(lab)


def start_alone(lab: TrainHarness, folder: Path, *words: str) -> "subprocess.Popen[str]":
    """`python WORDS`, in a folder of its own, without our agent."""
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, **lab.variables()},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def alone(lab: TrainHarness, folder: Path, *words: str, nproc: int = 1) -> "subprocess.CompletedProcess[str]":
    """The same to its end, under torchrun if there are several workers."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)] if nproc > 1 else []
    with start_alone(lab, folder, *launcher, *words) as process:
        out, errors = process.communicate(timeout=100)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number", "code"),
    [("language", signal.SIGTERM, ExitCode.UNFINISHED), ("vision", signal.SIGKILL, -signal.SIGKILL)],
)
def test_an_example_alone_is_interrupted_and_finished(
    lab: TrainHarness, scripts: Path, name: str, number: signal.Signals, code: int
) -> None:
    folder = lab.runs / f"alone-{name}"
    run = Run(folder / "runs" / name)
    write_faults(run, [{**SLOW, "delay": 0.15}])
    script = str(lab.folder / f"{name}.py")
    with start_alone(lab, folder, script) as process:
        wait_until(lambda: process.poll() is not None or list_checkpoints(run.checkpoints), 60)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert ("not finished; run the same command again to resume" in said) == (code == ExitCode.UNFINISHED)
    write_faults(run, [])
    done = alone(lab, folder, script)
    ended, said = lab.from_command_line(run, done.returncode), done.stderr
    assert ended.digest == run_session_once(lab, script=name).digest, said
    assert ended.events_of_kind(AttemptStarted)[1].start_step >= 4
    assert said.count(f"digest   {ended.digest}") == 1
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_under_torchrun_is_the_same_run(lab: TrainHarness, scripts: Path, tmp_path: Path, name: str) -> None:
    done = alone(lab, tmp_path, str(lab.folder / f"{name}.py"), nproc=2)
    assert done.returncode == 0, done.stderr
    ended = lab.from_command_line(Run(tmp_path / "runs" / name), 0)
    assert ended.digest == run_session_once(lab, nproc=2, script=name).digest
    assert done.stderr.count("finished: 12 of 12 steps") == 1


def test_the_command_line_shows_a_script_like_a_recipe(lab: TrainHarness, scripts: Path) -> None:
    run = lab.new_run()
    overrides = ("steps=6", "trackers=[tensorboard]")
    done = lab.command(
        "train", lab.folder / "session_script.py", "right", *overrides, "--nproc-per-node", "2", "--run", run.path
    )
    assert done.returncode == 0, done.stderr
    for said in ("2 workers on cpu", "tokens/s", "finished: 6 of 6 steps", f"phalanx report {run.path}"):
        assert said in done.stderr
    assert [step for step, _ in read_tensorboard(run, "train/loss")] == [1, 2, 3, 4, 5, 6]


def test_two_runs_of_one_script_are_two_runs_and_none_is_given_to_it_again(
    lab: TrainHarness, scripts: Path, tmp_path: Path
) -> None:
    done = alone(lab, tmp_path, str(lab.folder / "session_script.py"), "same-fold")
    assert done.returncode == ExitCode.USAGE
    assert "runs/own: this script has joined this run before, and it is done" in done.stderr
    assert "Traceback" not in done.stderr
    first, second = (lab.from_command_line(Run(tmp_path / name), 0).digest for name in ("runs/own", "fold-1"))
    assert first == run_session_once(lab, "right").digest
    assert second == run_session_once(lab, "right", "seed=1").digest
    assert "0 models of runs before are there" in done.stderr  # a GPU has no room for both
    assert done.stderr.count(f"finished: {STEPS} of {STEPS} steps") == 2


def test_a_loop_alone_that_leaves_with_0_in_the_middle_does_not_end_with_0(
    lab: TrainHarness, scripts: Path, tmp_path: Path
) -> None:
    done = alone(lab, tmp_path, str(lab.folder / "session_script.py"), "exits")
    assert done.returncode == ExitCode.GAVE_UP
    assert "error: worker 0: sys.exit() was called before the run was done" in done.stderr
    assert "Traceback" not in done.stderr


NOTEBOOK = """
import os, signal, sys
sys.ps1 = "In : "  # as IPython and Python's prompt have it
import session_script, phalanx
from phalanx.errors import RecipeError
try:
    session_script.main("right", ["optimizer.lr=1"], "refused")
except RecipeError as error:
    print("refused:", error)
session_script.main("break", [], "cell")
print("behind the block")
step = session_script.loss_sum
def interrupted(model, batch):
    os.kill(os.getpid(), signal.SIGINT)
    return step(model, batch)
session_script.loss_sum = interrupted
try:
    session_script.main("right", [], "interrupted")
except KeyboardInterrupt:
    print("interrupted")
session_script.loss_sum = step
session_script.main("right", [], "interrupted")
print("done")
"""


def test_in_a_notebook_no_end_of_a_run_ends_the_process(lab: TrainHarness, scripts: Path, tmp_path: Path) -> None:
    done = alone(lab, tmp_path, "-c", f"import sys; sys.path.insert(0, {str(lab.folder)!r})\n{NOTEBOOK}")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith("refused: ")
    assert said[1:] == ["behind the block", "interrupted", "done"]
