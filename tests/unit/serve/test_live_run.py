"""A run's page while the run is written."""

import shutil
from pathlib import Path

import pytest

from fake_nodes import add_minute
from make_run import T0, Maker, healthy, troubled
from phalanx.errors import DataError
from phalanx.observe.history import read_history
from phalanx.observe.html_report.report import render_sections
from phalanx.observe.recommendations import find_recommendations
from phalanx.observe.summary import build_summary
from phalanx.run import Run
from phalanx.serve import live_run
from phalanx.serve.live_run import LiveRun, LiveRuns
from settable_clock import SettableClock


class Clock:
    """Moves on with every look."""

    def __init__(self, step: float = 0.0):
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_the_page_has_the_sections_of_the_report(tmp_path: Path) -> None:
    run = Run(troubled(tmp_path / "run"))
    history = read_history(run.events)
    summary = build_summary(run, history)
    page = LiveRun(run, lambda: 0.0).read_page()
    report = render_sections(summary, history, find_recommendations(summary, history))
    assert page.sections == report
    assert page.charts[0].title == "Loss"
    assert page.share_read == 1


def test_a_step_that_was_added_is_on_the_next_page(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run").start()
    clock = Clock()
    live = LiveRun(Run(maker.path), clock)
    before = live.read_page()
    maker.step(1)
    clock.now += 60
    after = live.read_page()
    assert after.version == before.version + 1
    assert "1 of 300 steps" in after.sections["outcome"]


def test_a_page_that_nothing_was_added_to_keeps_its_version(tmp_path: Path) -> None:
    clock = Clock()
    live = LiveRun(Run(healthy(tmp_path / "run")), clock)
    version = live.read_page().version
    clock.now += 60
    assert live.read_page().version == version


def test_two_browsers_share_one_reading(tmp_path: Path) -> None:
    runs = LiveRuns(Clock())
    run = Run(healthy(tmp_path / "run"))
    assert runs.find(run) is runs.find(run)


def test_a_long_run_is_shown_in_part_until_it_is_read(tmp_path: Path) -> None:
    clock = Clock(step=live_run.READ_BUDGET_S / 100)  # a hundred events take as long as reading may
    live = LiveRun(Run(healthy(tmp_path / "run")), clock)
    shares = []
    for _ in range(12):
        shares.append(live.read_page().share_read)
        clock.now += 60
    assert 0 < shares[0] < 0.5
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert "300 of 300 steps" in live.read_page().sections["outcome"]


def test_a_run_that_was_replaced_is_read_from_its_start(tmp_path: Path) -> None:
    clock = Clock()
    live = LiveRun(Run(healthy(tmp_path / "run")), clock)
    live.read_page()
    shutil.rmtree(tmp_path / "run")
    Maker(tmp_path / "run").start().step(1)
    clock.now += 60
    assert "1 of 300 steps" in live.read_page().sections["outcome"]


def test_a_run_that_vanishes_keeps_its_last_page(tmp_path: Path) -> None:
    clock = Clock()
    live = LiveRun(Run(healthy(tmp_path / "run")), clock)
    live.read_page()
    shutil.rmtree(tmp_path / "run")
    clock.now += 60
    assert "300 of 300 steps" in live.read_page().sections["outcome"]


def test_events_of_another_format_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"kind": "log_opened", "format": 999, "phalanx_version": "9", "time": 1}\n')
    with pytest.raises(DataError, match="format 999"):
        LiveRun(Run(tmp_path)).read_page()


def test_runs_that_were_not_looked_at_for_long_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_run, "MAX_OPEN_STEPS", 350)
    runs = LiveRuns(Clock())
    first, second = (Run(healthy(tmp_path / name)) for name in "ab")
    before = runs.find(first)
    before.read_page()
    runs.find(second).read_page()
    runs.find(second)
    assert runs.find(first) is not before


def test_a_run_is_running_while_it_is_written_and_incomplete_afterwards(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run").start().steps(1, 3)
    clock, wall = SettableClock(0.0), SettableClock((maker.path / "events.jsonl").stat().st_mtime)
    live = LiveRun(Run(maker.path), clock, wall)
    assert '<span class="status running">running</span>' in live.read_page().sections["outcome"]
    clock.now, wall.now = 600.0, wall.now + 600
    assert '<span class="status incomplete">' in live.read_page().sections["outcome"]


def test_a_minute_of_telemetry_is_on_the_page_while_a_step_takes_long(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run").start().step(1)
    (maker.path / "telemetry").mkdir()
    clock = Clock()
    live = LiveRun(Run(maker.path), clock)
    assert "CPU power" not in [chart.title for chart in live.read_page().charts]
    add_minute(maker.path, "node-1", T0 + 600, watts=100.0)
    clock.now += 60
    (power,) = [chart for chart in live.read_page().charts if chart.title == "CPU power"]
    assert power.series[0].x.tolist() == [630.0]
