"""Asks the application of `phalanx serve` as a browser would, without a network."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.jobs.spec import JobState, JobStatus
from phalanx.serve.access import Access
from phalanx.serve.app import Server
from phalanx.serve.job_pages import JobReader
from phalanx.serve.page_context import AddedPages
from phalanx.serve.run_index import RunIndex


class FakeBackend:
    """Jobs in a list."""

    name = "local"

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def list_jobs(self, array: str | None = None) -> list[JobStatus]:
        return [JobStatus("7", "<b>job</b>", JobState.RUNNING)]

    def cancel(self, job_id: str) -> None:
        if job_id != "7":
            raise UsageError(f"{job_id}: local has no such job")
        self.cancelled.append(job_id)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str


class Browser:
    """Asks an application without a network."""

    def __init__(self, folder: Path, access: Access, added: Sequence[AddedPages] = ()):
        self.backend = FakeBackend()
        index = RunIndex([folder])
        index.update()
        jobs = JobReader("local", lambda name: self.backend)  # type: ignore[arg-type, return-value]
        jobs.update()
        self.server = Server(index, jobs, access, added=added)
        self._app = self.server.make_app()

    def get(self, path: str, **headers: str) -> Answer:
        return asyncio.run(self._ask("GET", path, headers, b""))

    def post(self, path: str, body: str, **headers: str) -> Answer:
        return asyncio.run(self._ask("POST", path, headers, body.encode()))

    async def _ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        name, _, query = path.partition("?")
        sent: list[dict[str, object]] = []

        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, object]) -> None:
            sent.append(message)

        all_headers = {"host": "127.0.0.1:8420", **headers}
        scope = {
            "type": "http",
            "method": method,
            "path": name,
            "raw_path": name.encode(),
            "query_string": query.encode(),
            "headers": [(key.replace("_", "-").encode(), value.encode()) for key, value in all_headers.items()],
            "server": ("127.0.0.1", 8420),
            "scheme": "http",
            "http_version": "1.1",
        }
        await self._app(scope, receive, send)  # type: ignore[arg-type]
        start = sent[0]
        found = {key.decode(): value.decode() for key, value in start["headers"]}  # type: ignore[attr-defined]
        text = b"".join(each.get("body", b"") for each in sent[1:]).decode()  # type: ignore[misc]
        return Answer(int(start["status"]), found, text)  # type: ignore[call-overload]
