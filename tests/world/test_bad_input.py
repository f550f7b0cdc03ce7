"""Input that cannot run, through the command line: one line or two, the exit code of the table, nothing on disk."""

import contextlib
import os
from pathlib import Path

import pytest

from phalanx.cli import main
from phalanx.errors import ExitCode
from phalanx.recipe.yaml_loader import to_yaml
from phalanx.run.event_types import AttemptStarted, RunWarning
from train_harness import BASE_RECIPE, TrainHarness, Values, merge_recipes

GOOD = merge_recipes(BASE_RECIPE, {"callbacks": []})
Case = tuple[Values | str | None, list[str], list[str]]
"""Changes of a good recipe, or a file's whole text, or no file; further arguments; what the message must have."""

BAD: dict[str, Case] = {
    "unknown key": ({"optimizer": {"learning_rate": 1}}, [], ["recipe.yaml:", "optimizer.learning_rate"]),
    "unknown key in an override": ({}, ["optimizer.lrr=1"], ["optimizer.lrr", "lr"]),
    "wrong type": ({"steps": "many"}, [], ["recipe.yaml:", "steps", "many"]),
    "batch that cannot be divided": ({}, ["--nproc-per-node", "5"], ["recipe.yaml:", "batch.global_size", "12", "5"]),
    "micro-batch that does not divide": ({"batch": {"micro_size": 5}}, [], ["recipe.yaml:", "batch.micro_size", "5"]),
    "model that does not import": (
        {"model": {"build": "no_such_module:net", "args": {}}},
        [],
        ["recipe.yaml:7: model.build", "no_such_module"],
    ),
    "model without that name": (
        {"model": {"build": "phalanx.models:transfomer"}},
        [],
        ["recipe.yaml:", "model.build", "transformer"],
    ),
    "argument that the model does not take": (
        {"model": {"args": {"depth": 2}}},
        [],
        ["recipe.yaml:", "model.args", "depth"],
    ),
    "task that does not import": ({"task": "user_tasks:Nothing"}, [], ["recipe.yaml:", "task", "user_tasks"]),
    "no file": (None, [], ["recipe.yaml", "no such file"]),
    "broken YAML": ("steps: [1, 2\nname: x\n", [], ["recipe.yaml:"]),
    "not a mapping": ("- 1\n- 2\n", [], ["recipe.yaml", "mapping"]),
    "device that is not here": ({"device": "xpu"}, [], ["recipe.yaml:", "device", "an Intel GPU", "cpu or auto"]),
    "source that matches no file": (
        {"data": {"source": {"text": "no/such/*.txt"}}},
        [],
        ["recipe.yaml:", "data.source", "no/such/*.txt"],
    ),
    "source with too little text": ({"data": {"seq_len": 100_000}}, [], ["recipe.yaml:", "data.seq_len", "100000"]),
    "checkpoint to start from that is not there": (
        {"init_from": "runs/none"},
        [],
        ["recipe.yaml:", "init_from", "runs/none"],
    ),
}


AS_A_PROCESS = {"no file", "model that does not import", "argument that the model does not take"}
"""Mistakes that are made in a process of its own, from its start to its end, which takes five seconds; the others in
this one, with the lab's fork server."""


def run_command(
    lab: TrainHarness, case: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Exit code, output and messages of the command line."""
    if case in AS_A_PROCESS:
        ended = lab.command(*words)
        return ended.returncode, ended.stdout, ended.stderr
    with lab.environment(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("phalanx.app.train.ForkServerClient", lambda **_: contextlib.nullcontext(lab.fork_server))
        return main.main(words), *capsys.readouterr()


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_in_a_line_or_two_and_leaves_nothing_behind(
    lab: TrainHarness, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, arguments, parts = BAD[case]
    folder = lab.create_recipe_dir(tmp_path / "recipes")
    recipe = folder / "recipe.yaml"
    if changes is not None:
        text = changes if isinstance(changes, str) else to_yaml(merge_recipes(GOOD, changes), flow=False)
        recipe.write_text(text)
    before = sorted(folder.rglob("*"))
    cache, run = tmp_path / "cache", tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab, "cache", cache)
        words = ["train", str(recipe), *arguments, "--run", str(run)]
        code, output, errors = run_command(lab, case, words, capsys)
    assert code == ExitCode.RECIPE, errors
    lines = errors.strip().splitlines()
    assert 1 <= len(lines) <= 2, errors
    assert lines[0].startswith("error: ")
    assert all(part in errors for part in parts), errors
    assert "Traceback" not in errors
    assert output == ""
    assert not run.exists()
    assert sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts) == before
    left = sorted(
        str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if cache in path.parents or path == cache
    )
    if case in NEEDS_DATA:  # prepared whole, to be found again once the mistake is mended
        assert not [path for path in left if "tmp" in path], left
    else:
        assert left == [], left
    assert lab.processes() == set()


NEEDS_DATA = {"source with too little text"}
"""Mistakes that only show once the data are prepared."""


@pytest.mark.slow
def test_a_changed_recipe_and_a_finished_run_through_the_command_line(lab: TrainHarness) -> None:
    """The whole way: done, done again, more steps, refused, forced."""
    run, recipe = lab.new_run(), lab.recipe_file({}, "finished")
    lab.train({}, 1, run, folder=lab.folder)
    again = lab.command("train", recipe, "--run", run.path)
    assert again.returncode == ExitCode.DONE
    assert "finished at step 12" in again.stderr
    assert "set steps=24 to train longer" in again.stderr
    refused = lab.command("train", recipe, "optimizer.lr=0.5", "seed=3", "--run", run.path)
    assert refused.returncode == ExitCode.RECIPE
    assert "optimizer.lr: 0.003 -> 0.5" in refused.stderr
    assert "seed: 0 -> 3" in refused.stderr
    assert "Traceback" not in refused.stderr
    more = lab.command("train", recipe, "steps=16", "--run", run.path)
    assert more.returncode == ExitCode.DONE, more.stderr
    assert "steps 12 -> 16" in more.stderr
    assert "jumps from" in more.stderr
    forced = lab.command("train", recipe, "steps=18", "optimizer.lr=0.001", "--force", "--run", run.path)
    assert forced.returncode == ExitCode.DONE, forced.stderr
    assert [event.start_step for event in lab.from_command_line(run, 0).events_of_kind(AttemptStarted)] == [0, 12, 16]
    assert [event.text for event in lab.from_command_line(run, 0).events_of_kind(RunWarning)][
        -1
    ] == "forced: optimizer.lr: 0.003 -> 0.001"
    assert os.listdir(run.path / "checkpoints")
