"""The routes of the pages of a fleet file: power tree and cooling."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from phalanx.serve.page_context import Message, PageContext
from phalanx.telemetry.sample import NodeSample
from phalanx_fleet.fleet_file import FleetFile, load_fleet_file
from phalanx_fleet.fleet_node import FleetNode
from phalanx_fleet.pages.cooling_page import list_margins, render_cooling, render_cooling_page
from phalanx_fleet.pages.power_page import read_levels, render_power, render_power_page
from phalanx_fleet.pages.site_history import SiteHistory
from phalanx_fleet.power.committed_power import LevelReading
from phalanx_fleet.power.load_targets import TargetsFileSource
from phalanx_fleet.power_tree import PowerTree, build_power_tree
from phalanx_fleet.telemetry.service_reading import RackSample

NO_FLEET = "This page needs a fleet file: phalanx serve --fleet FLEET.yaml"


@dataclass(frozen=True)
class ServedFleet:
    """A fleet file, as it was when the server started, and the file of its load targets, as it is now."""

    file: FleetFile
    tree: PowerTree
    targets: TargetsFileSource | None = None

    def read_levels(self, nodes: Sequence[FleetNode], now: float) -> list[LevelReading]:
        """Return all levels, with the budgets that hold now."""
        return read_levels(self.tree, nodes, self.file.power.margin, now, self.targets or ())


def load_served_fleet(path: Path, targets: Path | None = None) -> ServedFleet:
    """Load a fleet file, and one of load targets. Raises RecipeError for what is wrong in them."""
    file, locations = load_fleet_file(path)
    tree = build_power_tree(file, locations)
    return ServedFleet(file, tree, None if targets is None else TargetsFileSource(targets, tree))


@dataclass(frozen=True)
class FleetReadings:
    """What is known of the nodes and racks now."""

    nodes: Sequence[FleetNode]
    samples: Mapping[str, NodeSample]
    racks: Sequence[RackSample]


@dataclass
class FleetRoutes:
    """The routes."""

    fleet: ServedFleet | None
    context: PageContext
    read: Callable[[], FleetReadings]
    history: SiteHistory
    _shown: dict[str, tuple[int, str]] = field(default_factory=dict)

    async def show_power(self, request: Request) -> Response:
        """The power tree."""
        rack = request.query_params.get("rack", "")
        body = render_power_page(self._render_power(rack))
        return self.context.render("Power", "Power", body, f"stream/power?{urlencode({'rack': rack})}")

    async def stream_power(self, request: Request) -> Response:
        """The power tree again."""

        async def read() -> Message:
            return {"sections": {"power": self._render_power(request.query_params.get("rack", ""))}}

        return self.context.stream(read)

    async def show_cooling(self, request: Request) -> Response:
        """Racks and margins."""
        return self.context.render("Cooling", "Cooling", render_cooling_page(self._render_cooling()), "stream/cooling")

    async def stream_cooling(self, request: Request) -> Response:
        """Racks and margins again."""

        async def read() -> Message:
            return {"sections": {"cooling": self._render_cooling()}}

        return self.context.stream(read)

    def _render_power(self, rack: str) -> str:
        fleet = self.fleet
        if fleet is None:
            return f'<p class="note">{NO_FLEET}</p>'

        def render(now: float) -> str:
            shown = render_power(fleet.read_levels(self.read().nodes, now), self.history.level_lines, rack)
            problem = None if fleet.targets is None else fleet.targets.problem
            return shown if problem is None else f'<p class="note problem">{escape(problem)}</p>{shown}'

        return self._share(f"power {rack}", render)

    def _render_cooling(self) -> str:
        def render(now: float) -> str:
            found = self.read()
            return render_cooling(found.racks, list_margins(found.nodes, found.samples, now))

        return self._share("cooling", render)

    def _share(self, name: str, render: Callable[[float], str]) -> str:
        """A section; browsers that look at it share it for a second."""
        now = self.context.wall_clock()
        shown = self._shown.get(name)
        if shown is None or shown[0] != int(now):
            shown = self._shown[name] = (int(now), render(now))
        return shown[1]
