"""An HTTP server of one directory on this machine, with ranges; or one that answers every request with an error."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote


@contextmanager
def serve_objects(directory: Path, status: int = 200, body: bytes = b"") -> Iterator[tuple[str, list[str]]]:
    """Serve the files of a directory; with another `status`, that and `body`. Yield the address and the requests."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer()

        def _answer(self) -> None:
            path = unquote(self.path.partition("?")[0]).strip("/")
            requests.append(f"{self.command} {path}")
            file = directory / path
            if status != 200:
                self._send(status, body, 0, len(body))
            elif not file.is_file():
                self._send(404, b"", 0, 0)
            else:
                content = file.read_bytes()
                first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
                start, stop = (int(first), int(last) + 1) if first else (0, len(content))
                self._send(206 if first else 200, content, start, min(stop, len(content)))

        def _send(self, code: int, content: bytes, start: int, stop: int) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(stop - start))
            self.send_header("ETag", f'"{len(content)}"')
            self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
            if code == 206:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[start:stop])

        def log_message(self, *_: object) -> None:
            """Requests are in the list."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
