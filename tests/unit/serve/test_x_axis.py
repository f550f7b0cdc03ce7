"""The x axis of a run's charts: steps, time or tokens."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from make_run import healthy
from phalanx.observe.html_report.chart import Chart, ChartMark, ChartSeries
from phalanx.run import Run
from phalanx.serve.access import make_access
from phalanx.serve.live_run import SECONDS_LABEL, LiveRun, XAxes, rescale_charts
from phalanx.serve.run_index import run_id
from serve_browser import Browser

AXES = XAxes(
    step=np.array([0.0, 1.0, 2.0]),
    time=np.array([0.0, 60.0, 120.0]),
    units=np.array([0.0, 500.0, 900.0]),
    unit="tokens",
)


def make_chart(*x: float, label: str = "step") -> Chart:
    line = ChartSeries("line", np.array(x), np.array(x) * 10, "train")
    return Chart("Chart", [line], (0.0, x[-1]), (0.0, 1.0), x_label=label)


@pytest.mark.parametrize(
    ("name", "x", "end", "label"),
    [
        ("step", [1.0, 2.0], 2.0, "step"),
        ("time", [60.0, 120.0], 120.0, "seconds"),
        ("units", [500.0, 900.0], 900.0, "tokens"),
    ],
)
def test_a_chart_of_steps_has_them_where_the_axis_has_their_ends(
    name: str, x: list[float], end: float, label: str
) -> None:
    (chart,) = rescale_charts([make_chart(1.0, 2.0)], AXES, name)
    assert (chart.series[0].x.tolist(), chart.x_range, chart.x_label) == (x, (0.0, end), label)


def test_marks_move_with_the_steps() -> None:
    marks = [ChartMark("repeated", 0.5, "repeated", x_end=1.5), ChartMark("restart", 1.0, "restart")]
    (chart,) = rescale_charts([replace(make_chart(1.0, 2.0), marks=marks)], AXES, "units")
    assert [(mark.x, mark.x_end) for mark in chart.marks] == [(250.0, 700.0), (500.0, None)]


def test_a_restart_is_at_the_time_of_the_first_step_after_it() -> None:
    marks = [ChartMark("restart", 1.0, "restart"), ChartMark("checkpoint", 1.0, "checkpoint")]
    (chart,) = rescale_charts([replace(make_chart(1.0, 2.0), marks=marks)], AXES, "time")
    assert [mark.x for mark in chart.marks] == [120.0, 60.0]


def test_what_nodes_did_after_the_last_step_is_on_the_axis_of_time_only() -> None:
    charts = [make_chart(1.0, 2.0), make_chart(30.0, 90.0, 150.0, label=SECONDS_LABEL)]
    loss, power = rescale_charts(charts, AXES, "time")
    assert power.series[0].x.tolist() == [30.0, 90.0, 150.0]
    assert loss.x_range == power.x_range == (0.0, 150.0)
    loss, power = rescale_charts(charts, AXES, "step")
    assert power.series[0].x.tolist() == [0.5, 1.5]
    assert power.series[0].y.tolist() == [300.0, 900.0]
    assert loss.x_range == power.x_range == (0.0, 2.0)


@pytest.mark.parametrize(("seconds", "label"), [(200.0, "seconds"), (3000.0, "minutes"), (1e6, "hours")])
def test_the_time_is_counted_in_a_unit_of_its_size(seconds: float, label: str) -> None:
    axes = replace(AXES, time=np.array([0.0, 1.0, seconds]))
    assert rescale_charts([make_chart(1.0, 2.0)], axes, "time")[0].x_label == label


def test_the_axes_of_a_run_begin_with_its_start(tmp_path: Path) -> None:
    axes = LiveRun(Run(healthy(tmp_path / "run", total=5))).read_page().axes
    assert axes.step.tolist() == [0, 1, 2, 3, 4, 5]
    assert axes.units.tolist() == [0, 4096, 8192, 12288, 16384, 20480]
    assert axes.time[0] == 0
    assert (np.diff(axes.time) > 0).all()


@pytest.mark.parametrize("given", ["time", "units", "nothing"])
def test_the_page_and_its_stream_have_the_axis_of_the_address(tmp_path: Path, given: str) -> None:
    run = f"run/{run_id(healthy(tmp_path / 'one', total=5))}"
    page = Browser(tmp_path, make_access("127.0.0.1", False, None, demands_token=False)).get(f"/{run}?x={given}").text
    shown = "step" if given == "nothing" else given
    assert f'data-events="{run}/stream?x={shown}"' in page
    assert f'<a href="{run}?x={shown}" aria-current=true>' in page
    label = {"time": "seconds", "units": "tokens", "step": "step"}[shown]
    assert f'"xLabel":"{label}"' in page
