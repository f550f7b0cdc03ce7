"""`phalanx checkpoint`: what it prints and how it ends."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from checkpoints import save
from phalanx.cli.checkpoint import app
from phalanx.errors import UsageError
from phalanx.train.checkpoint.digest import compute_digest
from phalanx.train.checkpoint.format import CorruptCheckpointError

TENSORS = {"w": torch.arange(12.0).reshape(3, 4), "optimizer/w/step": torch.ones(())}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (20, 40):
        save(tmp_path / "checkpoints", step, TENSORS)
    (tmp_path / "checkpoints" / "best.json").write_text('{"step": 20, "loss": 1.5}')
    return tmp_path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_ls_lists_newest_first_and_marks_the_best(run: Path) -> None:
    rows = json.loads(call("ls", run, "--json").output)
    assert [(row["step"], row["best"], row["num_samples"], row["num_tensors"]) for row in rows] == [
        (40, False, 640, 2),
        (20, True, 320, 2),
    ]
    lines = call("ls", run).output.splitlines()
    assert len(lines) == 3
    assert lines[2].endswith("best")


def test_ls_shows_a_damaged_manifest_and_goes_on(run: Path) -> None:
    (run / "checkpoints" / "step-000000040" / "MANIFEST.xxh3").unlink()
    assert "damaged: MANIFEST.xxh3: missing" in call("ls", run / "checkpoints").output


def test_verify_says_ok_or_names_the_file(run: Path) -> None:
    path = run / "checkpoints" / "step-000000040"
    assert call("verify", run).output.startswith(f"ok  {path}: ")
    assert json.loads(call("verify", run, "--json").output).keys() == {"path", "ok", "size_bytes", "duration_s"}
    (path / "rank-00000.safetensors").unlink()
    assert call("verify", run, "--step", 20).exit_code == 0
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.safetensors: missing"):
        call("verify", run)
    result = call("verify", path, "--json")
    assert result.exit_code == 65
    assert json.loads(result.output)["file"] == "rank-00000.safetensors"


def test_digest_is_that_of_the_chosen_checkpoint(run: Path) -> None:
    assert call("digest", run).output.strip() == compute_digest(TENSORS.items(), 640)
    assert call("digest", run, "--step", 20).output.strip() == compute_digest(TENSORS.items(), 320)
    value = json.loads(call("digest", run / "checkpoints" / "step-000000020", "--json").output)
    assert value["digest"] == compute_digest(TENSORS.items(), 320)


def test_export_writes_a_directory(run: Path) -> None:
    result = call("export", run, run / "out", "--step", 20)
    assert result.output.startswith(f"{run / 'out'}: README.md, export.json, model.safetensors from step-000000020\n")
    facts = json.loads(call("export", run, run / "out2", "--json").output)
    assert facts["files"] == ["README.md", "export.json", "model.safetensors"]
    assert "only the run's directory or own code can call it" in facts["notes"][0]
    assert [(check["name"], check["passed"]) for check in facts["checks"]] == [("files", True)]


def test_a_place_without_checkpoints_and_a_step_that_is_not_there_are_usage_errors(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint here"):
        call("ls", tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no checkpoint of step 30; there are 20, 40"):
        call("verify", run, "--step", 30)
