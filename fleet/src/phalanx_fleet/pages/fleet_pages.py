"""The pages of nodes, power and cooling, as `phalanx serve` adds them."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from phalanx.jobs.backends.base import NodeBackend, open_node_backend
from phalanx.run.private_files import state_root
from phalanx.serve.access import Access, Form, answer_form
from phalanx.serve.metrics import count_states
from phalanx.serve.page_context import ServedSite
from phalanx.telemetry.exposition import MetricDefinition, build_node_metrics, list_node_metrics
from phalanx.telemetry.sample import SAMPLE_INTERVAL_S, NodeSample
from phalanx_fleet.audit_log import find_actor
from phalanx_fleet.fleet_file import open_node_states
from phalanx_fleet.fleet_node import LATE_AFTER_PERIODS, SHOWN_STATES, add_samples
from phalanx_fleet.node_list import FleetReader, FleetSources, FleetView, NodeReader, drain_node, undrain_node
from phalanx_fleet.node_states import NodeChange
from phalanx_fleet.nodes_file import load_nodes_file
from phalanx_fleet.pages.agent_streams import AgentStreams
from phalanx_fleet.pages.node_pages import NodeRoutes
from phalanx_fleet.pages.power_page import FleetRoutes, load_served_fleet
from phalanx_fleet.pages.site_history import SiteHistory
from phalanx_fleet.power.committed_power import LevelReading

STATIC_DIR = Path(__file__).parent / "static"
NODE_COUNT = MetricDefinition("phalanx_nodes", "Nodes in this state", ("state",))
FAILED_FANS = MetricDefinition("phalanx_node_failed_fans", "Fans that do not turn", ("node",))
RACK_LEAK = MetricDefinition("phalanx_rack_leak", "1: the rack or CDU reports a leak", ("rack", "name"))
LEVEL_METRICS = {
    "budget_w": MetricDefinition("phalanx_power_budget_watts", "Budget that holds now", ("level",)),
    "committed_w": MetricDefinition("phalanx_power_committed_watts", "The most that its nodes may draw", ("level",)),
    "draw_w": MetricDefinition("phalanx_power_draw_watts", "Power of the nodes that are read", ("level",)),
    "headroom_w": MetricDefinition("phalanx_power_headroom_watts", "Budget less committed power", ("level",)),
}
"""The metric of each attribute of a level of the fleet file."""


@dataclass(frozen=True)
class FleetPageOptions:
    """What the pages show."""

    nodes: Path | None = None
    """Nodes file, which names the nodes instead of the backend."""
    fleet: Path | None = None
    """Fleet file with budgets and a plant."""
    targets: Path | None = None
    """Load targets of that fleet."""
    agent_port: int = 0
    """PHALANX_METRICS_PORT of the agents; 0: none are asked."""


class FleetPages:
    """Reads nodes in a thread, and samples of their agents in the server's event loop (`phalanx.serve.page_context`).

    Raises RecipeError for what is wrong in the files.
    """

    tabs = (("Nodes", "nodes"), ("Power", "power"), ("Cooling", "cooling"))

    def __init__(self, options: FleetPageOptions):
        if options.nodes is not None:
            load_nodes_file(options.nodes)  # what is wrong with it is said before anything is served
        self._options = options
        self._fleet = None if options.fleet is None else load_served_fleet(options.fleet, options.targets)
        self.style = (STATIC_DIR / "fleet.css").read_text()
        self.script = (STATIC_DIR / "heat_map.js").read_text()
        name = "history.db" if self._fleet is None else f"history-{self._fleet.file.name}.db"
        self.history = SiteHistory(state_root() / name)
        self.nodes = NodeReader(self._open_reader, self.history.close)
        self.streams = AgentStreams(self._find_agents)

    def open(self, site: ServedSite) -> None:
        """Take the server that shows these pages."""
        self._site = site
        self._node_routes = NodeRoutes(self.nodes, self.streams, self._read_changes, self.history, site.context)
        self._fleet_routes = FleetRoutes(self._fleet, site.context, self.nodes, self.streams, self.history)

    def make_routes(self) -> Sequence[Route]:
        return [
            Route("/power", self._fleet_routes.show_power),
            Route("/stream/power", self._fleet_routes.stream_power),
            Route("/cooling", self._fleet_routes.show_cooling),
            Route("/stream/cooling", self._fleet_routes.stream_cooling),
            Route("/nodes", self._node_routes.show_nodes),
            Route("/stream/nodes", self._node_routes.stream_nodes),
            Route("/stream/nodes/{name}", self._node_routes.stream_node),
            Route("/nodes/{name}", self._node_routes.show_node),
            *NodeActions(self._site.context.access, self._site.backend, self._options.fleet).make_routes(),
        ]

    def start(self) -> None:
        self.nodes.start()

    def stop(self) -> None:
        self.nodes.stop()

    async def run(self) -> None:
        """Follow the agents of the nodes."""
        await self.streams.run()

    def build_metrics(self, with_readings: bool) -> Iterator[Metric]:
        """States of nodes, levels of power, and what agents and services have read. What is late has no value."""
        view = self.nodes.view
        samples = self.streams.read_samples()
        now = self._site.context.wall_clock()
        if view.is_current:
            known = add_samples(view.nodes, samples)
            yield from NODE_COUNT.build(count_states(SHOWN_STATES, (node.find_shown_state(now) for node in known)))
            yield from FAILED_FANS.build(
                ((node.name,), node.reading.failed_fans)
                for node in known
                if node.reading is not None and not node.reading.is_late(now)
            )
            yield from RACK_LEAK.build(((rack.id, rack.name), rack.has_leak) for rack in view.racks)
            if self._fleet is not None:
                yield from build_level_metrics(self._fleet.read_levels(known, now))
        if with_readings:
            yield from build_sample_metrics(samples, now)

    def _read_changes(self, name: str) -> list[NodeChange]:
        with open_node_states(self._options.fleet) as states:
            return states.history(name)

    def _open_reader(self) -> Callable[[], FleetView]:
        """Reads the nodes of the backend, or of the nodes file, with what running runs have recorded."""

        def list_running() -> list[Path]:
            now = time.time()
            return [row.path for row in self._site.index.rows.values() if row.status(now) == "running"]

        nodes = self._options.nodes
        sources = FleetSources(None if nodes is not None else open_node_backend(self._site.backend), nodes)
        finds_evidence = self._site.allow_actions
        reader = FleetReader(
            sources, open_node_states(self._options.fleet), list_more_runs=list_running, finds_evidence=finds_evidence
        )

        def read() -> FleetView:
            view, now = reader.read(), time.time()
            known = add_samples(view.nodes, self.streams.read_samples())
            self.history.record(known, [] if self._fleet is None else self._fleet.read_levels(known, now), now)
            return replace(view, problems=[*view.problems, self.history.problem]) if self.history.problem else view

        return read

    def _find_agents(self) -> dict[str, tuple[str, int]]:
        """Addresses of the agents of nodes; none for port 0."""
        port = self._options.agent_port
        return {node.name: (node.name, port) for node in self.nodes.view.nodes} if port else {}


def list_metrics() -> list[MetricDefinition]:
    """All metrics of these pages, without dcgm-exporter's names."""
    return [NODE_COUNT, FAILED_FANS, RACK_LEAK, *LEVEL_METRICS.values(), *list_node_metrics()]


def build_level_metrics(levels: Sequence[LevelReading]) -> Iterator[Metric]:
    """The metrics of levels. One of which no node is read has no draw."""
    for name, metric in LEVEL_METRICS.items():
        read = [each for each in levels if not each.node and (name != "draw_w" or each.num_read)]
        yield from metric.build(((each.label,), getattr(each, name)) for each in read)


def build_sample_metrics(samples: Mapping[str, NodeSample], now: float) -> Iterable[Metric]:
    """The metrics of the newest samples; none of a node with a late sample."""
    late_after_s = LATE_AFTER_PERIODS * SAMPLE_INTERVAL_S
    return build_node_metrics({name: one for name, one in samples.items() if abs(now - one.time) <= late_after_s})


@dataclass(frozen=True)
class NodeActions:
    """What the page does to the nodes of a backend."""

    access: Access
    backend: str = "local"
    fleet: Path | None = None
    open_backend: Callable[[str], NodeBackend] = open_node_backend

    def make_routes(self) -> list[Route]:
        return [
            Route("/nodes/drain", self.drain, methods=["POST"]),
            Route("/nodes/undrain", self.undrain, methods=["POST"]),
        ]

    async def drain(self, request: Request) -> Response:
        return await self._act(request, drain_node, "is drained")

    async def undrain(self, request: Request) -> Response:
        return await self._act(request, undrain_node, "is taken back")

    async def _act(self, request: Request, change: Callable[..., object], result: str) -> Response:
        def act(form: Form) -> str:
            node, actor = form.get("node", ""), f"{find_actor()} (page)"  # all browsers have the same token
            with open_node_states(self.fleet) as states:
                change(self.open_backend(self.backend), states, node, form.get("reason", ""), actor)
            return f"{node} {result}."

        return await answer_form(self.access, request, act)
