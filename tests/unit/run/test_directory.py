"""The run directory: where everything lies, and files that are whole or not there."""

import os
import shutil
from pathlib import Path

import pytest

from phalanx.errors import DataError, UsageError
from phalanx.run import Run
from phalanx.run.directory import check_output_path, check_run_path, write_atomic, write_json, write_output


def test_creating_a_run_makes_its_folders_and_keeps_what_is_there(tmp_path: Path) -> None:
    run = Run(tmp_path / "a" / "run")
    run.create()
    (run.logs / "old.log").touch()
    run.create()
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "events.jsonl", "logs"]
    assert (run.logs / "old.log").exists()


def test_a_directory_without_a_resolved_recipe_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no run here .* `phalanx train RECIPE --run .*` makes one"):
        Run.open_existing(tmp_path)


@pytest.mark.parametrize("part", ["checkpoints", "checkpoints/step-000000004"])
def test_a_part_of_a_run_that_is_named_as_one_tells_the_run(tmp_path: Path, part: str) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "MANIFEST.json").touch()
    with pytest.raises(UsageError) as refusal:
        Run.open_existing(tmp_path / "run" / part)
    assert str(refusal.value) == f"{tmp_path / 'run' / part}: is inside the run {tmp_path / 'run'}; give that"


@pytest.mark.parametrize(("text", "reason"), [("{", "not valid JSON"), ("[1]", "expected a JSON object, found list")])
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, text: str, reason: str) -> None:
    run = Run(tmp_path)
    run.plan.write_text(text)
    with pytest.raises(DataError, match=f"plan.json: {reason}"):
        run.read_json(run.plan)


def test_writing_replaces_the_old_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_atomic(path, "old and longer")
    write_atomic(path, "new ü")
    assert path.read_text(encoding="utf-8") == "new ü"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_and_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write_atomic(path, "old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_into_no_folder_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        write_atomic(tmp_path / "none" / "a.txt", "new")
    assert raised.value.filename == str(tmp_path / "none" / "a.txt")


@pytest.mark.parametrize("path", ["file", "file/run"])
def test_a_run_is_not_kept_where_a_file_is(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is a file; choose another --run"):
        check_run_path(tmp_path / path)


@pytest.mark.parametrize(
    "files",
    [
        ["recipe.yaml"],
        ["train.py"],
        [".git/config"],
        ["resolved.yaml"],
        ["logs/mine.log"],
        ["checkpoints/model.pt", "logs/mine.log", "recipe.yaml"],
        ["recipe.yaml", "logs/", "checkpoints/"],
        ["events.jsonl", "logs/", "checkpoints/"],
    ],
)
def test_a_run_is_not_kept_in_a_folder_of_the_users(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        path = tmp_path / name
        path.mkdir(exist_ok=True) if name.endswith("/") else path.write_text('{"text": "a data set"}\n')
    with pytest.raises(UsageError, match=r"holds other files, such as .*; choose another --run, for instance .*/run$"):
        check_run_path(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "deep"])
def test_a_folder_whose_events_are_none_is_no_run(tmp_path: Path, kind: str) -> None:
    run = Run(tmp_path)
    run.create()
    run.events.unlink()
    if kind == "pipe":
        os.mkfifo(run.events)
    else:
        run.events.write_text("[" * 60_000)
    assert run.find_foreign_file() == "events.jsonl"


@pytest.mark.parametrize("lost", ["resolved.yaml", "events.jsonl", "logs", "nothing"])
def test_a_run_that_lost_a_file_is_still_a_run(run: Run, lost: str) -> None:
    for path in (run.recipe, run.resolved, run.path / "notes.txt"):
        path.write_text("x")
    run.events.write_text('{"kind": "log_opened", "time": 1.0, "format": 2}\n')
    place = run.path / lost
    if place.is_dir():
        place.rmdir()
    place.unlink(missing_ok=True)
    check_run_path(run.path)


def test_a_start_that_was_killed_early_leaves_what_the_next_may_use(run: Run) -> None:
    run.recipe.write_text("name: x")
    (run.path / ".resolved.yaml.123.tmp").write_text("half")
    check_run_path(run.path)


@pytest.mark.parametrize("folder", ["lost+found", "logs"])
def test_an_empty_disk_may_hold_a_run(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    check_run_path(tmp_path)


def test_an_output_replaces_an_earlier_one_only(tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    check_output_path("--out", path, ["# made by us"])
    for ours in ("", "# made by us\nx: 1\n"):
        path.write_text(ours)
        check_output_path("--out", path, ["# made by us"])
    path.write_text("# my own notes\n")
    with pytest.raises(UsageError, match=r"--out .*out.yaml: exists and was not written by this command"):
        check_output_path("--out", path, ["# made by us"])


def test_an_output_may_be_a_device(tmp_path: Path) -> None:
    check_output_path("--html", Path("/dev/null"), ["x"])
    with pytest.raises(UsageError, match="is a folder; expected a file"):
        check_output_path("--html", tmp_path, ["x"])


def test_an_output_path_that_cannot_be_written_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        check_output_path("--out", Path("/proc/cluster.yaml"), [])
    check_output_path("--out", tmp_path / "new.yaml", [])
    assert not list(tmp_path.iterdir())
    (tmp_path / "empty.yaml").touch()
    check_output_path("--out", tmp_path / "empty.yaml", [])
    assert (tmp_path / "empty.yaml").exists()


def test_a_recipe_in_place_of_a_run_is_named_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: x")
    with pytest.raises(UsageError, match="is a file; expected a run directory"):
        Run.open_existing(tmp_path / "recipe.yaml")


def test_an_output_is_written_to_a_pipe_or_through_a_link_which_stay(tmp_path: Path) -> None:
    """As root a file would replace /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_output(tmp_path / "pipe", "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    (tmp_path / "link").symlink_to("file")
    write_output(tmp_path / "link", "text")
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize("inner", ["events.jsonl", "checkpoints", "logs/attempt-0-rank-0.log", "checkpoints/step-1/f"])
def test_a_link_out_of_a_run_directory_is_refused_by_all_who_open_it(tmp_path: Path, inner: str) -> None:
    """A run may come from another person: what its links lead to is neither read, written nor removed."""
    run = Run(tmp_path / "run")
    run.logs.mkdir(parents=True)
    (run.checkpoints / "step-1").mkdir(parents=True)
    run.resolved.write_text("name: a")
    (run.checkpoints / "step-1" / "MANIFEST.json").touch()
    if inner == "checkpoints":
        shutil.rmtree(run.checkpoints)
    (run.path / inner).symlink_to(tmp_path / "victim")
    for use in (Run.open_existing, check_run_path, lambda path: Run(path).create()):
        with pytest.raises(DataError, match=f"{inner}: is a link to .*victim, out of the run directory"):
            use(run.path)
    assert not (tmp_path / "victim").exists()


def test_links_within_a_run_and_to_a_run_are_followed(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.create()
    (run.path / "newest.log").symlink_to("logs/attempt-0-rank-0.log")
    (run.path / "wandb" / "logs").mkdir(parents=True)
    (run.path / "wandb" / "logs" / "debug-core.log").symlink_to(tmp_path / "log")  # W&B makes it
    (tmp_path / "link").symlink_to(run.path)
    check_run_path(tmp_path / "link")


def test_values_of_another_type_are_left_out_of_a_file_that_a_run_can_do_without(tmp_path: Path) -> None:
    choice = {"key": "precision", "value": "bf16", "reason": "faster"}
    damaged = {"auto_choices": [choice, {"key": "a", "worth": 1}], "trainable_parameters": "x", "session": {}}
    write_json(tmp_path / "plan.json", damaged)
    run = Run(tmp_path)
    assert run.read_json_or_empty(run.plan) == {}
    write_json(run.plan, good := {"auto_choices": [choice], "trainable_parameters": 5, "session": {"optimizer": "SGD"}})
    assert run.read_json_or_empty(run.plan) == good
