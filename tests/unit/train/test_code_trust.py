"""Whose code a run's model may be."""

from pathlib import Path

import pytest

from phalanx.errors import UsageError
from phalanx.recipe import Recipe
from phalanx.train.code_trust import check_trusted, list_user_code, record_trust


def recipe(build: str = "mine:build", task: str = "language-modeling", **args: object) -> Recipe:
    return Recipe.model_validate({"model": {"build": build, "args": args}, "task": task})


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHALANX_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.mark.parametrize("build", ["phalanx.models:transformer", "phalanx.models:moe", "hf:folder"])
def test_what_came_with_phalanx_needs_no_consent(tmp_path: Path, build: str) -> None:
    check_trusted(tmp_path, recipe(build), tmp_path)


@pytest.mark.parametrize(
    ("build", "task", "code"),
    [
        ("os:system", "language-modeling", ["os:system"]),
        ("phalanx.models:transformer.__globals__", "language-modeling", ["phalanx.models:transformer.__globals__"]),
        ("phalanx.modelsx:transformer", "language-modeling", ["phalanx.modelsx:transformer"]),
        ("phalanx.models:moe", "mine:Task", ["mine:Task"]),
    ],
)
def test_any_other_code_is_named_and_refused(tmp_path: Path, build: str, task: str, code: list[str]) -> None:
    assert list_user_code(recipe(build, task)) == code
    with pytest.raises(UsageError, match=r"would run code that you have not trained with here: .*--trust-code"):
        check_trusted(tmp_path, recipe(build, task), tmp_path)


def test_what_this_user_trained_with_is_trusted_wherever_the_run_lies(tmp_path: Path) -> None:
    record_trust(recipe(), tmp_path)
    check_trusted(tmp_path / "moved", recipe(), tmp_path)


def test_other_arguments_another_task_or_folder_are_other_code(tmp_path: Path) -> None:
    record_trust(recipe(), tmp_path)
    for other, folder in (
        (recipe(command="id"), tmp_path),
        (recipe(task="mine:Task"), tmp_path),
        (recipe(), Path("/")),
    ):
        with pytest.raises(UsageError):
            check_trusted(tmp_path, other, folder)


def test_marks_where_others_may_write_are_not_believed(tmp_path: Path, state: Path) -> None:
    record_trust(recipe(), tmp_path)
    state.chmod(0o777)
    with pytest.raises(UsageError, match="other users may write to the state folder"):
        check_trusted(tmp_path, recipe(), tmp_path)
