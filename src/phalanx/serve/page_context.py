"""What all routes share: the frame of a page, streams that renew it, and whether a browser may act."""

import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from phalanx.serve.access import Access, describe_refusal
from phalanx.serve.page_response import PageResponse
from phalanx.serve.page_stream import Message, stream_messages
from phalanx.serve.pages import PageFrame

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class PageContext:
    """Renders pages. `static_version` changes with the static files; `stopping` ends the streams."""

    access: Access
    static_version: str
    wall_clock: Callable[[], float]
    stopping: threading.Event

    def render(self, title: str, tab: str, body: str, events: str | None = None, status: int = 200) -> Response:
        """Return a page. `events`: address of the stream that renews it."""
        return PageResponse(PageFrame(title, tab, events, self.static_version), body, status)

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
