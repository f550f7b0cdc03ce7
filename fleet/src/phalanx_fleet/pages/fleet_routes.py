"""The pages of power and cooling: the power tree, racks on the building's bus, and the margin of devices up to their
throttling temperature."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from phalanx.serve.page_context import Message, PageContext
from phalanx.serve.pages import render_each, render_rows, render_time
from phalanx.telemetry.sample import NodeSample
from phalanx_fleet.fleet_file import FleetFile, load_fleet_file
from phalanx_fleet.fleet_node import FleetNode, add_samples
from phalanx_fleet.node_list import NodeReader
from phalanx_fleet.pages.agent_streams import AgentStreams
from phalanx_fleet.pages.node_pages import LATE_AFTER_S, render_racks
from phalanx_fleet.pages.power_page import read_levels, render_power, render_power_page
from phalanx_fleet.pages.site_history import SiteHistory
from phalanx_fleet.power.committed_power import LevelReading
from phalanx_fleet.power.load_targets import TargetsFileSource
from phalanx_fleet.power_tree import PowerTree, build_power_tree
from phalanx_fleet.telemetry.service_reading import RackSample

MAX_TABLE_DEVICES = 20
DEVICE_COLUMNS = ("node", "device", "temperature", "draw", "margin", "read")
LOW_MARGIN_K = 5.0


@dataclass(frozen=True)
class DeviceMargin:
    """A device, or the hottest one of a node without readings of each."""

    node: str
    device: str
    temperature_c: float | None
    draw_w: float | None
    margin_k: float
    time: float


def list_margins(nodes: Sequence[FleetNode], samples: Mapping[str, NodeSample], now: float) -> list[DeviceMargin]:
    """Return the margins of devices in the order of nodes; none of late readings."""
    found: list[DeviceMargin] = []
    for node in nodes:
        sample, reading = samples.get(node.name), node.reading
        if sample is not None and sample.devices and abs(now - sample.time) <= LATE_AFTER_S:
            found += [
                DeviceMargin(
                    node.name,
                    str(number),
                    device.core_temperature_c,
                    device.power_w,
                    device.thermal_margin_c,
                    sample.time,
                )
                for number, device in enumerate(sample.devices)
                if device.thermal_margin_c is not None
            ]
        elif reading is not None and not reading.is_late(now) and reading.margin_k is not None:
            found.append(DeviceMargin(node.name, "hottest", None, None, reading.margin_k, reading.time))
    return found


def render_cooling(racks: Sequence[RackSample], margins: Sequence[DeviceMargin]) -> str:
    """The tables of racks and of the devices with the lowest margins, in the order of nodes: a row stays at its place
    while margins change from second to second."""
    parts = []
    if leaks := [rack.name or rack.id for rack in racks if rack.has_leak]:
        parts.append(f'<p class="note problem">Leak: {escape(", ".join(leaks[:20]))}</p>')
    note = "No rack is read. Name the building's bus or a CDU in the nodes file: phalanx serve --nodes FILE"
    parts.append(render_racks(racks) if racks else f'<h2>Racks and CDUs</h2><p class="note">{note}</p>')
    parts.append("<h2>Devices</h2>")
    if not margins:
        parts.append('<p class="note">No device has a margin that is not late.</p>')
        return "".join(parts)
    lowest = sorted(range(len(margins)), key=lambda index: (margins[index].margin_k // 1, index))[:MAX_TABLE_DEVICES]
    rows = render_each(
        (margins[index] for index in sorted(lowest)), _render_margin, lambda each: each.node, len(DEVICE_COLUMNS)
    )
    parts.append(render_rows(DEVICE_COLUMNS, rows))
    if len(margins) > MAX_TABLE_DEVICES:
        parts.append(f'<p class="note">and {len(margins) - MAX_TABLE_DEVICES} devices with more margin</p>')
    return "".join(parts)


def _render_margin(each: DeviceMargin) -> Sequence[str]:
    margin = f"{each.margin_k:.0f} K"
    return (
        escape(each.node),
        escape(each.device),
        "" if each.temperature_c is None else f"{each.temperature_c:.0f} °C",
        "" if each.draw_w is None else f"{each.draw_w:.0f} W",
        f'<span class="problem">{margin}</span>' if each.margin_k < LOW_MARGIN_K else margin,
        render_time(each.time),
    )


def render_cooling_page(content: str) -> str:
    """The page of cooling."""
    return f"""<header><h1>Cooling</h1></header>
<div id="cooling">{content}</div>
<p class="note">Margin: kelvins up to the temperature from which the device slows down, as it reports it. Late readings
are left out.</p>"""


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


@dataclass
class FleetRoutes:
    """The routes."""

    fleet: ServedFleet | None
    context: PageContext
    nodes: NodeReader
    streams: AgentStreams
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
            nodes = add_samples(self.nodes.view.nodes, self.streams.read_samples())
            shown = render_power(fleet.read_levels(nodes, now), self.history.level_lines, rack)
            problem = None if fleet.targets is None else fleet.targets.problem
            return shown if problem is None else f'<p class="note problem">{escape(problem)}</p>{shown}'

        return self._share(f"power {rack}", render)

    def _render_cooling(self) -> str:
        def render(now: float) -> str:
            view, samples = self.nodes.view, self.streams.read_samples()
            return render_cooling(view.racks, list_margins(add_samples(view.nodes, samples), samples, now))

        return self._share("cooling", render)

    def _share(self, name: str, render: Callable[[float], str]) -> str:
        """A section; browsers that look at it share it for a second."""
        now = self.context.wall_clock()
        shown = self._shown.get(name)
        if shown is None or shown[0] != int(now):
            shown = self._shown[name] = (int(now), render(now))
        return shown[1]
