"""The frame of every page, tables, and the list of runs. Every text is escaped; scripts and styles come from /static
only. Links are relative to the first page, so that a page works behind any path of a proxy."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import NamedTuple, TypeVar
from urllib.parse import urlencode

from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from phalanx import formatting
from phalanx.serve.run_index import RunRow
from phalanx.std_streams import escape_control_chars

logger = logging.getLogger(__name__)
ItemT = TypeVar("ItemT")

ROWS_PER_PAGE = 100
OWN_TABS = (("Runs", "./"), ("Jobs", "jobs"))
"""Names and addresses in the navigation, before those of added pages."""


@dataclass(frozen=True)
class PageFrame:
    """What surrounds each page. `added_tabs`: names and addresses of added pages. `events`: address of the stream that
    renews it. `static_version` changes with the static files, which browsers keep. `root`: the first page, relative to
    this one; all addresses are relative to it, also `here`, this page."""

    title: str
    tab: str
    added_tabs: Sequence[tuple[str, str]] = ()
    events: str | None = None
    static_version: str = ""
    root: str = "./"
    here: str = ""


@dataclass(frozen=True)
class RunQuery:
    """Which runs the list shows, and in which order. `text`: each word of it is part of the path or the status. `sort`:
    one of SORT_KEYS; empty for running runs first, then the newest."""

    text: str = ""
    page: int = 0
    sort: str = ""
    descending: bool = False

    def to_address(self, path: str, **changes: object) -> str:
        """The address of this list, with some values changed."""
        values = {"q": self.text, "page": self.page, "sort": self.sort, "descending": self.descending, **changes}
        words = urlencode({key: int(value) if value is True else value for key, value in values.items() if value})
        return f"{path}?{words}" if words else path


class ListedRun(NamedTuple):
    """A run of the list; a tuple, since 10,000 are made every second."""

    id: str
    name: str
    """The shortest tail of its path that no other run has."""
    status: str
    row: RunRow


SORT_KEYS: Mapping[str, Callable[[ListedRun], str | float | None]] = {
    "run": lambda listed: listed.name,
    "status": lambda listed: listed.status,
    "step": lambda listed: listed.row.step,
    "loss": lambda listed: listed.row.loss,
    "validation": lambda listed: listed.row.validation_loss,
    "speed": lambda listed: listed.row.units_per_s,
    "workers": lambda listed: listed.row.world_size,
    "last written": lambda listed: listed.row.last_written_at,
}
RUN_COLUMNS = ("", "run", "status", "step", "loss", "validation", "speed", "workers", "last written")


def render_frame(frame: PageFrame, body: str) -> str:
    tabs = "".join(
        f'<a href="{address}"{" aria-current=page" if name == frame.tab else ""}>{name}</a>'
        for name, address in (*OWN_TABS, *frame.added_tabs)
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


class PageResponse(Response):
    """Renders a page for its address. What would turn text around, and halves of characters, are written out."""

    def __init__(self, frame: PageFrame, body: str, status: int = 200):
        super().__init__(status_code=status)
        self._frame, self._body = frame, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = scope.get("query_string", b"").decode("latin-1")
        here = _page_path(scope)[1:] + (f"?{query}" if query else "")
        text = render_frame(replace(self._frame, root=relative_root(scope), here=here), self._body)
        await HTMLResponse(escape_control_chars(text), self.status_code)(scope, receive, send)


def relative_root(scope: Scope) -> str:
    """The address of the first page, relative to the page that was asked for."""
    return "../" * (_page_path(scope).count("/") - 1) or "./"


def _page_path(scope: Scope) -> str:
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.decode("latin-1")


def render_each(
    items: Iterable[ItemT], render: Callable[[ItemT], Sequence[str]], name: Callable[[ItemT], str], num_columns: int
) -> Iterator[Sequence[str]]:
    """Yield the row of each item; of one that cannot be rendered, its name and `unreadable`."""
    for item in items:
        try:
            yield render(item)
        except Exception:  # what others send may be anything
            logger.exception("serve: %a cannot be rendered", name(item))
            yield escape(name(item)), '<span class="problem">unreadable</span>', *[""] * (num_columns - 2)


def render_time(moment: float) -> str:
    """A time (unix seconds), which the page shows as an age."""
    text = escape(formatting.format_timestamp(moment))
    return f'<time data-time="{moment:.1f}" title="{text}">{text}</time>'


def render_rows(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; the cells are HTML."""
    head = "".join(f"<th scope=col>{name}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="list"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def select_rows(rows: Mapping[str, RunRow], names: Mapping[str, str], query: RunQuery, now: float) -> list[ListedRun]:
    """The rows that a query asks for, in its order; those without a value last. `names`: by id."""
    words = query.text.lower().split()
    listed = [ListedRun(id, names[id], row.status(now), row) for id, row in rows.items()]
    if words:
        listed = [each for each in listed if all(word in f"{each.row.path} {each.status}".lower() for word in words)]
    listed.sort(  # running runs stay in place, although each is written all the time
        key=lambda each: (
            (0, -(each.row.first_event_at or 0.0)) if each.status == "running" else (1, -each.row.last_written_at)
        )
    )
    if (key := SORT_KEYS.get(query.sort)) is None:
        return listed
    keyed = [(value, each) for each in listed if (value := key(each)) is not None]
    keyed.sort(key=lambda pair: pair[0], reverse=query.descending)
    return [*(each for _, each in keyed), *(each for each in listed if key(each) is None)]


def render_run_list(runs: Sequence[ListedRun], query: RunQuery, is_complete: bool) -> str:
    """The table of one page of runs, with what stands around it."""
    shown = runs[query.page * ROWS_PER_PAGE : (query.page + 1) * ROWS_PER_PAGE]
    reading = "" if is_complete else "; looking for more"
    num_running = sum(each.status == "running" for each in runs)
    summary = f'<p class="note">{formatting.format_plural(len(runs), "run")}, {num_running} running{reading}</p>'
    if not runs:
        advice = "No run matches." if query.text else "No runs here yet. `phalanx train RECIPE` makes one."
        return f'{summary}<p class="note">{escape(advice)}</p>' if is_complete else summary
    head = "".join(_render_column_head(name, query) for name in RUN_COLUMNS)
    body = "".join(map(_render_row, shown))
    table = f'<table class="list"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'{summary}<div class="scroll">{table}</div>{_render_page_links(len(runs), query)}'


def render_runs(content: str, query: RunQuery) -> str:
    order = {"sort": query.sort, "descending": "1" if query.descending else ""}
    sort = "".join(f'<input type="hidden" name="{key}" value="{value}">' for key, value in order.items() if value)
    return f"""<header><h1>Runs</h1></header>
<form class="bar-form" method="get" action="./" role="search">
<label>Filter <input type="search" name="q" value="{escape(query.text)}" placeholder="path or status"></label>
{sort}<button>Show</button>
</form>
<form method="get" action="compare">
<p><button>Compare the ticked runs</button></p>
<div id="runs">{content}</div>
</form>"""


def _render_column_head(name: str, query: RunQuery) -> str:
    """A link that sorts by the column, and the other way round where the list is sorted by it."""
    if not name:
        return "<th scope=col></th>"
    is_sorted = name == query.sort
    address = query.to_address("./", page=0, sort=name, descending=is_sorted and not query.descending)
    order = f' aria-sort="{"descending" if query.descending else "ascending"}"' if is_sorted else ""
    return f'<th scope=col{order}><a href="{escape(address)}" data-key="sort {name}">{name}</a></th>'


def _render_row(listed: ListedRun) -> str:
    id, name, status, row = listed
    name = escape(name)
    total = f" of {row.total_steps}" if row.total_steps else ""
    cells = (
        f'<input type="checkbox" name="run" value="{id}" aria-label="compare {name}">',
        f'<a href="run/{id}" title="{escape(str(row.path))}">{name}</a>',
        f'<span class="status {escape(status.replace(" ", "-"))}">{escape(status)}</span>',
        f"{row.step}{total}" if row.first_event_at is not None else "",
        formatting.format_loss(row.loss) if row.loss is not None else "",
        formatting.format_loss(row.validation_loss) if row.validation_loss is not None else "",
        f"{formatting.format_count(row.units_per_s)}/s" if row.units_per_s else "",
        f"{row.world_size} {escape(row.device)}" if row.world_size else "",
        render_time(row.last_written_at) if row.last_written_at else "",
    )
    problem = f'<tr><td></td><td colspan="8" class="note">{escape(row.problem)}</td></tr>' if row.problem else ""
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>{problem}"


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
