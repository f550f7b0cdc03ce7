"""The run directory: where everything lies, and files that are whole or not there."""

import json
import os
from pathlib import Path

import pytest

from phalanx.errors import DataError, UsageError
from phalanx.run import Run
from phalanx.run import directory as directory_module
from phalanx.run.directory import write_json, write_whole


def test_naming_a_run_creates_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    assert run.events == tmp_path / "run" / "events.jsonl"
    assert not run.path.exists()


def test_a_run_may_be_named_by_a_string() -> None:
    assert Run("runs/mine").result == Path("runs/mine/result.json")  # type: ignore[arg-type]


def test_creating_a_run_makes_its_folders_and_keeps_what_is_there(tmp_path: Path) -> None:
    run = Run(tmp_path / "a" / "run")
    run.create()
    (run.logs / "old.log").touch()
    run.create()
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "logs"]
    assert (run.logs / "old.log").exists()


def test_everything_of_a_run_lies_in_its_directory(tmp_path: Path) -> None:
    run = Run(tmp_path)
    names = [
        "recipe",
        "resolved",
        "plan",
        "cluster",
        "environment",
        "events",
        "logs",
        "checkpoints",
        "result",
        "report",
    ]
    places = [getattr(run, name) for name in names]
    assert all(place.parent == tmp_path for place in places)
    assert len(set(places)) == len(names)


def test_a_directory_without_a_resolved_recipe_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no run here .* `phalanx train RECIPE --run .*` makes one"):
        Run.existing(tmp_path)


def test_a_directory_with_a_resolved_recipe_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").touch()
    assert Run.existing(tmp_path) == Run(tmp_path)


def test_a_file_that_was_not_written_yet_reads_as_none(tmp_path: Path) -> None:
    assert Run(tmp_path).read_json(Run(tmp_path).plan) is None


@pytest.mark.parametrize(("text", "reason"), [("{", "not valid JSON"), ("[1]", "expected a JSON object, found list")])
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, text: str, reason: str) -> None:
    run = Run(tmp_path)
    run.plan.write_text(text)
    with pytest.raises(DataError, match=f"plan.json: {reason}"):
        run.read_json(run.plan)


def test_json_goes_out_and_comes_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    write_json(run.plan, {"a": [1, None, "ü"]})
    assert run.read_json(run.plan) == {"a": [1, None, "ü"]}


def test_writing_replaces_the_old_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "old and longer")
    write_whole(path, "new ü")
    assert path.read_text(encoding="utf-8") == "new ü"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_and_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_never_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    seen = []
    replace = os.replace

    def look_first(source: Path, target: Path) -> None:
        seen.append(json.loads(path.read_text()))
        seen.append(json.loads(Path(source).read_text()))
        replace(source, target)

    monkeypatch.setattr(directory_module.os, "replace", look_first)
    write_json(path, {"new": 2})
    assert seen == [{"old": 1}, {"new": 2}]
