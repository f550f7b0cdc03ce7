"""`phalanx chaos` before any run: the list of faults is printed, and what cannot be is told."""

import json
import re
from pathlib import Path

import pytest

from phalanx.cli import main
from phalanx.jobs.chaos.fault_plan import FAULT_KINDS

RECIPE = """
name: small
model: {}
data: {source: {text: "text.txt"}}
steps: 400
checkpoint: {every: 20}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path


def test_a_dry_run_prints_the_same_list_again_and_makes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for seed in ("3", "3", "4"):
        assert main.main(["chaos", "r.yaml", "--nproc-per-node", "2", "--seed", seed, "--dry-run"]) == 0
        printed.append(capsys.readouterr().out.splitlines())
    assert printed[0] == printed[1]
    assert printed[0][0] == "10 faults, seed 3; 2 workers, 400 steps, a checkpoint every 20"
    assert len(printed[0]) == 11
    assert printed[0][1:] != printed[2][1:]
    assert sorted(path.name for path in folder.iterdir()) == ["r.yaml", "text.txt"]


def test_the_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["chaos", "r.yaml", "--faults", "3", "--kinds", "kill", "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(fault["number"], fault["kind"], fault["injected"]) for fault in told["faults"]] == [
        (number, "kill", None) for number in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--faults", "0"], 64, "--faults"),
        (["--kinds", "kill,burn"], 64, "there is no kind 'burn'"),
        (["--kinds", "hang"], 64, "hang needs another worker"),
        (["--faults", "60"], 64, "60 faults are too many: "),
        (["--queue", "--nodes", "2"], 64, "--queue runs on this machine only"),
        (["--run", "text.txt"], 64, "text.txt: already exists"),
        (["--run", "text.txt/run"], 64, "text.txt is a file"),
        (["--run", "s3://bucket/run"], 64, "injected on this machine; expected a directory"),
        (["--baseline", "file:///nowhere/run"], 64, "file:///nowhere/run: no run here"),
        (["--baseline", "nowhere"], 64, "nowhere: no run here"),
        (["stepz=3"], 78, "stepz"),
        (["batch.global_size=3", "--nproc-per-node", "2"], 78, "batch.global_size"),
    ],
)
def test_what_cannot_be_is_told_before_any_run(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    assert main.main(["chaos", "r.yaml", *words]) == code
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["r.yaml", "text.txt"]


def test_a_recipe_that_does_not_name_its_model_is_refused_before_anything(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "r.yaml").write_text(RECIPE.replace("model: {}\n", ""))
    assert main.main(["chaos", "r.yaml", "--dry-run"]) == 78
    assert "r.yaml: names no model" in capsys.readouterr().err


def test_help_and_page_name_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["chaos", "--help"]) == 0
    told = capsys.readouterr().out.partition("Kinds:")[2].partition("Options:")[0]
    told = re.sub(r"-\n +", "-", told)  # where a line was broken at a hyphen
    assert set(FAULT_KINDS) <= set(re.findall(r"[\w-]+", told))
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "fault-injection.md").read_text()
    first_cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert [name for cell in first_cells for name in re.findall(r"`([\w-]+)`", cell)] == list(FAULT_KINDS)


def test_a_script_with_a_loop_of_its_own_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["chaos", "loop.py"]) == 64
    assert "chaos is for recipes" in capsys.readouterr().err
