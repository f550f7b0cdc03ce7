"""Where hot copies lie, who may read them, and which of them belong to a run's history."""

import os
import shutil
from pathlib import Path

import pytest

from phalanx.errors import UsageError
from phalanx.run import Run
from phalanx.run import in_memory_checkpoint as in_memory_checkpoint_module
from phalanx.run.in_memory_checkpoint import (
    ABANDONED_AFTER_S,
    STALE_AFTER_S,
    begin_epoch,
    create_node_dir,
    delete_history,
    find_node_dir,
    history_path,
    is_private,
    is_valid_copy,
    read_epochs,
    record_checkpoint,
    remove_node_dir,
    remove_stale_dirs,
    truncate_history,
)


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    return {"PHALANX_IN_MEMORY_DIR": str(tmp_path / "memory")}


def test_the_folder_is_for_its_user_alone_and_named_by_run_and_node(run: Run, variables: dict[str, str]) -> None:
    folder = create_node_dir(run, variables)
    assert folder.stat().st_mode & 0o777 == 0o700
    others = {
        find_node_dir(run, {**variables, "PHALANX_NODE_RANK": "1"}),
        find_node_dir(Run(run.path.with_name("other")), variables),
    }
    assert folder not in others
    assert len(others) == 2
    assert create_node_dir(run, variables) == folder


def test_a_run_is_the_same_by_any_way_to_its_directory(
    run: Run, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.path.parent)
    assert find_node_dir(Run(Path("run")), variables) == find_node_dir(run, variables)


def test_a_folder_that_others_may_read_is_refused_and_not_removed(run: Run, variables: dict[str, str]) -> None:
    folder = create_node_dir(run, variables)
    folder.chmod(0o755)
    with pytest.raises(UsageError, match="is not a folder that only this user can read"):
        create_node_dir(run, variables)
    remove_node_dir(run, variables)
    assert folder.is_dir()


def test_a_link_in_the_folders_place_is_not_followed(run: Run, variables: dict[str, str], tmp_path: Path) -> None:
    folder = create_node_dir(run, variables)
    shutil.rmtree(folder)
    (tmp_path / "precious").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "precious")
    assert not is_private(folder)
    remove_node_dir(run, variables)
    assert (tmp_path / "precious").is_dir()


def test_copies_are_removed_with_their_folder(run: Run, variables: dict[str, str]) -> None:
    folder = create_node_dir(run, variables)
    (folder / "step-000000001-a").mkdir()
    remove_node_dir(run, variables)
    remove_node_dir(run, variables)
    assert not folder.exists()


@pytest.mark.parametrize(("age", "begun", "stays"), [(0.5, False, True), (2, False, False), (2, True, True)])
def test_what_a_killed_run_left_is_removed_by_the_next_one(
    run: Run, variables: dict[str, str], tmp_path: Path, age: float, begun: bool, stays: bool
) -> None:
    dead = Run(tmp_path / "dead")
    dead.create()
    left = create_node_dir(dead, variables)
    if begun:
        begin_epoch(dead, "a")
    changed = left.stat().st_mtime
    remove_stale_dirs(create_node_dir(run, variables), changed + age * STALE_AFTER_S)
    assert left.exists() is stays
    remove_stale_dirs(create_node_dir(run, variables), changed + 1 + ABANDONED_AFTER_S)
    assert not left.exists()


def test_where_memory_is_no_folder_a_folder_must_be_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_memory_checkpoint_module, "SHM_DIR", Path("/nowhere"))
    assert find_node_dir(run, {}) is None
    with pytest.raises(UsageError, match="name a folder by PHALANX_IN_MEMORY_DIR"):
        create_node_dir(run, {})


def test_a_run_without_hot_copies_has_no_history_of_them(run: Run) -> None:
    truncate_history(run, 5)
    assert read_epochs(run) == ([], 0)
    assert not history_path(run).exists()


def test_going_back_to_a_step_cuts_what_came_after(run: Run) -> None:
    begin_epoch(run, "a")
    assert is_valid_copy(read_epochs(run)[0], "a", 1000)
    truncate_history(run, 40)
    begin_epoch(run, "b")
    lines = read_epochs(run)[0]
    assert [is_valid_copy(lines, "a", step) for step in (40, 41)] == [True, False]
    assert is_valid_copy(lines, "b", 41)
    truncate_history(run, 20)
    lines = read_epochs(run)[0]
    assert [is_valid_copy(lines, "a", step) for step in (20, 21)] == [True, False]
    assert [is_valid_copy(lines, "b", step) for step in (20, 21)] == [True, False]
    assert not is_valid_copy(lines, "c", 1)
    record_checkpoint(run, 20)
    assert read_epochs(run)[1] == 20
    truncate_history(run, 10)
    assert read_epochs(run)[1] == 10
    delete_history(run)
    assert not is_valid_copy(read_epochs(run)[0], "a", 1)


def test_a_damaged_history_trusts_no_copy(run: Run) -> None:
    begin_epoch(run, "a")
    history_path(run).write_text("{")
    assert read_epochs(run) == ([], 0)


def test_without_room_to_say_which_copies_count_none_does(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_epoch(run, "a")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(in_memory_checkpoint_module, "write_json", full)
    truncate_history(run, 5)
    assert read_epochs(run) == ([], 0)
    assert os.listdir(run.path).count("in_memory.json") == 0


def test_a_run_whose_name_is_no_utf8_has_a_folder_of_its_own(tmp_path: Path) -> None:
    variables = {"PHALANX_IN_MEMORY_DIR": str(tmp_path / "hot")}
    names = [os.fsdecode(tmp_path.as_posix().encode() + name) for name in (b"/\xe9", b"/\xe8", b"/e")]
    assert len({find_node_dir(Run(Path(name)), variables) for name in names}) == 3


def test_with_the_history_goes_what_a_killed_worker_left_of_it(run: Run) -> None:
    begin_epoch(run, "a")
    left = run.path / ".in_memory.json.4711.tmp"
    left.write_text("{")
    delete_history(run)
    assert not left.exists()
    delete_history(run)
