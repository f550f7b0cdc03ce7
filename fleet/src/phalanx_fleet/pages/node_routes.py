"""The routes of nodes: all of them, and one with its history."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from phalanx.errors import DataError
from phalanx.serve.page_context import Message, PageContext
from phalanx.serve.pages import render_problem
from phalanx.telemetry.sample import NodeSample
from phalanx_fleet.fleet_node import FleetNode, add_samples
from phalanx_fleet.node_states import NodeChange
from phalanx_fleet.pages.agent_streams import AgentStreams
from phalanx_fleet.pages.node_pages import (
    HEAT_MAPS,
    build_heat_map,
    render_facts,
    render_node,
    render_nodes,
    render_nodes_page,
)
from phalanx_fleet.pages.node_reader import NodeReader
from phalanx_fleet.pages.site_history import SiteHistory


@dataclass
class NodeRoutes:
    """The handlers."""

    nodes: NodeReader
    streams: AgentStreams
    read_changes: Callable[[str], Sequence[NodeChange]]
    history: SiteHistory
    context: PageContext
    _shown: tuple[tuple[str, str], int, tuple[str, dict[str, Any]]] | None = field(default=None, init=False)

    async def show_nodes(self, request: Request) -> Response:
        """All nodes."""
        by, text = _read_node_query(request)
        body = render_nodes_page(self._render_nodes(by, text)[0], by, text)
        return self.context.render("Nodes", "Nodes", body, f"stream/nodes?{urlencode({'by': by, 'q': text})}")

    async def stream_nodes(self, request: Request) -> Response:
        """The table of nodes and the heat map again."""
        by, text = _read_node_query(request)

        async def read() -> Message:
            html, heat_map = self._render_nodes(by, text)
            return {"sections": {"nodes": html}, "heatMap": heat_map}

        return self.context.stream(read)

    async def show_node(self, request: Request) -> Response:
        """A node: its state and devices now, how it came into its state, and its last day."""
        name, now = request.path_params["name"], self.context.wall_clock()
        node, sample = self._find_node(name)
        if node is None:
            text = "The backend and the nodes file have no node of this name."
            return self.context.render("Node", "Nodes", render_problem("No such node", text), status=404)
        changes = await run_in_threadpool(self.read_changes, name)
        try:
            day = await run_in_threadpool(self.history.read_node, name, now)
        except DataError as error:
            return self.context.render(name, "Nodes", render_problem("Damaged history", str(error)), status=500)
        body = render_node(node, sample, changes, day, self.context.may_act(request), now)
        return self.context.render(name, "Nodes", body, f"stream/nodes/{quote(name, safe='')}")

    async def stream_node(self, request: Request) -> Response:
        """The state and the devices of a node again."""
        name = request.path_params["name"]

        async def read() -> Message:
            node, sample = self._find_node(name)
            return {} if node is None else {"sections": {"node": render_facts(node, sample, self.context.wall_clock())}}

        return self.context.stream(read)

    def _find_node(self, name: str) -> tuple[FleetNode | None, NodeSample | None]:
        samples = self.streams.read_samples()
        nodes = add_samples([each for each in self.nodes.nodes.nodes if each.name == name], samples)
        return next(iter(nodes), None), samples.get(name)

    def _render_nodes(self, by: str, text: str) -> tuple[str, dict[str, Any]]:
        """The table and the heat map; browsers that look at the same share them for a second."""
        now = self.context.wall_clock()
        if self._shown is None or self._shown[:2] != ((by, text), int(now)):
            found, samples = self.nodes.nodes, self.streams.read_samples()
            nodes = add_samples(found.nodes, samples)
            found = replace(found, problems=[*found.problems, *self.streams.list_problems()])
            shown = render_nodes(found, nodes, text, now), build_heat_map(nodes, samples, by, now)
            self._shown = ((by, text), int(now), shown)
        return self._shown[2]


def _read_node_query(request: Request) -> tuple[str, str]:
    by = request.query_params.get("by", "")
    return by if by in HEAT_MAPS else next(iter(HEAT_MAPS)), request.query_params.get("q", "").strip()
