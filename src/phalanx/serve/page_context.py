"""What all routes share: the frame of a page, streams that renew it, whether a browser may act, and the pages that
another package adds by an entry point of the group `phalanx.pages`."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from phalanx.serve.access import Access, describe_refusal
from phalanx.serve.pages import PageFrame, PageResponse
from phalanx.serve.run_index import RunIndex
from phalanx.std_streams import escape_control_chars

if TYPE_CHECKING:
    from prometheus_client import Metric

STREAM_INTERVAL_S = 1.0
"""Between two messages of a stream, which also say that the connection lives."""

Message = dict[str, Any]
"""A message for `live.js`: `sections` are HTML by element id; some pages have `charts` or a `heatMap`."""
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class PageContext:
    """Renders pages. `static_version` changes with the static files; `stopping` ends the streams."""

    access: Access
    static_version: str
    wall_clock: Callable[[], float]
    stopping: threading.Event
    added_tabs: Sequence[tuple[str, str]] = ()

    def render(self, title: str, tab: str, body: str, events: str | None = None, status: int = 200) -> Response:
        """Return a page. `events`: address of the stream that renews it."""
        return PageResponse(PageFrame(title, tab, self.added_tabs, events, self.static_version), body, status)

    def stream(self, read: Callable[[], Awaitable[Message]]) -> Response:
        """Return a stream of what `read` returns, once a second."""
        messages = stream_messages(read, self.stopping.is_set, self.wall_clock)
        return StreamingResponse(messages, media_type="text/event-stream")

    def may_act(self, request: Request) -> bool:
        """Whether the browser has what actions need."""
        return describe_refusal(self.access, request) is None


def on_first_request(find: Callable[[], Handler]) -> Handler:
    """Return a handler that `find` returns with the first request, and with it imports what only its pages need: the
    list of runs is there before numpy is."""

    async def handle(request: Request) -> Response:
        return await find()(request)

    return handle


async def stream_messages(
    read: Callable[[], Awaitable[Message]], is_over: Callable[[], bool], wall_clock: Callable[[], float]
) -> AsyncIterator[str]:
    """Yield the text of a stream: a message a second, with the sections that changed since the last one."""
    shown: dict[str, int] = {}
    while not is_over():
        message = await read()
        sections = message.get("sections", {})
        changed = {id: html for id, html in sections.items() if shown.get(id) != hash(html)}
        message["sections"] = {id: escape_control_chars(html) for id, html in changed.items()}
        shown.update((id, hash(html)) for id, html in sections.items())
        message["now"] = wall_clock()
        yield f"data: {json.dumps(message, separators=(',', ':'))}\n\n"
        await asyncio.sleep(STREAM_INTERVAL_S)


@dataclass(frozen=True)
class ServedSite:
    """The server that shows added pages."""

    index: RunIndex
    context: PageContext
    backend: str
    allow_actions: bool


class AddedPages(Protocol):
    """Pages, what keeps them up to date, and metrics."""

    tabs: Sequence[tuple[str, str]]
    """Name and address of each page in the navigation."""
    style: str
    """Added to the style sheet."""
    script: str
    """Added to the script. `document` gets an event `phalanx-message` with each message of a stream."""

    def open(self, site: ServedSite) -> None:
        """Called once, before all others."""

    def make_routes(self) -> Sequence[Route]:
        """The routes of the pages."""

    def start(self) -> None:
        """Start threads; called once the server answers requests."""

    def stop(self) -> None:
        """End them."""

    async def run(self) -> None:
        """Run in the server's event loop until cancelled."""

    def build_metrics(self, with_readings: bool) -> "Iterable[Metric]":
        """What `/metrics` has besides runs and jobs; without readings of devices if so asked."""


PageMaker = Callable[..., AddedPages]
"""Its parameters, with typer's annotations, are options of `phalanx serve`. Raises UsageError for wrong values."""
