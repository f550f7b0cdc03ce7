"""The end of a log and search in it, with bounds on what is read."""

from pathlib import Path

import pytest

from phalanx.run import Run
from phalanx.serve import log_pages
from phalanx.serve.log_pages import list_logs, read_log_tail, render_logs, search_log


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = Run(tmp_path / "run")
    found.create()
    return found


def test_logs_are_listed_by_attempt_and_rank(run: Run) -> None:
    for name in ("attempt-0-rank-0.log", "attempt-2-rank-10.log", "attempt-2-rank-9.log", "other.log"):
        (run.logs / name).touch()
    assert list_logs(run) == ["attempt-2-rank-9.log", "attempt-2-rank-10.log", "attempt-0-rank-0.log"]
    assert list_logs(Run(run.path / "nowhere")) == []


def test_the_tail_begins_with_a_whole_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_pages, "TAIL_BYTES", 15)
    log = tmp_path / "log"
    log.write_text("first line\nsecond line\nthird\n")
    assert read_log_tail(log).lines == ["third"]


@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 1 << 20])
def test_a_search_finds_the_lines_of_every_chunk_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(log_pages, "CHUNK_BYTES", max(chunk, 12))
    log = tmp_path / "log"
    log.write_text("".join(f"Error {number}\nfine\n" for number in range(20)))
    found = search_log(log, "error")
    assert list(found.lines) == [f"Error {number}" for number in range(20)]
    assert found.start == 0


def test_older_matches_are_found_from_where_the_search_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_pages, "MAX_MATCHES", 3)
    monkeypatch.setattr(log_pages, "CHUNK_BYTES", 64)
    log = tmp_path / "log"
    log.write_text("".join(f"x {number}\n" for number in range(40)))
    end, found = None, []
    while end != 0:
        part = search_log(log, "x ", end)
        assert len(part.lines) <= 3
        found, end = [*part.lines, *found], part.start
    assert found == [f"x {number}" for number in range(40)]


def test_a_search_reads_no_more_than_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_pages, "CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(log_pages, "MAX_SEARCHED_BYTES", 4 << 10)
    log = tmp_path / "log"
    log.write_text("needle\n" + "hay\n" * 10_000)
    part = search_log(log, "needle")
    assert list(part.lines) == []
    assert part.start >= log.stat().st_size - (5 << 10)


def test_a_page_escapes_markup_and_control_characters(run: Run) -> None:
    (run.logs / "attempt-0-rank-0.log").write_text("<script>alert(1)</script>\x1b[31mred\n")
    page = render_logs(run, "0123", None, "", None)
    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page
    assert "\x1b" not in page


def test_a_log_that_is_a_link_is_not_read(run: Run, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("password\n")
    (run.logs / "attempt-0-rank-0.log").symlink_to(tmp_path / "secret")
    page = render_logs(run, "0123", None, "", None)
    assert "password" not in page
    assert "found a link" in page


def test_a_name_that_is_no_log_of_the_run_shows_the_first(run: Run, tmp_path: Path) -> None:
    (tmp_path / "secret.log").write_text("password\n")
    (run.logs / "attempt-0-rank-0.log").write_text("hello\n")
    page = render_logs(run, "0123", "../../secret.log", "", None)
    assert "password" not in page
    assert "hello" in page


def test_a_run_without_output_says_so(run: Run) -> None:
    assert "No worker has printed anything yet" in render_logs(run, "0123", None, "", None)
