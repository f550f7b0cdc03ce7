"""Text and HTML pages and the plots in them: they fit, they stay small, and they need nobody."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from made_events import made
from make_run import Maker, render_pages, troubled
from phalanx.observe.html_report.chart import (
    MAX_POINTS_PER_SERIES,
    Chart,
    ChartMark,
    ChartSeries,
    downsample,
    encode_json,
    linear_range,
    render_chart,
)
from phalanx.observe.text_report import PAGE_WIDTH
from phalanx.run.event_types import RunWarning, StepDone
from phalanx.run.fields import to_fields


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
    text, _ = render_pages(troubled(tmp_path / "run"))
    assert all(len(line) <= PAGE_WIDTH for line in text.splitlines())
    assert "\x1b" not in text
    for title in ("What ran", "Loss", "Speed", "Step time", "Duration", "Safety", "Recommendations"):
        assert f"\n{title}" in text
    assert "99 steps wasted" in text
    assert "recipe: checkpoint.every" in text
    assert "git 0123456789ab, changed" in " ".join(text.split())


def test_the_html_page_refers_to_nothing_outside(tmp_path: Path) -> None:
    _, html = render_pages(troubled(tmp_path / "run"))
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    assert reader.references == ["data:,"]
    assert "url(" not in html
    assert "@import" not in html
    assert set(re.findall(r"https?://[^\"' ]*", html)) == {"https://github.com/leeoniya/uPlot"}  # in a comment
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert re.sub(r"sha256-[\w+/=]{44}", "HASH", policy[1]) == (
        "default-src 'none'; style-src 'HASH'; script-src 'HASH'; img-src data:"
    )
    assert " style=" not in html
    assert "Permission is hereby granted" in html, "the licence of uPlot goes with its copy"


def test_names_and_messages_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run", total=5, task="<script>alert(1)</script>").start()
    maker.steps(1, 5).event(RunWarning, text='"><img src=x onerror=alert(1)>')
    _, html = render_pages(maker.path)
    assert "<script>alert" not in html
    assert "<img" not in html


def charts_in(html: str) -> dict[str, dict[str, Any]]:
    texts = re.findall(r'<script type="application/json">(.*?)</script>', html)
    return {chart["title"]: chart for chart in map(json.loads, texts)}


def test_the_page_shows_each_kind_of_event_on_the_loss(tmp_path: Path) -> None:
    charts = charts_in(render_pages(troubled(tmp_path / "run"))[1])
    assert list(charts) == ["Loss", "Learning rate", "Gradient norm", "Speed", "Time of a step by part"]
    kinds = {mark["kind"] for mark in charts["Loss"]["marks"]}
    assert kinds == {"restart", "repeated", "nonfinite", "checkpoint", "best"} == charts["Loss"]["markLabels"].keys()


def small_chart(label: str = "training") -> Chart:
    series = ChartSeries(label, np.array([1.0, 2.0, 3.0]), np.array([2.0, math.nan, 1.234567]), "train")
    return Chart("Loss", [series], (0.0, 3.0), (1.0, 2.0), [ChartMark("restart", 2, f"resumed {label}")], log=True)


def test_the_json_of_a_chart_has_null_for_what_is_not_finite_and_few_digits() -> None:
    assert small_chart().to_json() == {
        "title": "Loss",
        "unit": "",
        "log": True,
        "xLabel": "step",
        "xRange": (0.0, 3.0),
        "yRange": (1.0, 2.0),
        "series": [{"label": "training", "color": "train", "style": "line", "x": [1, 2, 3], "y": [2.0, None, 1.2346]}],
        "marks": [{"kind": "restart", "x": 2, "label": "resumed training", "xEnd": None, "y": None}],
        "markLabels": {"restart": "restart"},
    }


def test_a_chart_has_its_values_as_text_too() -> None:
    html = render_chart(small_chart())
    assert (
        'aria-label="Loss, log scale. training: from 2.000 to 1.235, lowest 1.235, highest 2.000; restart: 1."' in html
    )
    assert "<tr><th>training</th><td>2.000</td><td>1.235</td><td>2.000</td><td>1.235</td></tr>" in html


def test_no_text_of_a_chart_ends_its_script_element() -> None:
    hostile = "</script><script>alert(1)//<!--&quot;\u2028"
    html = render_chart(small_chart(hostile))
    assert html.count("</script") == 1
    assert "<!--" not in html
    assert json.loads(encode_json(hostile)) == hostile


def test_a_long_run_has_a_small_page(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run", total=30_000, seconds=0.002).start()
    lines = []
    for step in range(1, 30_001):
        maker.t += 0.002
        loss, norm = maker.true_loss(step) + maker.random.gauss(0, 0.1), 1 + maker.random.random()
        event = made(StepDone, time=maker.t, step=step, loss=loss, grad_norm=norm, units=4096, duration_s=0.002)
        lines.append(json.dumps(to_fields(event)))
    with open(maker.path / "events.jsonl", "a") as file:
        file.write("\n".join(lines) + "\n")
    assert len(render_pages(maker.path)[1]) < 200_000


def test_thinning_keeps_every_peak_and_gap() -> None:
    y = np.zeros(100_000)
    y[12_345], y[54_321] = 7.0, -7.0
    y[80_000:81_000] = math.nan
    x, thinned = downsample(np.arange(100_000.0), y)
    assert len(x) <= MAX_POINTS_PER_SERIES
    assert (np.nanmax(thinned), np.nanmin(thinned)) == (7.0, -7.0)
    assert np.isnan(thinned).any()
    assert (np.diff(x) > 0).all()


@pytest.mark.parametrize("values", [[], [math.nan], [3.0], [0.0, 0.0], [1.0, math.inf]])
def test_bounds_are_an_interval_for_any_series(values: list[float]) -> None:
    low, high = linear_range([np.array(values)], from_zero=False, robust=True)
    assert math.isfinite(low)
    assert low < high < math.inf
