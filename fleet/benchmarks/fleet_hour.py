"""A hall of 1,000 nodes for an hour, in real time: the guard of `phalanx power` holds budgets, `phalanx serve` shows
its nodes, and the site has a hot day, a load target of its utility, and loses a feed.

    python fleet/benchmarks/fleet_hour.py [--nodes 1000] [--minutes 60] [--out FILE]

Fake are the devices (power follows the cap after 1 s, means over 1 s, noise), the network (10 to 100 ms, 1% lost) and
the agents. The guard, the keepers of the nodes, the cooling plant, the server and its page of nodes are the product's.

- Hot day: over the hour the outside air warms from 25 to 44 C. A dry cooler without chiller gives the water away, so it
  warms too, and devices whose core reaches their limit slow down.
- Feed loss, at a third of the time for a twelfth of it: half of the nodes lose power. They return with the caps of the
  factory, and no work may run before their keeper has capped them.
- Load target, from two thirds on for a sixth: the site may draw 30% less.

Each second what the devices enforce (with the margin) and what they draw is compared with the budget of every level.
The 10 s after a budget has fallen are counted on their own. On the page, a node without power must be late, never live.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import numpy as np

from faulty_fleet import FakeLinks, FakeNetwork, make_fake_nodes
from phalanx.run.boot_clock import seconds_since_boot
from phalanx.telemetry.sample import DeviceSample, HostSample, NodeSample
from phalanx_fleet.power.committed_power import find_excesses
from phalanx_fleet.power.control import AuditLog, PowerFleet, load_power_fleet, open_guard, read_nodes, run_guard
from phalanx_fleet.power.load_targets import LoadTarget, find_active_budgets
from phalanx_fleet.thermal.plant import PlantControls, simulate_plant
from phalanx_fleet.thermal.plant_settings import CoolingPlant
from serve import Stream, free_port, measure_process, node_address, run_fake_agents, started, wait_for

DEVICES = 8
NODES_PER_ROW, NODES_PER_RACK = 250, 5
SITE_SHARE, FEED_SHARE, ROW_SHARE, RACK_SHARE = 0.95, 0.96, 0.97, 0.98
"""Budgets over the most power of what is below."""
TARGET_SHARE = 0.7
GRACE_S = 10.0
"""In which a budget that has fallen must be reached."""
SHOWN_AFTER_S = 10.0
"""From the loss of a node until every page shows it as late: 5 s, and the ways between."""
OUTSIDE_C = (25.0, 44.0)
NODE_W = 10200.0
CORE_TAU_S = 15.0


@dataclass
class Totals:
    """What was seen."""

    seconds: int = 0
    violations: list[str] = field(default_factory=list)
    grace_s: int = 0
    settled_s: float = 0.0
    """After the target began, until committed power and draw were within it."""
    stale: int = 0
    """Values of nodes without power that a page showed as live."""
    messages: int = 0
    throttled_s: float = 0.0
    """Device-seconds."""
    highest_supply_c: float = 0.0
    steps: int = 0
    longest_step_s: float = 0.0
    unsafe: int = 0


def write_fleet_file(path: Path, num_nodes: int) -> None:
    """A site with 2 feeds, and a row for every 250 nodes."""
    most_w = NODE_W * num_nodes
    lines = ["name: hour", f"sites: {{s: {{budget: {SITE_SHARE * most_w:.0f} W}}}}", "feeds:"]
    lines += [f"  {feed}: {{site: s, budget: {FEED_SHARE * most_w / 2:.0f} W}}" for feed in "ab"]
    rows = [min(NODES_PER_ROW, num_nodes - begin) for begin in range(0, num_nodes, NODES_PER_ROW)]
    lines.append("rows:")
    for row, count in enumerate(rows):
        feed = "a" if 2 * row < len(rows) else "b"
        lines.append(f"  row{row}: {{feed: {feed}, budget: {ROW_SHARE * NODE_W * count:.0f} W}}")
    lines.append("racks:")
    for row, count in enumerate(rows):
        names = f'"127.1.{row}.[1-{count}]"'
        budget = f"{RACK_SHARE * NODE_W * NODES_PER_RACK:.0f} W"
        lines.append(
            f'  "r{row}-[1-{count // NODES_PER_RACK}]": {{row: row{row}, node_type: h100, nodes: {NODES_PER_RACK}, '
            f"budget: {budget}, names: {names}}}"
        )
    lines += ["node_types: {h100: {node: dgx-h100, device_min_cap: 200 W}}", ""]
    path.write_text("\n".join(lines))


class Hall:
    """The devices, what they draw, and how warm they are. `shared` [nodes, devices, 3]: draw, core temperature, cap; a
    draw below 0 is a node without power."""

    def __init__(
        self, fleet: PowerFleet, shared: "np.memmap[tuple[int, ...], np.dtype[np.float32]]", source: random.Random
    ):
        self.fleet, self.shared = fleet, shared
        self.nodes = make_fake_nodes(fleet.tree.nodes, seconds_since_boot)
        self.network = FakeNetwork((0.01, 0.1), 0.01)
        self.links = FakeLinks(self.nodes, seconds_since_boot, self.network, source)
        self.plant = CoolingPlant(
            design_it=f"{NODE_W * len(self.nodes):.0f} W",
            heat_rejection="dry_cooler",
            trim_chiller=False,
            supply_c=40.0,
        )
        self.core_c = np.full(shared.shape[:2], 60.0)
        self.slow = np.ones(shared.shape[:2])
        self.supply_c = self.plant.supply_c
        self.dark: set[int] = set()
        for index, node in enumerate(self.nodes):
            for number, device in enumerate(node.devices):
                device.demand_w = self._slowed(device.demand_w(0.0), index, number)

    def _slowed(self, watts: float, node: int, device: int) -> Callable[[float], float]:
        return lambda t: watts * self.slow[node, device]

    def lose_feed(self, feed: str) -> None:
        """Take the power from the nodes behind a feed."""
        self.dark = {index for index in range(len(self.nodes)) if self._feed_of(index) == feed}
        for index in self.dark:
            self.nodes[index].crash()
            self.network.lost_nodes.add(self.nodes[index].name)

    def restore_feed(self) -> None:
        """Boot them: a keeper caps its node before work may run."""
        for index in self.dark:
            self.nodes[index].start_keeper(at_boot=True)
            self.network.lost_nodes.discard(self.nodes[index].name)
        self.dark = set()

    def _feed_of(self, node: int) -> str:
        levels = self.fleet.tree.levels
        row = levels[levels[self.fleet.tree.nodes[node].rack].parent]
        return levels[row.parent].name

    def advance(self, now: float, outside_c: float) -> tuple[list[float], list[float]]:
        """Let a second pass; return what each node commits and draws."""
        committed, draws = [], []
        margin = self.fleet.settings.margin
        for index, (node, powered) in enumerate(zip(self.nodes, self.fleet.tree.nodes, strict=True)):
            if index in self.dark:
                self.shared[index, :, 0] = -1.0
                committed.append(0.0)
                draws.append(0.0)
                continue
            node.check()
            each = [device.draw_at(now) if node.has_job else device.idle_w for device in node.devices]
            self.shared[index, :, 0] = each
            self.shared[index, :, 2] = [device.cap_w for device in node.devices]
            committed.append(node.committed_w(powered.power.rest_max_w, margin))
            draws.append(powered.power.rest_max_w + sum(each))
        it_w = np.array([max(sum(draws), 1.0)])
        air = np.array([outside_c])
        hour = simulate_plant(self.plant, it_w, air, air - 8.0, PlantControls(self.plant.supply_c))
        self.supply_c = float(hour.supply_c[0])
        watts = np.maximum(np.asarray(self.shared[:, :, 0], dtype=float), 0.0)
        coolant_c = float(hour.rack_supply_c[0] + hour.rack_return_c[0]) / 2
        settled = coolant_c + self.plant.core_rise_k * watts / 700.0
        self.core_c += (settled - self.core_c) * (1 - np.exp(-1.0 / CORE_TAU_S))
        self.slow = np.clip(self.slow + np.where(self.core_c > self.plant.core_limit_c, -0.02, 0.005), 0.3, 1.0)
        self.shared[:, :, 1] = self.core_c
        return committed, draws


def run_hall_agents(port: int, path: Path, num_nodes: int) -> None:
    """Send what the devices of the hall draw, as the agents of its nodes."""
    shared = np.memmap(path, np.float32, "r", shape=(num_nodes, DEVICES, 3))
    numbers = {node_address(number): number for number in range(num_nodes)}

    def read_sample(node: str) -> NodeSample | None:
        values = shared[numbers[node]]
        if values[0, 0] < 0:
            return None
        devices = tuple(
            DeviceSample(
                id=f"GPU-{node}-{index}",
                name="NVIDIA H100 80GB HBM3",
                power_mean_w=round(float(draw), 1),
                power_cap_w=round(float(cap), 1),
                core_temperature_c=round(float(core), 1),
                thermal_margin_c=round(87.0 - float(core), 1),
            )
            for index, (draw, core, cap) in enumerate(values)
        )
        return NodeSample(time.time(), HostSample(cpu_utilization=0.2), devices)

    run_fake_agents(port, read_sample)


@contextlib.contextmanager
def open_page(folder: Path, hall: Hall, dark_since: dict[str, float], totals: Totals) -> Iterator[int]:
    """The server with a browser on the page of nodes; yields its process."""
    port, num_nodes = free_port(), len(hall.nodes)
    (folder / "runs").mkdir()
    names = "".join(f"  - name: {node.name}\n" for node in hall.nodes)
    (folder / "nodes.yaml").write_text(f"nodes:\n{names}")
    agents = [sys.executable, __file__, "--fake-agents", str(port), str(folder / "shared"), "--nodes", str(num_nodes)]
    serve = [sys.executable, "-m", "phalanx", "serve", str(folder / "runs"), "--port", "0", "--no-token"]
    serve += ["--nodes", str(folder / "nodes.yaml"), "--agent-port", str(port)]

    def on_nodes(text: str, now: float) -> None:
        message = json.loads(text)
        totals.messages += 1
        for name, _, values in message["heatMap"]["nodes"]:
            began = dark_since.get(name)
            if began is not None and now - began > SHOWN_AFTER_S:
                totals.stale += sum(value is not None for value in values)

    with started(agents), started(serve, env={**os.environ, "PHALANX_STATE_DIR": str(folder / "state")}) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[1].rstrip("/")
        stream = Stream(f"{address}/stream/nodes", on_nodes)
        wait_for(lambda: totals.messages > 5, time.monotonic())
        yield server.pid
        stream.close()


def run_hour(num_nodes: int, minutes: float, folder: Path) -> tuple[Totals, float, float]:
    """Return the totals, and the share of a core and the bytes of the server."""
    write_fleet_file(folder / "fleet.yaml", num_nodes)
    shared = np.memmap(folder / "shared", np.float32, "w+", shape=(num_nodes, DEVICES, 3))
    length_s, totals = 60.0 * minutes, Totals()
    dark_since: dict[str, float] = {}
    fleet = load_power_fleet(folder / "fleet.yaml")
    hall = Hall(fleet, shared, random.Random(0))
    with open_page(folder, hall, dark_since, totals) as server:
        began_unix, began = time.time(), seconds_since_boot()
        target = LoadTarget(
            level="site s",
            limit_w=TARGET_SHARE * SITE_SHARE * NODE_W * num_nodes,
            start_s=began_unix + length_s * 2 / 3,
            end_s=began_unix + length_s * 5 / 6,
        )
        fleet = PowerFleet(fleet.file, fleet.tree, fleet.jobs, [target])
        guard = open_guard(fleet, hall.links, read_nodes(fleet, hall.links), takes_over=False)
        audit = AuditLog(folder / "audit.jsonl")
        watch = Watch(fleet, hall, totals, dark_since, began, length_s)
        usage: list[tuple[float, float]] = []
        meter = threading.Thread(target=lambda: usage.append(measure_process(server, length_s - 5)))
        meter.start()
        stepped = time.monotonic()

        def pause(seconds: float) -> None:
            watch.look()
            time.sleep(seconds)

        for status in run_guard(fleet, guard, audit, length_s, pause):
            totals.steps += 1
            totals.longest_step_s = max(totals.longest_step_s, time.monotonic() - stepped)
            stepped = time.monotonic()
            totals.unsafe += bool(status.unsafe)
            watch.is_binding |= all(each.excess_w <= 0 for each in status.committed)
        meter.join()
        return totals, *usage[0]


class Watch:
    """Causes the events, and compares committed power and draws with the budgets once a second. Until what the guard
    counts is within the budgets for the first time, nothing is compared: devices start with their factory limits."""

    def __init__(
        self, fleet: PowerFleet, hall: Hall, totals: Totals, dark_since: dict[str, float], began: float, length_s: float
    ):
        self._fleet, self._hall, self._totals, self._dark_since = fleet, hall, totals, dark_since
        self._began, self._length_s, self._due = began, length_s, began
        self._fell_at = float("-inf")
        self._budgets_w: list[float | None] = []
        self.is_binding = False

    def look(self) -> None:
        """Do what is due; call it several times a second."""
        now = seconds_since_boot()
        if now < self._due:
            return
        self._due = max(self._due + 1.0, now)
        share = (now - self._began) / self._length_s
        self._change_feed(share)
        committed, draws = self._hall.advance(now, OUTSIDE_C[0] + share * (OUTSIDE_C[1] - OUTSIDE_C[0]))
        totals = self._totals
        totals.highest_supply_c = max(totals.highest_supply_c, self._hall.supply_c)
        totals.throttled_s += float((self._hall.slow < 1).sum())
        budgets_w = find_active_budgets(self._fleet.tree, self._fleet.targets, time.time())
        if any((new or 0.0) < (old or 0.0) for new, old in zip(budgets_w, self._budgets_w, strict=False)):
            self._fell_at = now
        self._budgets_w = budgets_w
        if not self.is_binding:
            return
        totals.seconds += 1
        tree = self._fleet.tree
        over = [*find_excesses(tree, committed, budgets_w), *find_excesses(tree, draws, budgets_w)]
        if over and now - self._fell_at <= GRACE_S:
            totals.grace_s += 1
            totals.settled_s = now - self._fell_at
        elif over:
            totals.violations.append(f"second {now - self._began:.0f}: {over[0]}")

    def _change_feed(self, share: float) -> None:
        is_lost = 1 / 3 <= share < 1 / 3 + 1 / 12
        if is_lost and not self._hall.dark:
            self._hall.lose_feed("b")
            self._dark_since |= {self._hall.nodes[index].name: time.time() for index in self._hall.dark}
        elif not is_lost and self._hall.dark:
            self._dark_since.clear()
            self._hall.restore_feed()


def to_rows(totals: Totals, cpu: float, memory: float) -> list[tuple[str, str]]:
    """What is published."""
    return [
        ("seconds in which committed power and draw of every level were compared with its budget", f"{totals.seconds}"),
        ("of them over a budget", f"{len(totals.violations)}"),
        (f"seconds over the budget in the {GRACE_S:.0f} s after a load target of -30% began", f"{totals.grace_s}"),
        ("the last of them, after its beginning", f"{totals.settled_s:.1f} s"),
        ("steps of the guard; longest time from one to the next", f"{totals.steps}; {totals.longest_step_s:.1f} s"),
        ("steps in which it said that it cannot hold a budget", f"{totals.unsafe}"),
        ("warmest water of the hall", f"{totals.highest_supply_c:.1f} C"),
        ("device-hours slowed down by heat", f"{totals.throttled_s / 3600:.0f}"),
        ("updates of the page of nodes", f"{totals.messages}"),
        ("values of nodes without power that it showed as live", f"{totals.stale}"),
        ("CPU and most memory of the server", f"{cpu:.2f} cores, {memory / 1e6:.0f} MB"),
    ]


def main() -> None:
    """Run the hour, or the fake agents of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000, help="a multiple of 500")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, help="file for the table")
    parser.add_argument("--fake-agents", nargs=2, metavar=("PORT", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fake_agents:
        run_hall_agents(int(options.fake_agents[0]), Path(options.fake_agents[1]), options.nodes)
        return
    with tempfile.TemporaryDirectory() as folder:
        totals, cpu, memory = run_hour(options.nodes, options.minutes, Path(folder))
    lines = ["| | |", "|---|---:|", *(f"| {name} | {value} |" for name, value in to_rows(totals, cpu, memory))]
    text = "\n".join([f"{options.nodes} nodes, {options.minutes:g} minutes, {date.today()}", "", *lines, ""])
    print(text, *totals.violations[:20], sep="\n")
    if options.out:
        options.out.write_text(text)
    sys.exit(bool(totals.violations or totals.stale))


if __name__ == "__main__":
    main()
