"""Text and HTML pages and the plots in them: they fit, they stay small, and they need nobody."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_events import made
from make_run import Maker, healthy, troubled
from phalanx.observe.history import read_history
from phalanx.observe.html_report.report import render_report_html
from phalanx.observe.html_report.svg import (
    MAX_POINTS_PER_LINE,
    axis_range,
    downsample,
    format_ticks,
    log_ticks,
    nice_ticks,
)
from phalanx.observe.recommendations import find_recommendations
from phalanx.observe.summary import build_summary
from phalanx.observe.text_report import PAGE_WIDTH, render_report_text
from phalanx.run import Run
from phalanx.run.event_types import RunWarning, StepDone
from phalanx.run.fields import to_fields


def pages(path: Path) -> tuple[str, str]:
    run = Run(path)
    history = read_history(run.events)
    summary = build_summary(run, history)
    advices = find_recommendations(summary, history)
    return render_report_text(summary, advices), render_report_html(summary, history, advices)


class Reader(HTMLParser):
    """Collects what a page refers to, and whether its tags are closed in order."""

    VOID = ("meta", "link", "br", "img", "input", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.references += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action", "data")
        ]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_text_page_fits_and_has_every_section(tmp_path: Path) -> None:
    text, _ = pages(troubled(tmp_path / "run"))
    assert all(len(line) <= PAGE_WIDTH for line in text.splitlines())
    assert "\x1b" not in text
    for title in ("What ran", "Loss", "Speed", "Step time", "Duration", "Safety", "Recommendations"):
        assert f"\n{title}" in text
    assert "99 steps wasted" in text
    assert "recipe: checkpoint.every" in text
    assert "git 0123456789ab, changed" in " ".join(text.split())


def test_a_healthy_run_is_told_that_nothing_stands_out(tmp_path: Path) -> None:
    text, html = pages(healthy(tmp_path / "run"))
    assert "No issues found." in text
    assert "No issues found." in html


def test_the_html_page_refers_to_nothing_outside(tmp_path: Path) -> None:
    _, html = pages(troubled(tmp_path / "run"))
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    assert reader.references == ["data:,"]
    assert "url(" not in html
    assert "@import" not in html
    assert set(re.findall(r"https?://[^\"' ]*", html)) == {"http://www.w3.org/2000/svg"}  # a name, never fetched
    assert "default-src 'none'" in html


def test_names_and_messages_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run", total=5, task="<script>alert(1)</script>")
    maker.start()
    maker.steps(1, 5)
    maker.event(RunWarning, text='"><img src=x onerror=alert(1)>')
    _, html = pages(maker.path)
    assert "<script>alert" not in html
    assert "<img" not in html


def test_the_page_shows_each_kind_of_event_on_the_loss(tmp_path: Path) -> None:
    _, html = pages(troubled(tmp_path / "run"))
    for kind in ("restart", "redone", "guard", "checkpoint", "best"):
        assert re.search(rf'class="{kind}"[^>]*><title>', html), kind


def test_a_long_run_has_a_small_page(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run", total=30_000, seconds=0.002)
    maker.start()
    lines = []
    for step in range(1, 30_001):
        maker.t += 0.002
        loss, norm = maker.true_loss(step) + maker.random.gauss(0, 0.1), 1 + maker.random.random()
        event = made(StepDone, time=maker.t, step=step, loss=loss, grad_norm=norm, units=4096, duration_s=0.002)
        lines.append(json.dumps(to_fields(event)))
    with open(maker.path / "events.jsonl", "a") as file:
        file.write("\n".join(lines) + "\n")
    assert len(pages(maker.path)[1]) < 200_000


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e9), st.integers(2, 9))
def test_ticks_are_few_and_within_the_axis(low: float, length: float, about: int) -> None:
    ticks = nice_ticks(low, low + length, about)
    assert 1 <= len(ticks) <= 2 * about + 3
    assert all(low - 1e-6 * length - 1e-9 <= tick <= low + length * (1 + 1e-6) + 1e-9 for tick in ticks)
    assert len(format_ticks(ticks)) == len(ticks)


def test_tick_labels_are_written_alike() -> None:
    assert format_ticks([0, 0.5, 1.0]) == ["0", "0.5", "1.0"]
    assert format_ticks([0, 5000, 10_000]) == ["0", "5k", "10k"]
    assert format_ticks([0, 5e-4, 1e-3]) == ["0", "5e-4", "1e-3"]
    assert format_ticks([100, 200, 300]) == ["100", "200", "300"]


def test_log_ticks_are_powers_of_ten() -> None:
    assert log_ticks(0.5, 2000.0) == [1.0, 10.0, 100.0, 1000.0]
    assert log_ticks(1.0, 9.0) == [1.0, 2.0, 5.0]


def test_thinning_keeps_every_peak_and_gap() -> None:
    y = np.zeros(100_000)
    y[12_345], y[54_321] = 7.0, -7.0
    y[80_000:81_000] = math.nan
    x, thinned = downsample(np.arange(100_000.0), y)
    assert len(x) <= MAX_POINTS_PER_LINE
    assert (np.nanmax(thinned), np.nanmin(thinned)) == (7.0, -7.0)
    assert np.isnan(thinned).any()
    assert (np.diff(x) > 0).all()


@pytest.mark.parametrize("values", [[], [math.nan], [3.0], [0.0, 0.0], [1.0, math.inf]])
def test_bounds_are_an_interval_for_any_series(values: list[float]) -> None:
    low, high = axis_range([np.array(values)], from_zero=False, robust=True)
    assert math.isfinite(low)
    assert low < high < math.inf


def test_one_slow_step_does_not_squeeze_the_others() -> None:
    values = np.ones(500)
    values[0] = 100.0
    assert axis_range([values], from_zero=True, robust=True)[1] < 1.5
