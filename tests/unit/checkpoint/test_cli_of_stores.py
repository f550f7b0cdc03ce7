"""`phalanx checkpoint` on checkpoints at a URL."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from checkpoints import save, state
from phalanx.cli.checkpoint import app
from phalanx.errors import DataError, UsageError
from phalanx.train.checkpoint.digest import digest_checkpoint
from store_saves import flip_byte

runner = CliRunner()


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory with the checkpoints of two steps."""
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path / "cache"))
    for step in (1, 2):
        save(tmp_path / "run" / "checkpoints", step, state(seed=step))
    return tmp_path / "run"


@pytest.fixture
def stored(local: Path, tmp_path: Path) -> str:
    """The same checkpoints in a store."""
    url = f"file://{tmp_path}/bucket/run"
    for step in (1, 2):
        call("cp", str(local), url, "--step", str(step))
    return url


def call(*arguments: str) -> str:
    result = runner.invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output.strip()


def test_a_copy_in_a_store_has_the_digest_and_comes_back_as_it_was(local: Path, stored: str, tmp_path: Path) -> None:
    assert call("digest", stored) == digest_checkpoint(local / "checkpoints" / "step-000000002")
    back = Path(call("cp", stored, str(tmp_path / "back"), "--step", "1"))
    assert back == tmp_path / "back" / "checkpoints" / "step-000000001"
    assert digest_checkpoint(back) == digest_checkpoint(local / "checkpoints" / "step-000000001")


def test_the_list_has_whole_checkpoints_and_says_which_are_not(stored: str, tmp_path: Path) -> None:
    (tmp_path / "bucket/run/checkpoints/step-000000001/MANIFEST.json").unlink()
    rows = json.loads(call("ls", stored, "--json"))
    assert [row["step"] for row in rows] == [2, 1]
    assert rows[0]["damaged"] is None
    assert "incomplete" in rows[1]["damaged"]


def test_a_damaged_block_is_named_by_its_url(stored: str, tmp_path: Path) -> None:
    assert call("verify", f"{stored}/checkpoints/step-000000002").startswith(f"ok  {stored}/checkpoints/step-000000002")
    for block in (tmp_path / "bucket/run/blocks").iterdir():
        flip_byte(block)
    with pytest.raises(DataError, match=f"{stored}/blocks/"):
        call("verify", stored)


def test_removing_a_checkpoint_keeps_the_blocks_of_others(stored: str, tmp_path: Path) -> None:
    call("rm", stored, "--step", "1")
    assert [row["step"] for row in json.loads(call("ls", stored, "--json"))] == [2]
    call("verify", stored)
    call("rm", f"{stored}/checkpoints/step-000000002")
    assert not list((tmp_path / "bucket/run/blocks").iterdir())


def test_a_checkpoint_is_removed_only_by_name(local: Path, stored: str) -> None:
    for where in (str(local), stored):
        with pytest.raises(UsageError, match="--step STEP"):
            call("rm", where)
    call("rm", str(local / "checkpoints" / "step-000000001"))
    assert [path.name for path in (local / "checkpoints").iterdir()] == ["step-000000002"]


def test_a_url_without_checkpoints_is_one_sentence(stored: str, tmp_path: Path) -> None:
    for command in ("ls", "verify", "digest"):
        with pytest.raises(UsageError, match="no checkpoint here"):
            call(command, f"file://{tmp_path}/bucket/other")
    with pytest.raises(UsageError, match="no checkpoint of step 9; there are 1, 2"):
        call("digest", stored, "--step", "9")


def test_the_directory_of_checkpoints_of_a_run_is_as_good_as_the_run(stored: str) -> None:
    assert call("ls", f"{stored}/checkpoints", "--json") == call("ls", stored, "--json")
    assert call("digest", f"{stored}/checkpoints") == call("digest", stored)


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="https://host/run: nothing can be written there"):
        call("cp", str(tmp_path / "none"), "https://host/run")
