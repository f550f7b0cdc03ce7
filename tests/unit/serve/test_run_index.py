"""Finding runs below directories, and keeping their rows up to date."""

import shutil
from pathlib import Path

import pytest

from make_run import Maker, healthy
from phalanx.serve import run_index
from phalanx.serve.run_index import SEARCH_INTERVAL_S, RunIndex, find_run_dirs, run_id
from settable_clock import SettableClock


def test_runs_are_found_at_any_depth_and_nothing_within_them(tmp_path: Path) -> None:
    for path in ("a", "b/c/d", "b/e"):
        healthy(tmp_path / path)
    (tmp_path / "a" / "telemetry").mkdir()
    healthy(tmp_path / "a" / "telemetry" / "inner")
    healthy(tmp_path / ".hidden")
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    assert sorted(find_run_dirs(tmp_path)) == [tmp_path / "a", tmp_path / "b/c/d", tmp_path / "b/e"]
    assert list(find_run_dirs(tmp_path / "a")) == [tmp_path / "a"]
    assert list(find_run_dirs(tmp_path / "nowhere")) == []


def test_a_new_run_appears_and_a_removed_one_vanishes_with_the_next_search(tmp_path: Path) -> None:
    clock = SettableClock(100.0)
    healthy(tmp_path / "a")
    index = RunIndex([tmp_path], clock)
    index.update()
    assert [row.path for row in index.rows.values()] == [tmp_path / "a"]
    healthy(tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    clock.now += SEARCH_INTERVAL_S
    index.update()
    assert index.find(run_id(tmp_path / "a")) is None
    assert index.find(run_id(tmp_path / "b")) is not None


def test_a_run_that_is_written_changes_with_the_next_look(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run").start()
    index = RunIndex([tmp_path], SettableClock(100.0))
    index.update()
    maker.step(1)
    index.update()
    (row,) = index.rows.values()
    assert row.step == 1


def test_rows_appear_before_the_last_run_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        healthy(tmp_path / str(number))
    index = RunIndex([tmp_path], SettableClock(100.0))
    seen = []
    read = run_index.read_run_row

    def read_and_look(*arguments: object) -> object:
        seen.append(len(index.rows))
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(run_index, "read_run_row", read_and_look)
    index.update()
    assert seen == [0, 1, 1]
    assert len(index.rows) == 3


def test_an_id_is_of_one_directory_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_id(Path("runs/a")) == run_id(tmp_path / "runs" / "x" / ".." / "a")
    assert run_id(Path("runs/a")) != run_id(Path("runs/b"))
