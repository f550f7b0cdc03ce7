"""A Hugging Face hub on this machine with one repository: the endpoints that downloading a snapshot needs."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_hub(
    directory: Path, repository: str = "models/acme/tiny", commit: str = COMMIT, refusal: tuple[int, str] | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Serve the files of a directory as `KIND/OWNER/NAME` at `commit`; yield HF_ENDPOINT and the requests so far.
    `refusal`: the status and error code with which the repository is refused instead."""
    requests: list[str] = []
    name = repository.removeprefix("models/")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = unquote(self.path.partition("?")[0]).strip("/")
            requests.append(f"{self.command} {path}")
            if refusal is not None:
                self._send(refusal[0], b"", {"X-Error-Code": refusal[1]} if refusal[1] else {})
                return
            files = sorted(str(each.relative_to(directory)) for each in directory.rglob("*") if each.is_file())
            if path.startswith(f"api/{repository}/revision/") or path == f"api/{repository}":
                revision = path.rpartition("/revision/")[2]
                if revision in ("main", commit, f"api/{repository}"):
                    siblings = [{"rfilename": file} for file in files]
                    about = {"id": name.removeprefix("datasets/"), "sha": commit, "siblings": siblings}
                    self._send(200, json.dumps(about).encode(), {"Content-Type": "application/json"})
                else:
                    self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
                return
            if path.startswith(f"api/{repository}/tree/{commit}"):
                entries = [
                    {"type": "file", "path": file, "size": (directory / file).stat().st_size, "oid": commit}
                    for file in files
                ]
                self._send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})
                return
            file = path.removeprefix(f"{name}/resolve/{commit}/")
            if file in files:
                content = (directory / file).read_bytes()
                etag = hashlib.sha1(content).hexdigest()
                self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})
                return
            self._send(404, b"", {"X-Error-Code": "EntryNotFound" if path.startswith(name) else "RepoNotFound"})

        def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for header, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(header, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

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
