"""The end of a log, with bounds on what is read."""

from pathlib import Path

from phalanx.run import Run
from phalanx.serve.job_pages import list_logs, read_log_tail, render_log_tail, render_logs


def test_logs_are_listed_by_attempt_and_rank(run: Run) -> None:
    for name in ("attempt-0-rank-0.log", "attempt-2-rank-10.log", "attempt-2-rank-9.log", "other.log"):
        (run.logs / name).touch()
    assert list_logs(run) == ["attempt-2-rank-9.log", "attempt-2-rank-10.log", "attempt-0-rank-0.log"]
    assert list_logs(Run(run.path / "nowhere")) == []


def test_the_tail_begins_with_a_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("first line\nsecond line\nthird\n")
    assert read_log_tail(log, 15) == ["third"]


def test_a_page_escapes_markup_and_control_characters(run: Run) -> None:
    (run.logs / "attempt-0-rank-0.log").write_text("<script>alert(1)</script>\x1b[31mred\n")
    page = render_logs(run, "0123", None)
    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page
    assert "\x1b" not in page


def test_a_log_that_is_a_link_is_not_read(run: Run, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("password\n")
    (run.logs / "attempt-0-rank-0.log").symlink_to(tmp_path / "secret")
    page = render_logs(run, "0123", None)
    assert "password" not in page
    assert "found a link" in page


def test_a_name_that_is_no_log_of_the_run_shows_the_first(run: Run, tmp_path: Path) -> None:
    (tmp_path / "secret.log").write_text("password\n")
    (run.logs / "attempt-0-rank-0.log").write_text("hello\n")
    page = render_logs(run, "0123", "../../secret.log")
    assert "password" not in page
    assert "hello" in page


def test_the_page_of_a_run_has_the_last_lines_of_the_newest_attempt_escaped(
    run: Run,
) -> None:
    assert "No worker has printed anything yet" in render_log_tail(run)
    (run.logs / "attempt-0-rank-0.log").write_text("an older attempt\n")
    (run.logs / "attempt-1-rank-0.log").write_text("early\n" * 100 + "<b>last</b>\x1b[31m\n")
    tail = render_log_tail(run, max_bytes=64)
    assert "&lt;b&gt;last&lt;/b&gt;" in tail
    assert "rank 0, attempt 1" in tail
    assert tail.count("early") < 10
    assert not [part for part in ("older", "<b>last", "\x1b") if part in tail]


def test_logs_behind_a_link_are_not_read(run: Run, tmp_path: Path) -> None:
    """A run may be changed while its page is open."""
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "attempt-0-rank-0.log").write_text("password\n")
    run.logs.rmdir()
    run.logs.symlink_to(tmp_path / "secrets")
    for page in (
        render_log_tail(run),
        render_logs(run, "0123", None),
    ):
        assert "password" not in page
        assert "found a link" in page
