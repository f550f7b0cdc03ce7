"""A page as an answer. Its links are relative to the first page, so that it works behind any path of a proxy, which the
server does not know."""

from dataclasses import replace

from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from phalanx.serve.pages import PageFrame, render_frame
from phalanx.std_streams import escape_control_chars


class PageResponse(Response):
    """Renders a page for the address that was asked for. What would turn text around, and halves of characters, as of
    file names, are written out."""

    def __init__(self, frame: PageFrame, body: str, status: int = 200):
        super().__init__(status_code=status)
        self._frame, self._body = frame, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the page."""
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
