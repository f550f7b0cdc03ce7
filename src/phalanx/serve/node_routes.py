"""The routes of nodes: all of them, and one with its history."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlencode

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from phalanx.fleet.node_states import NodeChange
from phalanx.run import Run
from phalanx.serve.agent_streams import AgentStreams
from phalanx.serve.node_pages import (
    HEAT_MAPS,
    HISTORY_HOURS,
    build_heat_map,
    render_node,
    render_nodes,
    render_nodes_page,
)
from phalanx.serve.node_reader import NodeReader
from phalanx.serve.node_samples import add_samples, read_node_minutes
from phalanx.serve.page_context import PageContext
from phalanx.serve.page_stream import Message
from phalanx.serve.pages import render_problem
from phalanx.serve.run_index import RunIndex


@dataclass
class NodeRoutes:
    """The handlers."""

    index: RunIndex
    nodes: NodeReader
    streams: AgentStreams
    read_history: Callable[[str], Sequence[NodeChange]]
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
        """A node: its state with history, and its last day."""
        name, now = request.path_params["name"], self.context.wall_clock()
        nodes = add_samples(self.nodes.nodes.nodes, self.streams.read_samples())
        node = next((each for each in nodes if each.name == name), None)
        if node is None:
            text = "The backend and the nodes file have no node of this name."
            return self.context.render("Node", "Nodes", render_problem("No such node", text), status=404)
        runs = [Run(row.path) for row in self.index.rows.values() if now - row.last_written_at < 3600 * HISTORY_HOURS]
        minutes = await run_in_threadpool(read_node_minutes, runs, node)
        changes = await run_in_threadpool(self.read_history, name)
        return self.context.render(
            name, "Nodes", render_node(node, changes, minutes, self.context.may_act(request), now)
        )

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
