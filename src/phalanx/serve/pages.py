"""The frame of every page, and the list of runs. Every text is escaped; scripts and styles come from /static only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple
from urllib.parse import urlencode

from phalanx import formatting
from phalanx.serve.run_row import Losses, RunRow
from phalanx.serve.tables import render_time

SPARKLINE_WIDTH, SPARKLINE_HEIGHT = 120, 26
ROWS_PER_PAGE = 100
PAGE_TABS = (
    ("Runs", "./"),
    ("Jobs", "jobs"),
    ("Nodes", "nodes"),
    ("Power", "power"),
    ("Cooling", "cooling"),
    ("Cluster", "cluster"),
)


@dataclass(frozen=True)
class PageFrame:
    """What surrounds each page. `events`: address of the stream that renews it. `static_version` changes with the
    static files, which browsers keep. `root`: the first page, relative to this one; all addresses are relative to it,
    also `here`, this page."""

    title: str
    tab: str
    events: str | None = None
    static_version: str = ""
    root: str = "./"
    here: str = ""


@dataclass(frozen=True)
class RunQuery:
    """Which runs the list shows. `text`: each word of it is part of the path or the status."""

    text: str = ""
    page: int = 0

    def to_address(self, path: str, **changes: object) -> str:
        """The address of this list, with some values changed."""
        values = {"q": self.text, "page": self.page, **changes}
        words = urlencode({key: value for key, value in values.items() if value})
        return f"{path}?{words}" if words else path


class ListedRun(NamedTuple):
    """A run of the list; a tuple, since 10,000 are made every second."""

    id: str
    status: str
    row: RunRow


def render_frame(frame: PageFrame, body: str) -> str:
    """The whole document."""
    tabs = "".join(
        f'<a href="{address}"{" aria-current=page" if name == frame.tab else ""}>{name}</a>'
        for name, address in PAGE_TABS
    )
    events = f' data-events="{escape(frame.events)}"' if frame.events else ""
    version = f"?v={frame.static_version}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<base href="{frame.root}">
<link rel="icon" href="data:,">
<link rel="stylesheet" href="static/phalanx.css{version}">
<title>{escape(frame.title)} · Phalanx</title>
</head>
<body{events}>
<a class="skip" href="{escape(frame.here)}#content">Skip to content</a>
<nav aria-label="Pages"><strong>Phalanx</strong>{tabs}<span id="connection" role="status"></span></nav>
<main id="content">{body}</main>
<script src="static/phalanx.js{version}"></script>
</body>
</html>
"""


def select_rows(rows: Mapping[str, RunRow], query: RunQuery, now: float) -> list[ListedRun]:
    """The rows that a query asks for: running ones first, then the newest."""
    words = query.text.lower().split()
    listed = [ListedRun(id, row.status(now), row) for id, row in rows.items()]
    if words:
        listed = [each for each in listed if all(word in f"{each.row.path} {each.status}".lower() for word in words)]
    return sorted(listed, key=lambda each: (each.status != "running", -each.row.last_written_at))


def render_run_list(runs: Sequence[ListedRun], query: RunQuery, is_complete: bool) -> str:
    """The table of one page of runs, with what stands around it."""
    shown = runs[query.page * ROWS_PER_PAGE : (query.page + 1) * ROWS_PER_PAGE]
    reading = "" if is_complete else "; looking for more"
    num_running = sum(each.status == "running" for each in runs)
    summary = f'<p class="note">{formatting.format_plural(len(runs), "run")}, {num_running} running{reading}</p>'
    if not runs:
        advice = "No run matches." if query.text else "No runs here yet. `phalanx train RECIPE` makes one."
        return f'{summary}<p class="note">{escape(advice)}</p>' if is_complete else summary
    head = "".join(
        f"<th scope=col>{name}</th>"
        for name in ("", "run", "status", "step", "loss", "", "validation", "speed", "workers", "last written")
    )
    body = "".join(map(_render_row, shown))
    table = f'<table class="list"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'{summary}<div class="scroll">{table}</div>{_render_page_links(len(runs), query)}'


def render_runs(content: str, query: RunQuery) -> str:
    """The page of all runs."""
    return f"""<header><h1>Runs</h1></header>
<form class="bar-form" method="get" action="./" role="search">
<label>Filter <input type="search" name="q" value="{escape(query.text)}" placeholder="path or status"></label>
<button>Show</button>
</form>
<form method="get" action="compare">
<p><button>Compare the ticked runs</button></p>
<div id="runs">{content}</div>
</form>"""


def _render_row(listed: ListedRun) -> str:
    id, status, row = listed
    name = escape(str(row.path))
    total = f" of {row.total_steps}" if row.total_steps else ""
    cells = (
        f'<input type="checkbox" name="run" value="{id}" aria-label="compare {name}">',
        f'<a href="run/{id}">{name}</a>',
        f'<span class="status {escape(status.replace(" ", "-"))}">{escape(status)}</span>',
        f"{row.step}{total}" if row.first_event_at is not None else "",
        formatting.format_loss(row.loss) if row.loss is not None else "",
        render_sparkline(row.losses),
        formatting.format_loss(row.validation_loss) if row.validation_loss is not None else "",
        f"{formatting.format_count(row.units_per_s)}/s" if row.units_per_s else "",
        f"{row.world_size} {escape(row.device)}" if row.world_size else "",
        render_time(row.last_written_at) if row.last_written_at else "",
    )
    problem = f'<tr><td></td><td colspan="9" class="note">{escape(row.problem)}</td></tr>' if row.problem else ""
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>{problem}"


def render_sparkline(losses: Losses) -> str:
    """The loss over the steps as a small picture without axes."""
    if len(losses) < 2:
        return ""
    values = [loss for _, loss in losses]
    low, high, first, last = min(values), max(values), losses[0][0], losses[-1][0]
    points = " ".join(
        f"{(step - first) / (last - first) * SPARKLINE_WIDTH:.1f},"
        f"{(1 - (loss - low) / ((high - low) or 1.0)) * (SPARKLINE_HEIGHT - 4) + 2:.1f}"
        for step, loss in losses
    )
    label = f"loss from {formatting.format_loss(values[0])} to {formatting.format_loss(values[-1])}"
    return (
        f'<svg class="spark" viewBox="0 0 {SPARKLINE_WIDTH} {SPARKLINE_HEIGHT}" width="{SPARKLINE_WIDTH}" '
        f'height="{SPARKLINE_HEIGHT}" role="img" aria-label="{label}"><polyline points="{points}"/></svg>'
    )


def _render_page_links(count: int, query: RunQuery) -> str:
    last = (count - 1) // ROWS_PER_PAGE
    if last == 0:
        return ""
    links = []
    if query.page > 0:
        links.append(f'<a href="{escape(query.to_address("./", page=query.page - 1))}">Previous</a>')
    links.append(f"page {query.page + 1} of {last + 1}")
    if query.page < last:
        links.append(f'<a href="{escape(query.to_address("./", page=query.page + 1))}">Next</a>')
    return f'<p class="note pages">{" ".join(links)}</p>'


def render_problem(title: str, text: str) -> str:
    """A page that says what is wrong."""
    return f'<header><h1>{escape(title)}</h1></header><p class="note">{escape(text)}</p>'
