"""The row of a run in the list: read from the ends of its events, whatever their length."""

import json
import os
import time
from pathlib import Path

import pytest

from make_run import Maker, healthy, troubled
from phalanx.run import Run
from phalanx.run.event_types import EvaluationDone, RunEnded, StepDone
from phalanx.serve import run_index
from phalanx.serve.run_index import END_BYTES, RUNNING_WITHIN_S, read_run_row


@pytest.mark.parametrize("end_bytes", [END_BYTES, 4096], ids=["whole", "ends only"])
def test_a_finished_run_has_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end_bytes: int) -> None:
    monkeypatch.setattr(run_index, "END_BYTES", end_bytes)
    row = read_run_row(Run(healthy(tmp_path / "run")))
    assert row.status(time.time()) == "done"
    assert (row.step, row.total_steps, row.world_size, row.device) == (300, 300, 1, "cpu")
    assert row.loss == pytest.approx(1.4, abs=0.1)
    assert row.units_per_s == pytest.approx(4096 / 0.4, rel=0.05)


def test_what_was_added_gives_the_row_of_the_whole_file(tmp_path: Path) -> None:
    path = troubled(tmp_path / "run")
    lines = (path / "events.jsonl").read_text().splitlines(keepends=True)
    (path / "events.jsonl").write_text("")
    row = None
    for first in range(0, len(lines), 7):
        with open(path / "events.jsonl", "a") as file:
            file.writelines(lines[first : first + 7])
            file.write(lines[first + 7][:20] if first + 7 < len(lines) else "")
            file.flush()
            row = read_run_row(Run(path), row)
        if first + 7 < len(lines):
            os.truncate(path / "events.jsonl", (path / "events.jsonl").stat().st_size - 20)
    whole = read_run_row(Run(path))
    assert row is not None
    for name in ("step", "total_steps", "world_size", "loss", "ended_as", "last_event_at", "validation_loss"):
        assert getattr(row, name) == getattr(whole, name), name


def test_a_line_that_was_torn_at_the_last_look_is_read_when_it_is_whole(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run").start().step(1)
    text = (maker.path / "events.jsonl").read_bytes()
    (maker.path / "events.jsonl").write_bytes(text[:-30])
    before = read_run_row(Run(maker.path))
    with open(maker.path / "events.jsonl", "ab") as file:
        file.write(text[-30:])
    assert before.step == 0
    assert read_run_row(Run(maker.path), before).step == 1


def test_a_run_without_an_end_is_running_while_it_is_written(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run").start().step(1)
    row = read_run_row(Run(maker.path))
    assert row.status(row.last_written_at + RUNNING_WITHIN_S - 1) == "running"
    assert row.status(row.last_written_at + RUNNING_WITHIN_S + 1) == "incomplete"


def test_telemetry_shows_that_a_run_lives_within_a_long_step(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run").start()
    os.utime(maker.path / "events.jsonl", (1000, 1000))
    (maker.path / "telemetry").mkdir()
    (maker.path / "telemetry" / "node-1.jsonl").write_text("{}\n")
    assert read_run_row(Run(maker.path)).status(time.time()) == "running"


def test_a_run_that_was_resumed_after_its_end_is_not_over(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run").start().step(1).event(RunEnded, status="interrupted", step=1)
    assert read_run_row(Run(maker.path)).ended_as == "interrupted"
    maker.t += 10
    maker.start(from_step=1)
    assert read_run_row(Run(maker.path)).ended_as is None


@pytest.mark.parametrize("content", [b"", b"\x00" * 5000, b"{}\n" * 3, b"[" * 100_000 + b"\n", b'{"kind": "step"}\n'])
def test_a_file_of_something_else_is_a_run_that_has_not_started(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "events.jsonl").write_bytes(content)
    row = read_run_row(Run(tmp_path))
    assert (row.step, row.status(time.time())) == (0, "not started")


def test_events_that_are_a_link_or_a_pipe_are_not_opened(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"kind": "step"}))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "events.jsonl").symlink_to(secret)
    (tmp_path / "b").mkdir()
    os.mkfifo(tmp_path / "b" / "events.jsonl")
    for name in ("a", "b"):
        row = read_run_row(Run(tmp_path / name))
        assert row.status(time.time()) == "unreadable"
        assert ("is a link" if name == "a" else "expected a file") in str(row.problem)


def test_a_loss_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run").start().event(StepDone, step=1, loss=None).event(EvaluationDone, step=1, loss=None)
    row = read_run_row(Run(maker.path))
    assert (row.step, row.loss, row.validation_loss) == (1, None, None)
