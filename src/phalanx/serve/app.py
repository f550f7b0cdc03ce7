"""The routes of the server: pages, streams of server-sent events that renew them, and actions."""

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from phalanx.cluster.spec import Prices
from phalanx.errors import DataError, UsageError
from phalanx.fleet.node_states import NodeChange
from phalanx.fleet.telemetry.agent_endpoint import METRICS_TYPE
from phalanx.fleet.telemetry.exposition import render_families
from phalanx.observe.compare import compare_runs, render_comparison_body
from phalanx.observe.html_report.document import read_page_css, read_page_script
from phalanx.run import Run
from phalanx.serve.access import Access, AccessMiddleware, describe_refusal
from phalanx.serve.actions import Actions
from phalanx.serve.agent_streams import AgentStreams
from phalanx.serve.cluster_page import find_period, render_cluster, render_cluster_page
from phalanx.serve.fleet_routes import FleetReadings, FleetRoutes, ServedFleet
from phalanx.serve.job_pages import JobReader, render_jobs, render_jobs_page
from phalanx.serve.live_run import LiveRuns
from phalanx.serve.log_pages import render_logs
from phalanx.serve.metrics import MetricSnapshot, build_metrics
from phalanx.serve.node_actions import NodeActions
from phalanx.serve.node_pages import (
    HEAT_MAPS,
    HISTORY_HOURS,
    build_heat_map,
    render_node,
    render_nodes,
    render_nodes_page,
)
from phalanx.serve.node_reader import NodeReader, add_samples, read_node_minutes
from phalanx.serve.page_stream import STREAM_INTERVAL_S, Message, make_chart_message, stream_messages
from phalanx.serve.pages import (
    ROWS_PER_PAGE,
    PageFrame,
    RunQuery,
    render_frame,
    render_problem,
    render_reading_note,
    render_run,
    render_run_list,
    render_runs,
    select_rows,
)
from phalanx.serve.run_accounts import AccountReader
from phalanx.serve.run_index import RunIndex

MAX_COMPARED_RUNS = 6
MAX_KEPT_LISTS = 64
USAGE_INTERVAL_S = 5.0
STATIC_DIR = Path(__file__).parent / "static"
DASHBOARD_FILE = STATIC_DIR / "grafana.json"

Handler = Callable[[Request], Awaitable[Response]]


@dataclass
class Server:
    """What the pages read. `stopping` ends the streams."""

    index: RunIndex
    jobs: JobReader
    nodes: NodeReader
    access: Access
    accounts: AccountReader
    prices: Prices = field(default_factory=Prices)
    streams: AgentStreams = field(default_factory=lambda: AgentStreams(dict))
    read_history: Callable[[str], Sequence[NodeChange]] = lambda name: ()
    node_actions: NodeActions = field(default_factory=NodeActions)
    fleet: ServedFleet | None = None
    wall_clock: Callable[[], float] = time.time
    stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.live_runs = LiveRuns(prices=self.prices)
        self.fleet_routes = self._make_fleet_routes()
        self._css = (read_page_css() + (STATIC_DIR / "serve.css").read_text()).encode()
        self._script = (read_page_script() + (STATIC_DIR / "live.js").read_text()).encode()
        self._nodes_shown: tuple[tuple[str, str], int, tuple[str, dict[str, Any]]] | None = None
        self._usages: dict[str, tuple[float, str]] = {}
        self._lists: dict[RunQuery, tuple[object, float, str]] = {}
        self._static_version = hashlib.sha256(self._css + self._script).hexdigest()[:12]

    def make_app(self) -> Starlette:
        """The application."""
        routes = [
            Route("/", self.show_runs),
            Route("/stream/runs", self.stream_runs),
            Route("/run/{id}", self.show_run),
            Route("/run/{id}/stream", self.stream_run),
            Route("/run/{id}/logs", self.show_logs),
            Route("/compare", self.show_comparison),
            Route("/jobs", self.show_jobs),
            *Actions(self.access, self.jobs, self.node_actions, self._find_run, self.wall_clock).make_routes(),
            *self.fleet_routes.make_routes(),
            Route("/stream/jobs", self.stream_jobs),
            Route("/nodes", self.show_nodes),
            Route("/stream/nodes", self.stream_nodes),
            Route("/nodes/{name}", self.show_node),
            Route("/metrics", self.send_metrics),
            Route("/grafana.json", self.send_dashboard),
            Route("/cluster", self.show_cluster),
            Route("/stream/cluster", self.stream_cluster),
            Route("/static/phalanx.css", self.send_css),
            Route("/static/phalanx.js", self.send_script),
        ]
        return Starlette(
            routes=routes,
            middleware=[Middleware(AccessMiddleware, access=self.access)],
            exception_handlers={404: self._show_not_found},
            lifespan=self._follow_agents,
        )

    @contextlib.asynccontextmanager
    async def _follow_agents(self, app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self.streams.run())
        yield
        task.cancel()

    async def show_runs(self, request: Request) -> Response:
        """The list of runs."""
        query = _read_query(request)
        body = render_runs(self._render_list(query), query)
        return self._page("Runs", "Runs", body, query.to_address("/stream/runs"))

    async def stream_runs(self, request: Request) -> Response:
        """The list again, whenever it changes."""
        query = _read_query(request)

        async def read() -> Message:
            return {"sections": {"runs": self._render_list(query)}}

        return self._stream_messages(read)

    async def show_run(self, request: Request) -> Response:
        """The page of a run."""
        if (live := self._find_run(request)) is None:
            return self._missing_run()
        try:
            page = await run_in_threadpool(self.live_runs.find(live).read_page)
        except DataError as error:
            return self._page("Run", "Runs", render_problem(str(live.path), str(error)), status=422)
        id = request.path_params["id"]
        return self._page(
            page.title, "Runs", render_run(page, f"/run/{id}", self._may_act(request)), f"/run/{id}/stream"
        )

    async def stream_run(self, request: Request) -> Response:
        """The parts of a run's page that change, and its charts."""
        if (run := self._find_run(request)) is None:
            return self._missing_run()
        live, shown_titles, shown_version = self.live_runs.find(run), [""], [0]

        async def read() -> Message:
            try:
                page = await run_in_threadpool(live.read_page)
            except DataError as error:
                return {"sections": {"reading": render_problem(str(run.path), str(error))}}
            if not run.path.is_dir():
                gone = "The directory of this run is no longer there. What follows is the last that was read."
                return {"sections": {"reading": f'<p class="note problem">{gone}</p>'}}
            message: Message = {"sections": {"reading": render_reading_note(page), **page.sections}}
            titles = " ".join(chart.full_title for chart in page.charts)
            if page.version != shown_version[0]:
                message["charts"] = make_chart_message(page.charts, is_same=titles == shown_titles[0])
            shown_titles[0], shown_version[0] = titles, page.version
            return message

        return self._stream_messages(read)

    async def show_logs(self, request: Request) -> Response:
        """Output of the workers of a run."""
        if (run := self._find_run(request)) is None:
            return self._missing_run()
        values = request.query_params
        end = int(values["end"]) if values.get("end", "").isdecimal() else None
        wanted, id = values.get("q", ""), request.path_params["id"]
        body = await run_in_threadpool(render_logs, run, id, values.get("log"), wanted, end)
        return self._page("Logs", "Runs", body)

    async def show_comparison(self, request: Request) -> Response:
        """The runs that were ticked, side by side."""
        rows = [row for id in request.query_params.getlist("run") if (row := self.index.find(id)) is not None]
        if not 2 <= len(rows) <= MAX_COMPARED_RUNS:
            text = f"Tick 2 to {MAX_COMPARED_RUNS} runs in the list, then compare them."
            return self._page("Compare", "Runs", render_problem("Compare runs", text), status=400)
        try:
            comparison = await run_in_threadpool(compare_runs, [Run(row.path) for row in rows])
        except (DataError, UsageError) as error:
            return self._page("Compare", "Runs", render_problem("Compare runs", str(error)), status=422)
        return self._page("Compare", "Runs", render_comparison_body(comparison))

    async def show_jobs(self, request: Request) -> Response:
        """The jobs of the backend."""
        return self._page("Jobs", "Jobs", render_jobs_page(self._render_jobs(request)), "/stream/jobs")

    async def stream_jobs(self, request: Request) -> Response:
        """The jobs again, whenever they change."""

        async def read() -> Message:
            return {"sections": {"jobs": self._render_jobs(request)}}

        return self._stream_messages(read)

    async def show_nodes(self, request: Request) -> Response:
        """All nodes."""
        by, text = _read_node_query(request)
        body = render_nodes_page(self._render_nodes(by, text)[0], by, text)
        return self._page("Nodes", "Nodes", body, f"/stream/nodes?{urlencode({'by': by, 'q': text})}")

    async def stream_nodes(self, request: Request) -> Response:
        """The table of nodes and the heat map again."""
        by, text = _read_node_query(request)

        async def read() -> Message:
            html, heat_map = self._render_nodes(by, text)
            return {"sections": {"nodes": html}, "heatMap": heat_map}

        return self._stream_messages(read)

    async def show_node(self, request: Request) -> Response:
        """A node: its state with history, and its last day."""
        name, now = request.path_params["name"], self.wall_clock()
        nodes = add_samples(self.nodes.nodes.nodes, self.streams.read_samples())
        node = next((each for each in nodes if each.name == name), None)
        if node is None:
            text = "The backend and the nodes file have no node of this name."
            return self._page("Node", "Nodes", render_problem("No such node", text), status=404)
        runs = [Run(row.path) for row in self.index.rows.values() if now - row.last_written_at < 3600 * HISTORY_HOURS]
        minutes = await run_in_threadpool(read_node_minutes, runs, node)
        changes = await run_in_threadpool(self.read_history, name)
        return self._page(name, "Nodes", render_node(node, changes, minutes, self._may_act(request), now))

    async def show_cluster(self, request: Request) -> Response:
        """Usage over all runs."""
        period = find_period([request.query_params.get("period", "")])
        body = render_cluster_page(self._render_cluster(period), period)
        return self._page("Cluster", "Cluster", body, f"/stream/cluster?period={period}")

    async def stream_cluster(self, request: Request) -> Response:
        """Usage again."""
        period = find_period([request.query_params.get("period", "")])

        async def read() -> Message:
            return {"sections": {"cluster": self._render_cluster(period)}}

        return self._stream_messages(read)

    async def send_metrics(self, request: Request) -> Response:
        """Runs, jobs and nodes for Prometheus; `?readings=no`: without what agents read, which may be long."""
        snapshot = self.take_snapshot(request.query_params.get("readings") != "no")
        content = await run_in_threadpool(lambda: render_families(build_metrics(snapshot)))
        return Response(content, headers={"content-type": METRICS_TYPE})

    async def send_dashboard(self, request: Request) -> Response:
        """A dashboard of these metrics, to import in Grafana."""
        return Response(DASHBOARD_FILE.read_bytes(), media_type="application/json")

    def take_snapshot(self, with_readings: bool = True) -> MetricSnapshot:
        """What is known now."""
        jobs, nodes = self.jobs.jobs, self.nodes.nodes
        return MetricSnapshot(
            self.wall_clock(),
            list(self.index.rows.values()),
            self.index.is_complete,
            None if jobs.read_at is None or jobs.problem else [job.state.value for job in jobs.jobs],
            [node.state for node in nodes.nodes] if nodes.is_current else None,
            self.streams.read_samples() if with_readings else {},
        )

    async def send_css(self, request: Request) -> Response:
        """The style sheet."""
        return self._static(self._css, "text/css")

    async def send_script(self, request: Request) -> Response:
        """The scripts."""
        return self._static(self._script, "text/javascript")

    def _make_fleet_routes(self) -> FleetRoutes:
        def read() -> FleetReadings:
            found, samples = self.nodes.nodes, self.streams.read_samples()
            return FleetReadings(add_samples(found.nodes, samples), samples, found.racks)

        return FleetRoutes(self.fleet, self.access, read, self._page, self._stream_messages, self.wall_clock)

    def _may_act(self, request: Request) -> bool:
        return describe_refusal(self.access, request) is None

    def _render_cluster(self, period: str) -> str:
        """Usage over a period; browsers share it for some seconds, since it sums over all runs."""
        now = self.wall_clock()
        found = self._usages.get(period)
        if found is None or now - found[0] > USAGE_INTERVAL_S:
            html = render_cluster(self.index.rows, self.accounts.accounts, self.prices, period, now)
            found = self._usages[period] = (now, html)
        return found[1]

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
        return render_jobs(self.jobs.jobs, self.jobs.backend, self._may_act(request))

    def _render_nodes(self, by: str, text: str) -> tuple[str, dict[str, Any]]:
        """The table and the heat map; browsers that look at the same share them for a second."""
        now = self.wall_clock()
        if self._nodes_shown is None or self._nodes_shown[:2] != ((by, text), int(now)):
            found, samples = self.nodes.nodes, self.streams.read_samples()
            nodes = add_samples(found.nodes, samples)
            shown = render_nodes(found, nodes, text, now), build_heat_map(nodes, samples, by, now)
            self._nodes_shown = ((by, text), int(now), shown)
        return self._nodes_shown[2]

    def _find_run(self, request: Request) -> Run | None:
        row = self.index.find(request.path_params["id"])
        return None if row is None else Run(row.path)

    def _missing_run(self) -> Response:
        text = "No run with this address. It was moved or removed, or the server has not found it yet."
        return self._page("Run", "Runs", render_problem("No such run", text), status=404)

    async def _show_not_found(self, request: Request, error: Exception) -> Response:
        return self._page(
            "Not found", "", render_problem("Not found", "There is no page with this address."), status=404
        )

    def _page(self, title: str, tab: str, body: str, events: str | None = None, status: int = 200) -> Response:
        return HTMLResponse(render_frame(PageFrame(title, tab, events, self._static_version), body), status)

    def _stream_messages(self, read: Callable[[], Awaitable[Message]]) -> Response:
        messages = stream_messages(read, self.stopping.is_set, self.wall_clock)
        return StreamingResponse(messages, media_type="text/event-stream")

    def _static(self, content: bytes, media_type: str) -> Response:
        headers = {"cache-control": "max-age=31536000, immutable"}  # the address changes with the content
        return Response(content, media_type=media_type, headers=headers)


def _read_node_query(request: Request) -> tuple[str, str]:
    by = request.query_params.get("by", "")
    return by if by in HEAT_MAPS else next(iter(HEAT_MAPS)), request.query_params.get("q", "").strip()


def _read_query(request: Request) -> RunQuery:
    page = request.query_params.get("page", "0")
    return RunQuery(request.query_params.get("q", "").strip(), int(page) if page.isdecimal() and len(page) < 9 else 0)
