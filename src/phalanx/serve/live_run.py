"""The page of one run, kept up to date: events are read as they are added, and the parts of the page that changed get a
new version."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from phalanx import formatting
from phalanx.cluster.spec import Prices
from phalanx.observe.history import HistoryBuilder, RunHistory
from phalanx.observe.html_report.chart import Chart
from phalanx.observe.html_report.report import render_report_body, render_sections
from phalanx.observe.html_report.run_charts import build_run_charts
from phalanx.observe.recommendations import find_recommendations
from phalanx.observe.run_cost import read_run_prices
from phalanx.observe.summary import build_summary
from phalanx.run import EventTail, Run
from phalanx.run.notes import RunNote, read_notes
from phalanx.serve.run_forecast import forecast_run, render_forecast
from phalanx.serve.run_row import RUNNING_WITHIN_S, stat_run
from phalanx.serve.tables import render_rows, render_time

READ_BUDGET_S = 0.5
"""Seconds of reading after which a page shows what was read so far: a long run takes minutes."""
RENDER_SHARE, CATCH_UP_SHARE = 0.2, 0.5
"""Share of the time that rendering may take: pages of long runs are renewed less often. More until all is read."""
MIN_INTERVAL_S = 0.5
CATCH_UP_BUDGET_S = 2.0
"""Seconds that each later look may read: the first part is shown meanwhile."""
CATCH_UP_GROWTH = 1.25
"""While a long run is read, its page is rendered again once it has this many times the steps: a million take 2 s."""
MAX_OPEN_RUNS = 16
MAX_OPEN_STEPS = 2_000_000
"""Steps of all open runs together: some 300 MB. The run that was asked for last stays open, however long it is."""


@dataclass(frozen=True)
class RunPage:
    """What the page of a run shows. `sections`: HTML by the id of its element (`render_report_body`)."""

    version: int
    title: str
    sections: Mapping[str, str]
    charts: Sequence[Chart]
    share_read: float
    """Share of the events that are read."""
    read_at: float
    """Unix seconds."""


class LiveRun:
    """Reads a run and renders its page. Threads may share it."""

    def __init__(
        self,
        run: Run,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        prices: Prices | None = None,
    ):
        self.run, self._prices = run, prices or Prices()
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
        """Steps in memory."""
        return len(self._builder.step_numbers)

    def _open(self) -> None:
        self._tail, self._builder = EventTail(self.run.events), HistoryBuilder()
        self._inode, self._size = -1, 0
        self._num_rendered_steps = 0
        self._others = ""

    def _update(self) -> None:
        inode, size = self._stat()
        if self._page is not None and not self.run.path.is_dir():
            return  # it was moved or removed; what was read of it stays
        if inode != self._inode or size < self._size:  # another file, as after a move
            self._open()
            self._inode = inode
        others = self._fingerprint_files()
        if self._page is not None and size == self._size and self._page.share_read == 1 and others == self._others:
            self._page = replace(self._page, read_at=self._wall_clock())
            return
        self._others = others
        until = self._clock() + (READ_BUDGET_S if self._page is None else CATCH_UP_BUDGET_S)
        for event in self._tail.read():
            self._builder.add_event(event)
            if self._clock() >= until:
                break
        self._size = size
        share = min(1.0, self._tail.bytes_read / size) if size else 1.0
        is_whole = self._clock() < until
        if not is_whole and self._page is not None and self.num_steps < CATCH_UP_GROWTH * self._num_rendered_steps:
            self._page = replace(self._page, share_read=share, read_at=self._wall_clock())
            return
        self._num_rendered_steps = self.num_steps
        history = replace(self._builder.build_history(), num_unreadable_lines=self._tail.num_unreadable)
        self._page = self._render(history, 1.0 if is_whole else share)

    def _render(self, history: RunHistory, share_read: float) -> RunPage:
        summary = build_summary(self.run, history)
        recommendations = find_recommendations(summary, history)
        if summary.status == "incomplete" and self._is_written():
            summary = replace(summary, status="running")  # a report, read later, cannot tell
        sections = render_sections(summary, history, recommendations)
        prices = read_run_prices(self.run.read_json_or_empty(self.run.cluster)) or self._prices
        forecast = render_forecast(forecast_run(summary, prices), prices)
        notes = render_notes(read_notes(self.run))
        sections = {"outcome": sections["outcome"], "forecast": forecast, **sections, "notes": notes}
        version = self._page.version + 1 if self._page else 1
        charts = build_run_charts(summary, history)
        return RunPage(version, summary.run_info.name, sections, charts, share_read, self._wall_clock())

    def _is_written(self) -> bool:
        """Whether something of the run was written lately."""
        return self._wall_clock() - stat_run(self.run)[1] < RUNNING_WITHIN_S

    def _stat(self) -> tuple[int, int]:
        try:
            found = self.run.events.stat(follow_symlinks=False)
        except OSError:
            return -1, 0
        return found.st_ino, found.st_size

    def _fingerprint_files(self) -> str:
        """What changes when another file of the page does."""
        files = (self.run.resolved, self.run.plan, self.run.result, self.run.notes)
        return " ".join((str(self._is_written()), *map(_change_of, files)))


def render_run(page: RunPage, address: str, may_act: bool) -> str:
    """The page of a run: the report, its logs, and a form for notes where the browser may add them."""
    note = f'<div id="reading">{render_reading_note(page)}</div>'
    logs = f'<h2>Logs</h2><p><a href="{escape(address)}/logs">Output of the workers</a></p>'
    form = f"""<form class="bar-form"><label>Note <input name="text" required></label>
<button data-action="{escape(address)}/note">Add</button></form><p id="answer" role="status"></p>"""
    return note + render_report_body(page.sections, page.charts) + (form if may_act else "") + logs


def render_reading_note(page: RunPage) -> str:
    """How much of a long run is read."""
    if page.share_read >= 1:
        return ""
    share = formatting.format_percent(page.share_read)
    return f'<p class="note">Reading the events: {share}. What follows is the run up to about there.</p>'


def render_notes(notes: Sequence[RunNote]) -> str:
    """The notes of a run, the newest first; empty without any."""
    if not notes:
        return ""
    rows = ((render_time(note.time), escape(note.author), escape(note.text)) for note in reversed(notes))
    return "<h2>Notes</h2>" + render_rows(("when", "by", "note"), rows)


class LiveRuns:
    """The runs of the pages that were asked for lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, prices: Prices | None = None):
        self._clock, self._prices = clock, prices
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, LiveRun] = OrderedDict()

    def find(self, run: Run) -> LiveRun:
        """The live run of a directory."""
        with self._lock:
            found = self._open.pop(run.path, None) or LiveRun(run, self._clock, prices=self._prices)
            self._open[run.path] = found
            while len(self._open) > MAX_OPEN_RUNS or (len(self._open) > 1 and self._num_steps() > MAX_OPEN_STEPS):
                self._open.popitem(last=False)
            return found

    def _num_steps(self) -> int:
        return sum(live.num_steps for live in self._open.values())


def _change_of(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return "-"
    return f"{found.st_mtime_ns}.{found.st_size}"
