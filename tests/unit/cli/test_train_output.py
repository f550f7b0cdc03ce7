"""What `phalanx train` prints before the first step, and at its end: a command that can be pasted."""

import shlex
from pathlib import Path

import pytest

from phalanx.app.prepare_run import PreparedRun
from phalanx.app.train_arguments import TrainArguments
from phalanx.cli.local_training import format_conclusion, format_introduction
from phalanx.errors import ExitCode
from phalanx.run import Run
from phalanx.run.directory import write_json
from resolved_recipes import resolved_recipe


def test_a_run_that_stopped_and_saved_says_at_which_step(run: Run) -> None:
    write_json(run.result, {"status": "interrupted", "steps": 40, "digest": "ab" * 16})
    told = format_conclusion(run, ExitCode.UNFINISHED, TrainArguments(Path("r.yaml")))
    assert told == f"saved at step 40; resume with: phalanx train r.yaml --run {run.path}"


def test_a_run_that_could_not_save_does_not_say_that_it_did(run: Run) -> None:
    write_json(run.result, {"status": "interrupted", "steps": 40, "digest": None})
    told = format_conclusion(run, ExitCode.UNFINISHED, TrainArguments(Path("r.yaml")))
    assert told.startswith("the last steps were not saved; resume with: phalanx train")


@pytest.mark.parametrize("name", ["it's $HOME.yaml", "-dash.yaml"])
@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.UNFINISHED])
def test_a_shell_reads_the_paths_of_the_next_command_as_they_are(name: str, code: ExitCode) -> None:
    said = format_conclusion(Run(Path(name)), code, TrainArguments(Path(name)))
    words = shlex.split(said.splitlines()[-1])
    here = f"./{name}" if name.startswith("-") else name
    run = [here] if code is ExitCode.DONE else [here, "--run", name]
    assert words[-len(run) - 1 :] == ["report" if code is ExitCode.DONE else "train", *run]


def test_the_command_to_go_on_keeps_the_workers_and_is_quoted_for_the_shell(run: Run) -> None:
    write_json(run.result, {"status": "interrupted", "steps": 40, "digest": "ab" * 16})
    arguments = TrainArguments(Path("r.yaml"), ["model.args={layers: 2}"], nproc_per_node=3)
    told = format_conclusion(run, ExitCode.UNFINISHED, arguments)
    assert f"'model.args={{layers: 2}}' --run {run.path} --nproc-per-node 3" in told


@pytest.mark.parametrize(("every", "when"), [(None, "at the end only"), (50, "when a checkpoint saves them")])
def test_trackers_that_hold_steps_back_say_when_their_charts_get_them(every: int | None, when: str) -> None:
    recipe = resolved_recipe(trackers=["tensorboard", "mlflow", "wandb"], checkpoint={"every": every})
    text = format_introduction(PreparedRun(Run(Path("run")), recipe, Path(), {}, {}, [], 0))
    assert f"trackers charts of mlflow, wandb get steps {when}" in text
