"""The routes of the server: pages, streams of server-sent events that renew them, and actions."""

import asyncio
import contextlib
import hashlib
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from phalanx.errors import DataError
from phalanx.observe.html_report.document import read_page_css, read_page_script
from phalanx.serve.access import Access, AccessMiddleware
from phalanx.serve.actions import Actions
from phalanx.serve.agent_streams import AgentStreams
from phalanx.serve.job_pages import JobReader, render_jobs, render_jobs_page
from phalanx.serve.node_actions import NodeActions
from phalanx.serve.node_reader import NodeReader
from phalanx.serve.page_context import PageContext, on_first_request
from phalanx.serve.page_stream import STREAM_INTERVAL_S, Message
from phalanx.serve.pages import ROWS_PER_PAGE, RunQuery, render_problem, render_run_list, render_runs, select_rows
from phalanx.serve.run_accounts import AccountReader
from phalanx.serve.run_index import RunIndex

if TYPE_CHECKING:
    from phalanx.cluster.spec import Prices
    from phalanx.fleet.node_states import NodeChange
    from phalanx.serve.cluster_routes import ClusterRoutes
    from phalanx.serve.fleet_routes import FleetRoutes, ServedFleet
    from phalanx.serve.metrics_routes import MetricsRoutes
    from phalanx.serve.node_routes import NodeRoutes
    from phalanx.serve.run_routes import RunRoutes

MAX_KEPT_LISTS = 64
STATIC_DIR = Path(__file__).parent / "static"
DASHBOARD_FILE = STATIC_DIR / "grafana.json"


@dataclass
class Server:
    """What the pages read. `stopping` ends the streams."""

    index: RunIndex
    jobs: JobReader
    nodes: NodeReader
    access: Access
    accounts: AccountReader
    prices: "Prices | None" = None
    streams: AgentStreams = field(default_factory=lambda: AgentStreams(dict))
    read_history: "Callable[[str], Sequence[NodeChange]]" = lambda name: ()
    node_actions: NodeActions = field(default_factory=NodeActions)
    fleet: "ServedFleet | None" = None
    wall_clock: Callable[[], float] = time.time
    stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._css = (read_page_css() + (STATIC_DIR / "serve.css").read_text()).encode()
        self._script = (read_page_script() + (STATIC_DIR / "live.js").read_text()).encode()
        self._lists: dict[RunQuery, tuple[object, float, str]] = {}
        static_version = hashlib.sha256(self._css + self._script).hexdigest()[:12]
        self.context = PageContext(self.access, static_version, self.wall_clock, self.stopping)

    @cached_property
    def run_routes(self) -> "RunRoutes":
        """The pages of a run."""
        from phalanx.serve.run_routes import RunRoutes

        return RunRoutes(self.index, self.context, self.prices)

    @cached_property
    def node_routes(self) -> "NodeRoutes":
        """The pages of nodes."""
        from phalanx.serve.node_routes import NodeRoutes

        return NodeRoutes(self.index, self.nodes, self.streams, self.read_history, self.context)

    @cached_property
    def fleet_routes(self) -> "FleetRoutes":
        """The pages of the fleet file."""
        from phalanx.serve.fleet_routes import FleetReadings, FleetRoutes
        from phalanx.serve.node_samples import add_samples

        def read() -> FleetReadings:
            found, samples = self.nodes.nodes, self.streams.read_samples()
            return FleetReadings(add_samples(found.nodes, samples), samples, found.racks)

        return FleetRoutes(self.fleet, self.context, read)

    @cached_property
    def cluster_routes(self) -> "ClusterRoutes":
        """The page of the cluster."""
        from phalanx.serve.cluster_routes import ClusterRoutes

        return ClusterRoutes(self.index, self.accounts, self.prices, self.context)

    @cached_property
    def metrics_routes(self) -> "MetricsRoutes":
        """What Prometheus reads."""
        from phalanx.serve.metrics_routes import MetricsRoutes

        return MetricsRoutes(self.index, self.jobs, self.nodes, self.streams, self.context)

    def make_app(self, on_start: Callable[[], None] = lambda: None) -> Starlette:
        """The application. `on_start` is called once it answers requests: what else starts then does not delay the
        first page, which needs the interpreter too."""

        @contextlib.asynccontextmanager
        async def run_readers(app: Starlette) -> AsyncIterator[None]:
            task = asyncio.create_task(self.streams.run())
            on_start()
            yield
            task.cancel()

        routes = [
            Route("/", self.show_runs),
            Route("/stream/runs", self.stream_runs),
            Route("/run/{id}", on_first_request(lambda: self.run_routes.show_run)),
            Route("/run/{id}/stream", on_first_request(lambda: self.run_routes.stream_run)),
            Route("/run/{id}/logs", on_first_request(lambda: self.run_routes.show_logs)),
            Route("/compare", on_first_request(lambda: self.run_routes.show_comparison)),
            Route("/jobs", self.show_jobs),
            Route("/stream/jobs", self.stream_jobs),
            *Actions(self.access, self.jobs, self.node_actions, self.index.find_run, self.wall_clock).make_routes(),
            Route("/power", on_first_request(lambda: self.fleet_routes.show_power)),
            Route("/stream/power", on_first_request(lambda: self.fleet_routes.stream_power)),
            Route("/cooling", on_first_request(lambda: self.fleet_routes.show_cooling)),
            Route("/stream/cooling", on_first_request(lambda: self.fleet_routes.stream_cooling)),
            Route("/nodes", on_first_request(lambda: self.node_routes.show_nodes)),
            Route("/stream/nodes", on_first_request(lambda: self.node_routes.stream_nodes)),
            Route("/nodes/{name}", on_first_request(lambda: self.node_routes.show_node)),
            Route("/metrics", on_first_request(lambda: self.metrics_routes.send_metrics)),
            Route("/grafana.json", self.send_dashboard),
            Route("/cluster", on_first_request(lambda: self.cluster_routes.show_cluster)),
            Route("/stream/cluster", on_first_request(lambda: self.cluster_routes.stream_cluster)),
            Route("/static/phalanx.css", self.send_css),
            Route("/static/phalanx.js", self.send_script),
        ]
        return Starlette(
            routes=routes,
            middleware=[Middleware(AccessMiddleware, access=self.access)],
            exception_handlers={404: self._show_not_found, DataError: self._show_refused},
            lifespan=run_readers,
        )

    async def show_runs(self, request: Request) -> Response:
        """The list of runs."""
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
        """The jobs of the backend."""
        return self.context.render("Jobs", "Jobs", render_jobs_page(self._render_jobs(request)), "stream/jobs")

    async def stream_jobs(self, request: Request) -> Response:
        """The jobs again, whenever they change."""

        async def read() -> Message:
            return {"sections": {"jobs": self._render_jobs(request)}}

        return self.context.stream(read)

    async def send_dashboard(self, request: Request) -> Response:
        """A dashboard of these metrics, to import in Grafana."""
        return Response(DASHBOARD_FILE.read_bytes(), media_type="application/json")

    async def send_css(self, request: Request) -> Response:
        """The style sheet."""
        return self._static(self._css, "text/css")

    async def send_script(self, request: Request) -> Response:
        """The scripts."""
        return self._static(self._script, "text/javascript")

    def _render_list(self, query: RunQuery) -> str:
        """The list of runs; browsers that look at the same one share it for a second."""
        now = self.wall_clock()
        found = self._lists.get(query)
        if found is None or found[0] is not self.index.rows or now - found[1] > STREAM_INTERVAL_S:
            if len(self._lists) >= MAX_KEPT_LISTS:
                self._lists.clear()
            found = self._lists[query] = (self.index.rows, now, self._render_new_list(query, now))
        return found[2]

    def _render_new_list(self, query: RunQuery, now: float) -> str:
        rows = select_rows(self.index.rows, query, now)
        last_page = max(0, (len(rows) - 1) // ROWS_PER_PAGE)
        shown = RunQuery(query.text, min(query.page, last_page))
        return render_run_list(rows, shown, self.index.is_complete)

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
    page = request.query_params.get("page", "0")
    return RunQuery(request.query_params.get("q", "").strip(), int(page) if re.fullmatch("[0-9]{1,8}", page) else 0)
