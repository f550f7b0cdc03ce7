"""Where hot copies lie, who may read them, and which of them belong to a run's history."""

import os
import shutil
from pathlib import Path

import pytest

from phalanx.errors import UsageError
from phalanx.run import Run
from phalanx.run import hot as hot_module
from phalanx.run.hot import (
    ABANDONED,
    STALE,
    begin_line,
    counts,
    cut,
    forget,
    hot_file,
    hot_folder,
    is_private,
    note_saved,
    open_folder,
    read_history,
    remove_copies,
    sweep,
)


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    return {"PHALANX_IN_MEMORY_DIR": str(tmp_path / "memory")}


def test_the_folder_is_for_its_user_alone_and_named_by_run_and_node(run: Run, variables: dict[str, str]) -> None:
    folder = open_folder(run, variables)
    assert folder.stat().st_mode & 0o777 == 0o700
    others = {
        hot_folder(run, {**variables, "PHALANX_NODE_RANK": "1"}),
        hot_folder(Run(run.path.with_name("other")), variables),
    }
    assert folder not in others
    assert len(others) == 2
    assert open_folder(run, variables) == folder


def test_a_run_is_the_same_by_any_way_to_its_directory(
    run: Run, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.path.parent)
    assert hot_folder(Run(Path("run")), variables) == hot_folder(run, variables)


def test_a_folder_that_others_may_read_is_refused_and_not_removed(run: Run, variables: dict[str, str]) -> None:
    folder = open_folder(run, variables)
    folder.chmod(0o755)
    with pytest.raises(UsageError, match="is not a folder that only this user can read"):
        open_folder(run, variables)
    remove_copies(run, variables)
    assert folder.is_dir()


def test_a_link_in_the_folders_place_is_not_followed(run: Run, variables: dict[str, str], tmp_path: Path) -> None:
    folder = open_folder(run, variables)
    shutil.rmtree(folder)
    (tmp_path / "precious").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "precious")
    assert not is_private(folder)
    remove_copies(run, variables)
    assert (tmp_path / "precious").is_dir()


def test_copies_are_removed_with_their_folder(run: Run, variables: dict[str, str]) -> None:
    folder = open_folder(run, variables)
    (folder / "step-000000001-a").mkdir()
    remove_copies(run, variables)
    remove_copies(run, variables)
    assert not folder.exists()


@pytest.mark.parametrize(("age", "begun", "stays"), [(0.5, False, True), (2, False, False), (2, True, True)])
def test_what_a_killed_run_left_is_removed_by_the_next_one(
    run: Run, variables: dict[str, str], tmp_path: Path, age: float, begun: bool, stays: bool
) -> None:
    dead = Run(tmp_path / "dead")
    dead.create()
    left = open_folder(dead, variables)
    if begun:
        begin_line(dead, "a")
    changed = left.stat().st_mtime
    sweep(open_folder(run, variables), changed + age * STALE)
    assert left.exists() is stays
    sweep(open_folder(run, variables), changed + 1 + ABANDONED)
    assert not left.exists()


def test_where_memory_is_no_folder_a_folder_must_be_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_module, "MEMORY", Path("/nowhere"))
    assert hot_folder(run, {}) is None
    with pytest.raises(UsageError, match="name a folder by PHALANX_IN_MEMORY_DIR"):
        open_folder(run, {})


def test_a_run_without_hot_copies_has_no_history_of_them(run: Run) -> None:
    cut(run, 5)
    assert read_history(run) == ([], 0)
    assert not hot_file(run).exists()


def test_going_back_to_a_step_cuts_what_came_after(run: Run) -> None:
    begin_line(run, "a")
    assert counts(read_history(run)[0], "a", 1000)
    cut(run, 40)
    begin_line(run, "b")
    lines = read_history(run)[0]
    assert [counts(lines, "a", step) for step in (40, 41)] == [True, False]
    assert counts(lines, "b", 41)
    cut(run, 20)
    lines = read_history(run)[0]
    assert [counts(lines, "a", step) for step in (20, 21)] == [True, False]
    assert [counts(lines, "b", step) for step in (20, 21)] == [True, False]
    assert not counts(lines, "c", 1)
    note_saved(run, 20)
    assert read_history(run)[1] == 20
    cut(run, 10)
    assert read_history(run)[1] == 10
    forget(run)
    assert not counts(read_history(run)[0], "a", 1)


def test_a_damaged_history_trusts_no_copy(run: Run) -> None:
    begin_line(run, "a")
    hot_file(run).write_text("{")
    assert read_history(run) == ([], 0)


def test_without_room_to_say_which_copies_count_none_does(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_line(run, "a")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hot_module, "write_json", full)
    cut(run, 5)
    assert read_history(run) == ([], 0)
    assert os.listdir(run.path).count("hot.json") == 0


def test_a_run_whose_name_is_no_utf8_has_a_folder_of_its_own(tmp_path: Path) -> None:
    variables = {"PHALANX_IN_MEMORY_DIR": str(tmp_path / "hot")}
    names = [os.fsdecode(tmp_path.as_posix().encode() + name) for name in (b"/\xe9", b"/\xe8", b"/e")]
    assert len({hot_folder(Run(Path(name)), variables) for name in names}) == 3
