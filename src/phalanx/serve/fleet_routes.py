"""The routes of the pages of a fleet file: power tree, cooling, what-if."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from phalanx.app.bounded_simulation import SimulationRequest, simulate_bounded
from phalanx.errors import UsageError
from phalanx.fleet.fleet_file import FleetFile, load_fleet_file
from phalanx.fleet.fleet_node import FleetNode
from phalanx.fleet.power.load_targets import TargetsFileSource
from phalanx.fleet.power_tree import NodePower, PowerTree, build_power_tree
from phalanx.fleet.telemetry.sample import NodeSample, RackSample
from phalanx.fleet.thermal.plant_settings import CoolingPlant
from phalanx.serve.access import describe_refusal
from phalanx.serve.actions import read_form
from phalanx.serve.cooling_page import list_margins, render_cooling, render_cooling_page
from phalanx.serve.page_context import PageContext
from phalanx.serve.page_stream import Message
from phalanx.serve.pages import render_problem
from phalanx.serve.power_page import render_power, render_power_page
from phalanx.serve.what_if_page import parse_request, render_what_if_page

NO_FLEET = "This page needs a fleet file: phalanx serve --fleet FLEET.yaml"


@dataclass(frozen=True)
class ServedFleet:
    """A fleet file, as it was when the server started, and the file of its load targets, as it is now."""

    path: Path
    file: FleetFile
    tree: PowerTree
    targets: TargetsFileSource | None = None

    @property
    def plant(self) -> CoolingPlant | None:
        """The cooling plant of the fleet, or of its simulation."""
        return self.file.cooling or (None if self.file.simulate is None else self.file.simulate.site.plant)


def load_served_fleet(path: Path, targets: Path | None = None) -> ServedFleet:
    """Load a fleet file, and one of load targets. Raises RecipeError for what is wrong in them."""
    file, locations = load_fleet_file(path)
    tree = build_power_tree(file, locations)
    return ServedFleet(path.absolute(), file, tree, None if targets is None else TargetsFileSource(targets, tree))


@dataclass(frozen=True)
class FleetReadings:
    """What is known of the nodes and racks now."""

    nodes: Sequence[FleetNode]
    samples: Mapping[str, NodeSample]
    racks: Sequence[RackSample]


@dataclass
class FleetRoutes:
    """The routes. `simulate` runs what-if studies, one at a time."""

    fleet: ServedFleet | None
    context: PageContext
    read: Callable[[], FleetReadings]
    simulate: Callable[[SimulationRequest], str] = simulate_bounded
    _shown: dict[str, tuple[int, str]] = field(default_factory=dict)
    simulation_lock: threading.Lock = field(default_factory=threading.Lock)

    async def show_power(self, request: Request) -> Response:
        """The power tree."""
        return self.context.render("Power", "Power", render_power_page(self._render_power()), "stream/power")

    async def stream_power(self, request: Request) -> Response:
        """The power tree again."""

        async def read() -> Message:
            return {"sections": {"power": self._render_power()}}

        return self.context.stream(read)

    async def show_cooling(self, request: Request) -> Response:
        """Racks and margins."""
        return self.context.render("Cooling", "Cooling", render_cooling_page(self._render_cooling()), "stream/cooling")

    async def stream_cooling(self, request: Request) -> Response:
        """Racks and margins again."""

        async def read() -> Message:
            return {"sections": {"cooling": self._render_cooling()}}

        return self.context.stream(read)

    async def show_what_if(self, request: Request) -> Response:
        """The form."""
        refusal = NO_FLEET if self.fleet is None else describe_refusal(self.context.access, request)
        return self.context.render("What-if", "What-if", render_what_if_page({}, "", refusal))

    async def answer_what_if(self, request: Request) -> Response:
        """The form, and the comparison that it asks for. It costs CPU time: only for browsers that may act."""
        refusal = describe_refusal(self.context.access, request)
        if self.fleet is None or refusal is not None:
            return self._answer({}, render_problem("Not simulated", refusal or NO_FLEET), 403, refusal or NO_FLEET)
        if (form := await read_form(request)) is None:
            return PlainTextResponse("The request is too long.", 413)
        if not self.simulation_lock.acquire(blocking=False):
            text = "Another simulation runs. Send the form again when it is done."
            return self._answer(form, render_problem("Not simulated", text), 429)
        try:
            body = await run_in_threadpool(self.simulate, parse_request(form, str(self.fleet.path)))
        except UsageError as error:
            return self._answer(form, render_problem("Not simulated", str(error).replace("`", "")), 422)
        finally:
            self.simulation_lock.release()
        return self._answer(form, body)

    def _answer(self, form: Mapping[str, str], answer: str, status: int = 200, refusal: str | None = None) -> Response:
        answer = answer.replace("<h1>", "<h2>").replace("</h1>", "</h2>")  # the page has one title
        body = render_what_if_page(form, answer, refusal)
        return self.context.render("What-if", "What-if", body, status=status)

    def _render_power(self) -> str:
        fleet = self.fleet
        if fleet is None:
            return f'<p class="note">{NO_FLEET}</p>'

        def render(now: float) -> str:
            targets = () if fleet.targets is None else fleet.targets.read_targets()
            problem = None if fleet.targets is None else fleet.targets.problem
            shown = render_power(fleet.tree, self.read().nodes, fleet.file.power.margin, now, targets)
            return shown if problem is None else f'<p class="note problem">{escape(problem)}</p>{shown}'

        return self._share("power", render)

    def _render_cooling(self) -> str:
        powers: dict[str, NodePower] = {}
        if self.fleet is not None:
            powers = {node.name: node.power for node in self.fleet.tree.nodes}
        plant = None if self.fleet is None else self.fleet.plant

        def render(now: float) -> str:
            found = self.read()
            return render_cooling(found.racks, list_margins(found.nodes, found.samples, plant, powers, now))

        return self._share("cooling", render)

    def _share(self, name: str, render: Callable[[float], str]) -> str:
        """A section; browsers that look at it share it for a second."""
        now = self.context.wall_clock()
        shown = self._shown.get(name)
        if shown is None or shown[0] != int(now):
            shown = self._shown[name] = (int(now), render(now))
        return shown[1]
