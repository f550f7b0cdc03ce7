"""The page of one run, kept up to date: events are read as they are added, and the parts of the page that changed get a
new version. Charts of its nodes come from the minutes that their agents append to RUN/telemetry."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import numpy as np

from phalanx import formatting
from phalanx.errors import DataError
from phalanx.observe.history import Floats, HistoryBuilder, RunHistory, as_float
from phalanx.observe.html_report.chart import Chart, ChartSeries, linear_range
from phalanx.observe.html_report.report import render_report_body, render_sections
from phalanx.observe.html_report.run_charts import build_run_charts
from phalanx.observe.recommendations import find_recommendations
from phalanx.observe.summary import build_summary
from phalanx.run import EventTail, Run
from phalanx.run.telemetry_minutes import NodeMinute, NodeMinuteTail, Rollups, ValueRollup
from phalanx.serve.job_pages import render_log_tail
from phalanx.serve.run_index import RUNNING_WITHIN_S, stat_run

READ_BUDGET_S = 0.5
"""Seconds of reading after which a page shows what was read so far: a long run takes minutes."""
RENDER_SHARE, CATCH_UP_SHARE = 0.2, 0.5
"""Share of the time that rendering may take: pages of long runs are renewed less often. More until all is read."""
MIN_INTERVAL_S = 0.5
CATCH_UP_BUDGET_S = 2.0
"""Seconds that each later look may read: the first part is shown meanwhile."""
MAX_OPEN_RUNS = 16
MAX_OPEN_STEPS = 2_000_000
"""Steps of all open runs together: some 300 MB. The run that was asked for last stays open, however long it is."""
X_NAMES = ("step", "time", "units")
"""Values of `x` in the address of a run's page; the first is the default."""
SECONDS_LABEL = "seconds"
"""`x_label` of charts over seconds since the start, before they are rescaled; all others are over steps."""
TIME_UNITS = (("hours", 3600.0, 5.0), ("minutes", 60.0, 5.0), (SECONDS_LABEL, 1.0, 0.0))
"""Label, seconds, and the number of them from which on an axis counts them."""


@dataclass(frozen=True)
class XAxes:
    """Values that belong together, ascending: those of the start, and of the end of each step. `time` is seconds since
    the start; `units` are tokens, or samples."""

    step: Floats
    time: Floats
    units: Floats
    unit: str


@dataclass(frozen=True)
class RunPage:
    """What the page of a run shows. `sections`: HTML by the id of its element (`render_report_body`)."""

    version: int
    title: str
    sections: Mapping[str, str]
    charts: Sequence[Chart]
    """Over steps, those of nodes over seconds."""
    axes: XAxes
    share_read: float

    def rescale_charts(self, x_name: str) -> Sequence[Chart]:
        """The charts over one of X_NAMES."""
        return rescale_charts(self.charts, self.axes, x_name)


class LiveRun:
    """Reads a run and renders its page. Threads may share it."""

    def __init__(
        self, run: Run, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ):
        self.run = run
        self._clock, self._wall_clock = clock, wall_clock
        self._lock = threading.Lock()
        self._page: RunPage | None = None
        self._next_at = 0.0
        self._open()

    def read_page(self) -> RunPage:
        """The page as of now; at most MIN_INTERVAL_S old. DataError where another version wrote the events."""
        with self._lock:
            if self._page is None or self._clock() >= self._next_at:
                started = self._clock()
                self._update()
                assert self._page is not None
                share = RENDER_SHARE if self._page.share_read == 1 else CATCH_UP_SHARE
                self._next_at = started + max(MIN_INTERVAL_S, (self._clock() - started) / share)
            assert self._page is not None
            return self._page

    @property
    def num_steps(self) -> int:
        return len(self._builder.step_numbers)

    def _open(self) -> None:
        self._tail, self._builder = EventTail(self.run.events), HistoryBuilder()
        self._node_charts = NodeCharts(self.run)
        self._inode, self._size = -1, 0
        self._seen: tuple[object, ...] = ()

    def _update(self) -> None:
        state, written_at = stat_run(self.run)
        inode, size = (state.inode, state.size) if state else (-1, 0)
        if self._page is not None and not self.run.path.is_dir():
            return  # it was moved or removed; what was read of it stays
        if inode != self._inode or size < self._size:  # another file, as after a move
            self._open()
            self._inode = inode
        is_written = self._wall_clock() - written_at < RUNNING_WITHIN_S
        files = (self.run.resolved, self.run.plan, self.run.result)
        # what was written includes telemetry, while a step takes long
        seen = (size, written_at, is_written, *map(_change_of, files))
        if self._page is not None and self._page.share_read == 1 and seen == self._seen:
            return
        self._seen = seen
        until = self._clock() + (READ_BUDGET_S if self._page is None else CATCH_UP_BUDGET_S)
        for event in self._tail.read():
            self._builder.add_event(event)
            if self._clock() >= until:
                break
        self._size = size
        is_whole = self._clock() < until or not size
        share = 1.0 if is_whole else min(1.0, self._tail.bytes_read / size)
        history = replace(self._builder.build_history(), num_unreadable_lines=self._tail.num_unreadable)
        self._page = self._render(history, share, is_written)

    def _render(self, history: RunHistory, share_read: float, is_written: bool) -> RunPage:
        summary = build_summary(self.run, history)
        recommendations = find_recommendations(summary, history)
        if summary.status == "incomplete" and is_written:
            summary = replace(summary, status="running")  # a report, read later, cannot tell
        sections = render_sections(summary, history, recommendations)
        version = self._page.version + 1 if self._page else 1
        now, charts = self._wall_clock(), build_run_charts(summary, history)
        if charts:
            self._node_charts.read()
            charts += self._node_charts.build(history.first_event_at or 0.0, now)
        axes = make_axes(history, summary.speed.unit)
        return RunPage(version, summary.run_info.name, sections, charts, axes, share_read)


def render_run(page: RunPage, run: Run, address: str, x_name: str) -> str:
    """The page of a run: the report, its charts over one of X_NAMES, and the end of a log."""
    note = f'<div id="reading">{render_reading_note(page)}</div>'
    choice = render_axis_choice(page.axes.unit, x_name, address)
    logs = f'<h2>Log</h2><div id="log-tail">{render_log_tail(run)}</div>'
    logs += f'<p><a href="{escape(address)}/logs">Logs of all workers</a></p>'
    return note + render_report_body(page.sections, page.rescale_charts(x_name), choice) + logs


def render_reading_note(page: RunPage) -> str:
    """How much of a long run is read."""
    if page.share_read >= 1:
        return ""
    share = formatting.format_percent(page.share_read)
    return f'<p class="note">Reading the events: {share}. What follows is the run up to about there.</p>'


class LiveRuns:
    """The runs of the pages that were asked for lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, LiveRun] = OrderedDict()

    def find(self, run: Run) -> LiveRun:
        with self._lock:
            found = self._open.pop(run.path, None) or LiveRun(run, self._clock)
            self._open[run.path] = found
            while len(self._open) > 1:
                num_steps = sum(live.num_steps for live in self._open.values())
                if len(self._open) <= MAX_OPEN_RUNS and num_steps <= MAX_OPEN_STEPS:
                    break
                self._open.popitem(last=False)
            return found


def _change_of(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return "-"
    return f"{found.st_mtime_ns}.{found.st_size}"


MAX_NODES = 64
MAX_READ_BYTES = 8 << 20
"""Of all files together, from their ends: it takes half a second, and is 14 hours of a node with 8 GPUs."""


@dataclass(frozen=True)
class _Quantity:
    """What a chart shows; of `columns` the first that a reading has, times `scale`."""

    title: str
    unit: str
    columns: tuple[str, ...]
    scale: float = 1.0


GPU_QUANTITIES = (
    _Quantity("GPU power", "W", ("power_mean_w", "power_instant_w")),
    _Quantity("GPU utilization", "%", ("utilization",), 100.0),
    _Quantity("GPU memory used", "GB", ("memory_used_bytes",), 1e-9),
)
HOST_QUANTITIES = (
    _Quantity("CPU power", "W", ("cpu_power_w",)),
    _Quantity("CPU utilization", "%", ("cpu_utilization",), 100.0),
    _Quantity("Memory used", "GB", ("memory_used_bytes",), 1e-9),
)
_STATISTIC_LINES = (("max", "highest", "validation"), ("mean", "mean", "train"), ("min", "lowest", "other"))
"""Fields of ValueRollup, their labels and colors."""


class NodeCharts:
    """Reads the minutes as they are added, and keeps of each the lowest, mean and highest of all GPUs (or of all nodes,
    where none has GPUs): the charts of 64 nodes are as small as those of one."""

    def __init__(self, run: Run):
        self._run = run
        self._tails: dict[Path, NodeMinuteTail] = {}
        self._values: dict[_Quantity, dict[float, ValueRollup]] = {}
        self._has_gpus = self._is_estimate = False

    def read(self) -> None:
        """Read what was added since the last call. Files that are none are left out: others may have made the run."""
        paths = sorted(self._run.telemetry.glob("*.jsonl"))[:MAX_NODES]
        for path in paths:
            if path not in self._tails:
                self._tails[path] = NodeMinuteTail(path, MAX_READ_BYTES // len(paths))
            try:
                for minute in self._tails[path].read():
                    self._add(minute)
            except (OSError, DataError):
                continue

    def build(self, start: float, end: float) -> Iterator[Chart]:
        """Yield charts of the minutes between two times (unix seconds). Their x is seconds since `start`."""
        for quantity in GPU_QUANTITIES if self._has_gpus else HOST_QUANTITIES:
            minutes = sorted(item for item in self._values.get(quantity, {}).items() if start <= item[0] <= end)
            if not minutes:
                continue
            x = np.array([time - start for time, _ in minutes])
            is_single = all(value.num_readings == 1 for _, value in minutes)
            series = [
                ChartSeries(
                    quantity.title if is_single else label,
                    x,
                    np.array([as_float(getattr(value, name)) for _, value in minutes]),
                    color,
                )
                for name, label, color in _STATISTIC_LINES
                if name == "mean" or not is_single
            ]
            is_estimate = self._is_estimate and quantity.title == "CPU power"
            yield Chart(
                quantity.title,
                series,
                (0.0, float(x[-1])),
                linear_range([each.y for each in series], from_zero=True),
                unit=f"{quantity.unit} (estimated)" if is_estimate else quantity.unit,
                x_label=SECONDS_LABEL,
            )

    def _add(self, minute: NodeMinute) -> None:
        self._has_gpus = self._has_gpus or bool(minute.devices)
        self._is_estimate = self._is_estimate or minute.cpu_power_is_estimate
        middle = minute.time + minute.duration_s / 2
        for quantity in HOST_QUANTITIES:
            self._add_value(quantity, middle, minute.host)
        for device in minute.devices.values():
            for quantity in GPU_QUANTITIES:
                self._add_value(quantity, middle, device)

    def _add_value(self, quantity: _Quantity, time: float, rollups: Rollups) -> None:
        found = next((rollups.values[column] for column in quantity.columns if column in rollups.values), None)
        if found is None:
            return
        value, minutes = found.mean * quantity.scale, self._values.setdefault(quantity, {})
        before = minutes.get(time, ValueRollup(value, value, value, 0))
        count = before.num_readings + 1
        mean = before.mean + (value - before.mean) / count
        minutes[time] = ValueRollup(min(before.min, value), mean, max(before.max, value), count)


def make_axes(history: RunHistory, unit: str) -> XAxes:
    """The axes of a run. Where the clock was set back, time stays the same."""
    steps, start = history.steps, history.first_event_at or 0.0
    columns = (steps.step, np.maximum.accumulate(steps.time - start), np.cumsum(np.nan_to_num(steps.tokens)))
    step, time, units = (np.concatenate(([0.0], column)) for column in columns)
    return XAxes(step, time, units, unit)


def rescale_charts(charts: Sequence[Chart], axes: XAxes, name: str) -> list[Chart]:
    """Charts over one of X_NAMES. What was read after the last step shows on the axis of time only."""
    end_s = max([float(axes.time[-1]), *(chart.x_range[1] for chart in charts if chart.x_label == SECONDS_LABEL)])
    time_label, size = next((label, size) for label, size, least in TIME_UNITS if end_s / size >= least)
    targets = {"step": (axes.step, "step"), "time": (axes.time / size, time_label), "units": (axes.units, axes.unit)}
    target, label = targets[name]
    x_range = (0.0, max(end_s / size if name == "time" else float(target[-1]), 1e-3))

    def rescale(chart: Chart) -> Chart:
        is_timed = chart.x_label == SECONDS_LABEL
        if name == "step" and not is_timed:
            return chart
        source = axes.time if is_timed else axes.step

        def convert(x: Floats) -> Floats:
            return np.round(x / size if is_timed and name == "time" else np.interp(x, source, target), 4)

        series = []
        for line in chart.series:
            kept = line.x <= (x_range[1] * size if is_timed and name == "time" else source[-1])
            series.append(replace(line, x=convert(line.x[kept]), y=line.y[kept]))
        marks = []
        for mark in chart.marks:
            # a restart is at the time of the first step after it: its own step has ended long before
            x = mark.x + (mark.kind == "restart" and name == "time")
            x, x_end = convert(np.array([x, x if mark.x_end is None else mark.x_end])).tolist()
            marks.append(replace(mark, x=x, x_end=None if mark.x_end is None else x_end))
        return replace(chart, series=series, marks=marks, x_range=x_range, x_label=label)

    return [rescale(chart) for chart in charts]


def render_axis_choice(unit: str, chosen: str, address: str) -> str:
    """Links to the page of a run with another x axis."""
    labels = {"step": "step", "time": "time", "units": unit}
    links = " ".join(
        f'<a href="{escape(address)}?x={name}"{" aria-current=true" if name == chosen else ""}>{escape(label)}</a>'
        for name, label in labels.items()
    )
    return f'<p class="note axis">x axis: {links}</p>'
