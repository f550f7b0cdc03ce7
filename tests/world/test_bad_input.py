"""Input that cannot run, through the command line: one line or two, the exit code of the table, nothing on disk."""

from pathlib import Path

import pytest

from phalanx.errors import ExitCode
from phalanx.recipe.yaml_loader import to_yaml
from train_harness import BASE_RECIPE, TrainHarness, Values, merge_recipes

GOOD = merge_recipes(BASE_RECIPE, {"callbacks": []})
Case = tuple[Values | str | None, list[str], list[str]]
"""Changes of a good recipe, or a file's whole text, or no file; further arguments; what the message must have."""

BAD: dict[str, Case] = {
    "unknown key": ({"optimizer": {"learning_rate": 1}}, [], ["recipe.yaml:", "optimizer.learning_rate"]),
    "batch that cannot be divided": ({}, ["--nproc-per-node", "5"], ["recipe.yaml:", "batch.global_size", "12", "5"]),
    "model that does not import": (
        {"model": {"build": "no_such_module:net", "args": {}}},
        [],
        ["recipe.yaml:7: model.build", "no_such_module"],
    ),
    "argument that the model does not take": (
        {"model": {"args": {"depth": 2}}},
        [],
        ["recipe.yaml:", "model.args", "depth"],
    ),
    "task that does not import": ({"task": "user_tasks:Nothing"}, [], ["recipe.yaml:", "task", "user_tasks"]),
    "no file": (None, [], ["recipe.yaml", "no such file"]),
    "broken YAML": ("steps: [1, 2\nname: x\n", [], ["recipe.yaml:"]),
    "device that is not here": (
        {"device": "cuda"},
        [],
        ["recipe.yaml:", "device", "AMD GPU here", "cpu or auto"],
    ),
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


AS_A_PROCESS = {"model that does not import"}
"""Mistakes that are made in a process of its own, from its start to its end, which takes five seconds; the others in
this one, with the lab's fork server."""


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
        ended = lab.command(*words) if case in AS_A_PROCESS else lab.call_command(capsys, *words)
    errors = ended.stderr
    assert ended.returncode == ExitCode.RECIPE, errors
    lines = errors.strip().splitlines()
    assert 1 <= len(lines) <= 2, errors
    assert lines[0].startswith("error: ")
    assert all(part in errors for part in parts), errors
    assert "Traceback" not in errors
    assert ended.stdout == ""
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
