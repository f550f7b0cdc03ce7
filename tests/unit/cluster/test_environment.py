"""environment.json."""

import json
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from phalanx.cluster.environment import collect_environment, read_git_state, relevant_variables

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    (tmp_path / "recipe.yaml").write_text("name: a\n")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *arguments], check=True)
    return tmp_path


def test_it_names_versions_and_command_and_is_json(tmp_path: Path) -> None:
    found = collect_environment(["phalanx", "train", "a.yaml"], tmp_path, {})
    assert found["command"] == ["phalanx", "train", "a.yaml"]
    assert found["torch"]
    assert found["python"].startswith("3.")
    assert json.loads(json.dumps(found)) == found


def test_only_variables_that_matter_are_kept() -> None:
    given = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "0",
        "API_KEY": "secret",
        "HOME": "/",
    }
    assert relevant_variables(given) == {"CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}


@needs_git
@pytest.mark.parametrize(
    ("changed", "folder", "dirty", "untracked"),
    [
        (None, ".", False, 0),
        ("recipe.yaml", ".", True, 0),
        ("my_model.py", ".", False, 1),  # git does not know it
        ("recipe.yaml", "inner", False, 0),  # outside of the recipe's folder
    ],
)
def test_a_repository_has_its_commit_and_what_was_changed(
    repository: Path, changed: str | None, folder: str, dirty: bool, untracked: int
) -> None:
    (repository / "inner").mkdir()
    if changed is not None:
        (repository / changed).write_text("name: b\n")
    state = read_git_state(repository / folder)
    assert state is not None
    assert len(state["commit"]) == 40
    assert (state["dirty"], state["untracked_files"]) == (dirty, untracked)


def test_a_folder_outside_a_repository_has_no_state(tmp_path: Path) -> None:
    assert read_git_state(tmp_path) is None


def test_a_machine_without_git_has_no_state(tmp_path: Path) -> None:
    assert read_git_state(tmp_path, git=str(tmp_path / "git")) is None


def test_the_room_does_not_import_torch() -> None:
    script = "import sys, phalanx.cluster; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], check=False, env={"PYTHONPATH": ":".join(sys.path)}).returncode
        == 0
    )


def test_what_names_itself_a_secret_is_not_recorded(tmp_path: Path) -> None:
    given = {"NCCL_AUTH_SECRET": "s", "PHALANX_API_PASSWORD": "s", "PHALANX_TOKEN": "s", "PHALANX_STORE_KEY": "s"}
    argv = ["phalanx", "train", "a.yaml", "model.args.api_key=s3cret", "--token=s3cret", "optimizer.lr=1"]
    found = collect_environment(argv, tmp_path, {**given, "NCCL_DEBUG": "INFO"})
    assert found["environment_variables"] == {"NCCL_DEBUG": "INFO"}
    assert found["command"] == [*argv[:3], "model.args.api_key=...", "--token=...", "optimizer.lr=1"]


def test_phalanx_has_a_version_without_a_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert collect_environment([], tmp_path)["phalanx"] == "0+source"
