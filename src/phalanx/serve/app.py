"""The server: its routes (pages, server-sent events that renew them, actions), its start, and its end on Ctrl-C."""

import asyncio
import contextlib
import errno
import hashlib
import re
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from phalanx import formatting
from phalanx.errors import DataError, UsageError
from phalanx.observe.html_report.document import read_page_css, read_page_script
from phalanx.serve.access import Access, AccessMiddleware, Form, answer_form, make_access
from phalanx.serve.job_pages import JobReader, render_jobs
from phalanx.serve.page_context import AddedPages, Message, PageContext, ServedSite, on_first_request
from phalanx.serve.pages import (
    ROWS_PER_PAGE,
    SORT_KEYS,
    RunQuery,
    render_problem,
    render_run_list,
    render_runs,
    select_rows,
)
from phalanx.serve.run_index import RunIndex

if TYPE_CHECKING:
    from phalanx.serve.metrics import MetricsRoutes
    from phalanx.serve.run_routes import RunRoutes

STATIC_DIR = Path(__file__).parent / "static"
SCRIPT_FILES = (STATIC_DIR / "live.js", STATIC_DIR / "chat.js")
DASHBOARD_FILE = STATIC_DIR / "grafana.json"


@dataclass
class Server:
    """What the pages read. `stopping` ends the streams."""

    index: RunIndex
    jobs: JobReader
    access: Access
    added: Sequence[AddedPages] = ()
    backend: str = "local"
    wall_clock: Callable[[], float] = time.time
    stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        styles, scripts = (pages.style for pages in self.added), (pages.script for pages in self.added)
        self._css = "".join((read_page_css(), (STATIC_DIR / "serve.css").read_text(), *styles)).encode()
        self._script = "".join((read_page_script(), *map(Path.read_text, SCRIPT_FILES), *scripts)).encode()
        self._names: dict[str, str] = {}
        static_version = hashlib.sha256(self._css + self._script).hexdigest()[:12]
        tabs = [tab for pages in self.added for tab in pages.tabs]
        self.context = PageContext(self.access, static_version, self.wall_clock, self.stopping, tabs)
        for pages in self.added:
            pages.open(ServedSite(self.index, self.context, self.backend, self.access.allows_actions))

    @cached_property
    def run_routes(self) -> "RunRoutes":
        from phalanx.serve.run_routes import RunRoutes

        return RunRoutes(self.index, self.context)

    @cached_property
    def metrics_routes(self) -> "MetricsRoutes":
        """What Prometheus reads."""
        from phalanx.serve.metrics import MetricsRoutes

        return MetricsRoutes(self.index, self.jobs, self.added, self.context)

    def make_app(self, on_start: Callable[[], None] = lambda: None) -> Starlette:
        """The application. `on_start` is called once it answers requests: what else starts then does not delay the
        first page, which needs the interpreter too."""

        @contextlib.asynccontextmanager
        async def run_readers(app: Starlette) -> AsyncIterator[None]:
            tasks = [asyncio.create_task(pages.run()) for pages in self.added]
            on_start()
            yield
            for task in tasks:
                task.cancel()

        routes = [
            Route("/", self.show_runs),
            Route("/stream/runs", self.stream_runs),
            Route("/run/{id}", on_first_request(lambda: self.run_routes.show_run)),
            Route("/run/{id}/stream", on_first_request(lambda: self.run_routes.stream_run)),
            Route("/run/{id}/chat", on_first_request(lambda: self.run_routes.answer_chat), methods=["POST"]),
            Route("/run/{id}/logs", on_first_request(lambda: self.run_routes.show_logs)),
            Route("/compare", on_first_request(lambda: self.run_routes.show_comparison)),
            Route("/jobs", self.show_jobs),
            Route("/stream/jobs", self.stream_jobs),
            Route("/jobs/cancel", self.cancel_job, methods=["POST"]),
            Route("/metrics", on_first_request(lambda: self.metrics_routes.send_metrics)),
            Route("/grafana.json", self.send_dashboard),
            Route("/static/phalanx.css", self.send_css),
            Route("/static/phalanx.js", self.send_script),
            *(route for pages in self.added for route in pages.make_routes()),
        ]
        return Starlette(
            routes=routes,
            middleware=[Middleware(AccessMiddleware, access=self.access)],
            exception_handlers={404: self._show_not_found, DataError: self._show_refused},
            lifespan=run_readers,
        )

    async def show_runs(self, request: Request) -> Response:
        query = _read_query(request)
        body = render_runs(self._render_list(query), query)
        return self.context.render("Runs", "Runs", body, query.to_address("stream/runs"))

    async def stream_runs(self, request: Request) -> Response:
        """The list again, whenever it changes."""
        query = _read_query(request)

        async def read() -> Message:
            return {"sections": {"runs": self._render_list(query)}}

        return self.context.stream(read)

    async def show_jobs(self, request: Request) -> Response:
        head = '<header><h1>Jobs</h1></header><p id="answer" role="status"></p>'
        body = f'{head}<div id="jobs">{self._render_jobs(request)}</div>'
        return self.context.render("Jobs", "Jobs", body, "stream/jobs")

    async def stream_jobs(self, request: Request) -> Response:
        """The jobs again, whenever they change."""

        async def read() -> Message:
            return {"sections": {"jobs": self._render_jobs(request)}}

        return self.context.stream(read)

    async def cancel_job(self, request: Request) -> Response:
        def act(form: Form) -> str:
            self.jobs.cancel(form.get("job", ""))
            return f"Job {form.get('job', '')} is being cancelled."

        return await answer_form(self.access, request, act)

    async def send_dashboard(self, request: Request) -> Response:
        """A dashboard of these metrics, to import in Grafana."""
        return Response(DASHBOARD_FILE.read_bytes(), media_type="application/json")

    async def send_css(self, request: Request) -> Response:
        return self._static(self._css, "text/css")

    async def send_script(self, request: Request) -> Response:
        return self._static(self._script, "text/javascript")

    def _render_list(self, query: RunQuery) -> str:
        rows = self.index.rows
        if rows.keys() != self._names.keys():
            names = formatting.shorten_paths([str(row.path) for row in rows.values()])
            self._names = dict(zip(rows, names, strict=True))
        listed = select_rows(rows, self._names, query, self.wall_clock())
        last_page = max(0, (len(listed) - 1) // ROWS_PER_PAGE)
        return render_run_list(listed, replace(query, page=min(query.page, last_page)), self.index.is_complete)

    def _render_jobs(self, request: Request) -> str:
        return render_jobs(self.jobs.jobs, self.jobs.backend, self.context.may_act(request))

    async def _show_not_found(self, request: Request, error: Exception) -> Response:
        return self.context.render(
            "Not found", "", render_problem("Not found", "There is no page with this address."), status=404
        )

    async def _show_refused(self, request: Request, error: Exception) -> Response:
        return self.context.render("Run", "Runs", render_problem("Not shown", str(error)), status=422)

    def _static(self, content: bytes, media_type: str) -> Response:
        headers = {"cache-control": "max-age=31536000, immutable"}  # the address changes with the content
        return Response(content, media_type=media_type, headers=headers)


def _read_query(request: Request) -> RunQuery:
    values = request.query_params
    page, sort = values.get("page", "0"), values.get("sort", "")
    return RunQuery(
        text=values.get("q", "").strip(),
        page=int(page) if re.fullmatch("[0-9]{1,8}", page) else 0,
        sort=sort if sort in SORT_KEYS else "",
        descending=values.get("descending") == "1",
    )


ServerThread = RunIndex | JobReader | AddedPages
SHUTDOWN_TIMEOUT_S = 2
"""For streams to end: they look once a second."""


@dataclass(frozen=True)
class ServeOptions:
    """What is served, and where. Port 0 is any free one."""

    roots: Sequence[Path]
    backend: str = "local"
    host: str = "127.0.0.1"
    port: int = 8420
    allow_actions: bool = False
    token: str | None = None
    demands_token: bool = True
    """Whether pages are shown to browsers with the token only."""
    proxy_names: Sequence[str] = ()


def serve(options: ServeOptions, added: Sequence[AddedPages], report: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `report` gets the address. UsageError for a bad address or directory."""
    from phalanx.jobs.backends.base import open_backend  # imports pydantic

    for root in options.roots:
        if root.exists() and not root.is_dir():
            raise UsageError(f"{root}: is a file; expected a directory with runs, such as runs")
    open_backend(options.backend)  # a name that is none, or a package that is missing
    access = make_access(options.host, options.allow_actions, options.token, options.demands_token, options.proxy_names)
    _raise_file_limit()
    with _listen(options.host, options.port) as listener:
        index = RunIndex(options.roots)
        server = Server(index, JobReader(options.backend, open_backend), access, added, options.backend)
        index.start()
        readers: list[ServerThread] = [server.jobs, *added]
        threads: list[ServerThread] = [index]

        def start_readers() -> None:
            for reader in readers:
                reader.start()
                threads.append(reader)

        host = f"[{options.host}]" if ":" in options.host else options.host
        secret = f"/?token={access.token}" if access.token else "/"
        report(f"http://{host}:{listener.getsockname()[1]}{secret}")
        config = uvicorn.Config(
            server.make_app(start_readers),
            log_level="warning",
            access_log=False,
            lifespan="on",
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        )
        try:
            _EndingServer(config, server).run(sockets=[listener])
        except KeyboardInterrupt:  # how uvicorn passes on the Ctrl-C that has ended it
            pass
        finally:
            server.stopping.set()
            for thread in threads:
                thread.stop()


class _EndingServer(uvicorn.Server):
    """Ends the streams of pages with the first signal, which would last as long as a browser shows the page."""

    def __init__(self, config: uvicorn.Config, server: Server):
        super().__init__(config)
        self._pages = server

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._pages.stopping.set()
        super().handle_exit(sig, frame)


def _raise_file_limit() -> None:
    """Each agent and each page has a connection; the limit of a shell is often 1,024 open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. UsageError where the address cannot be used."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} is in use, perhaps by another `phalanx serve`; choose another with --port, or --port 0 "
                "for any free one"
            ) from None
        raise UsageError(f"--host {host} --port {port}: {error.strerror}") from None
    return listener
