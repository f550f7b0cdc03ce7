"""Measure how fast a running job is at several power caps, from the highest down.

The old caps come back when the sweep ends in any way: nodes restore them when their lease ends.
"""

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from phalanx.errors import PhalanxError, UsageError
from phalanx.jobs.backends.base import BACKEND_CLASSES, Backend, open_backend
from phalanx.jobs.spec import JobState
from phalanx.run.boot_clock import seconds_since_boot
from phalanx.run.directory import Run
from phalanx.run.event_types import StepDone, WorkerStarted
from phalanx.run.events import LineTail, parse_event
from phalanx_fleet.audit_log import write_audit
from phalanx_fleet.power.committed_power import LevelSum, find_excesses, list_committed
from phalanx_fleet.power.control import PowerFleet, PowerReading, check_lease, make_writer_name, power_state_dir
from phalanx_fleet.power.links import NodeLinks, ask_nodes
from phalanx_fleet.power.messages import NodeReport, NodeRequest
from phalanx_fleet.power.speed_curve import SweptCap, choose_sweep_caps

INTERVAL_S = 1.0
"""From one renewal of the leases to the next, and between samples of power and temperature."""
SLOPE_WINDOW_S = 15.0
ANSWER_TIMEOUT_S = 5.0
MIN_STEPS = 3
END_LEASE_S = 0.01
StepReader = Callable[[], Sequence[float]]
"""Returns the durations of the steps since the last call, in seconds, without stalls of checkpoints."""
MIN_CAPS, MAX_CAPS = 3, 7
CAP_BISECTIONS = 20


class SweepError(PhalanxError):
    """A node does not follow, or the job makes no steps."""


@dataclass(frozen=True)
class SweepTimes:
    """Seconds at each cap: at least `wait_s`, until temperatures rise or fall by less than `max_slope_k_per_s` or
    `max_wait_s` have passed; then `measure_s`, up to `max_measure_s` while there are too few steps."""

    wait_s: float = 10.0
    max_wait_s: float = 30.0
    measure_s: float = 30.0
    max_measure_s: float = 120.0
    max_slope_k_per_s: float = 0.05
    """A kelvin in 20 s; sensors of whole kelvins cannot show less within the window."""


@dataclass
class SweptNodes:
    """The nodes of the job, with this process as their writer. `type_names`: node type by node."""

    links: NodeLinks
    type_names: Mapping[str, str]
    epoch: int
    writer: str
    lease_s: float
    now: Callable[[], float]
    sleep: Callable[[float], None]
    num_devices: Mapping[str, int]
    seq: int = 0
    sessions: dict[str, str] = field(default_factory=dict)

    def take_over(self) -> dict[str, NodeReport]:
        """Become the writer of all nodes. Raises SweepError."""
        self.seq += 1
        request = NodeRequest(self.seq, self.epoch, self.writer, takes_over=True)
        reports = self._ask(dict.fromkeys(self.type_names, request))
        self.sessions = {name: report.session for name, report in reports.items()}
        return reports

    def set_caps(self, cap_by_type: Mapping[str, float], lease_s: float | None = None) -> dict[str, NodeReport]:
        """Have all devices at a cap, or renew the leases of that. Raises SweepError where a node does not follow."""
        self.seq += 1
        requests = {}
        for name, type_name in self.type_names.items():
            caps = (cap_by_type[type_name],) * self.num_devices[name]
            requests[name] = NodeRequest(
                self.seq,
                self.epoch,
                self.writer,
                session=self.sessions[name],
                caps_w=caps,
                fallback_w=caps,
                lease_s=lease_s or self.lease_s,
                reverts=True,
            )
        return self._ask(requests)

    def _ask(self, requests: Mapping[str, NodeRequest]) -> dict[str, NodeReport]:
        reports = ask_nodes(self.links, requests, ANSWER_TIMEOUT_S, self.sleep, self.now)
        if missing := sorted(requests.keys() - reports.keys()):
            raise SweepError(f"{missing[0]}: does not answer; it restores its caps within {self.lease_s:g} s")
        for name, report in reports.items():
            if report.refusal:
                raise SweepError(f"{name}: {'; '.join((report.refusal, *report.problems))}")
        return reports


def sweep_caps(
    nodes: SweptNodes,
    caps_by_type: Mapping[str, Sequence[float]],
    times: SweepTimes,
    read_steps: StepReader,
) -> Generator[list[SweptCap], None, None]:
    """Hold one cap after another and measure; yield what was measured at each, by node type. The leases of the nodes
    end when this ends.

    Raises:
        SweepError: A node does not follow, or the job makes no steps.
    """
    cap_by_type: dict[str, float] = {}
    try:
        for index in range(min(map(len, caps_by_type.values()))):
            cap_by_type = {name: caps[index] for name, caps in caps_by_type.items()}
            yield _measure_cap(nodes, cap_by_type, times, read_steps)
    finally:
        with contextlib.suppress(SweepError):  # then the lease ends later
            if cap_by_type:
                nodes.set_caps(cap_by_type, END_LEASE_S)


def _measure_cap(
    nodes: SweptNodes, cap_by_type: Mapping[str, float], times: SweepTimes, read_steps: StepReader
) -> list[SweptCap]:
    began, temperatures = nodes.now(), list[tuple[float, dict[str, float]]]()
    while True:
        reports = nodes.set_caps(cap_by_type)
        temperatures.append((nodes.now(), _read_temperatures(reports)))
        slope = _find_slope(temperatures)
        waited_s = nodes.now() - began
        is_steady = None if slope is None else slope <= times.max_slope_k_per_s
        if waited_s >= times.max_wait_s or (waited_s >= times.wait_s and is_steady is not False):
            break
        nodes.sleep(INTERVAL_S)
    read_steps()
    began, durations, draws = nodes.now(), list[float](), dict[str, list[float]]()
    while True:
        nodes.sleep(INTERVAL_S)
        for name, report in nodes.set_caps(cap_by_type).items():
            known = [device.draw_w for device in report.devices if device.draw_w is not None]
            draws.setdefault(nodes.type_names[name], []).extend(known)
        durations += read_steps()
        waited_s = nodes.now() - began
        if waited_s >= times.measure_s and len(durations) >= MIN_STEPS:
            break
        if waited_s >= times.max_measure_s:
            raise SweepError(
                f"the job made {len(durations)} steps in {waited_s:.0f} s; a sweep needs {MIN_STEPS} at least"
            )
    return [
        SweptCap(
            node_type=name,
            cap_w=cap_w,
            rate=len(durations) / sum(durations),
            draw_w=float(np.mean(draws[name])) if draws.get(name) else None,
            most_draw_w=max(draws[name]) if draws.get(name) else None,
            is_steady=is_steady,
            num_steps=len(durations),
        )
        for name, cap_w in cap_by_type.items()
    ]


def _read_temperatures(reports: Mapping[str, NodeReport]) -> dict[str, float]:
    return {
        f"{name} {device.id}": device.temperature_c
        for name, report in reports.items()
        for device in report.devices
        if device.temperature_c is not None
    }


def _find_slope(samples: Sequence[tuple[float, Mapping[str, float]]]) -> float | None:
    """Return the greatest change of a device's temperature in kelvins a second, without its sign; None without
    temperatures, or before the window has passed."""
    newest = samples[-1][0]
    if newest - samples[0][0] < SLOPE_WINDOW_S * 0.6:
        return None if not samples[-1][1] else float("inf")
    recent = [each for each in samples if newest - each[0] <= SLOPE_WINDOW_S]
    slopes = []
    for key in recent[-1][1]:
        points = [(t, values[key]) for t, values in recent if key in values]
        if len(points) > 1:
            slopes.append(abs(float(np.polyfit([t - newest for t, _ in points], [v for _, v in points], 1)[0])))
    return max(slopes) if slopes else None


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep does: caps by node type, from the highest down, and the nodes with their types."""

    caps_by_type: dict[str, list[float]]
    type_names: dict[str, str]
    notes: list[str]


class RunSteps:
    """Reads the durations of a run's steps as they are done."""

    def __init__(self, run: Run):
        self._tail = LineTail(run.events)
        self._tail.skip()

    def __call__(self) -> Sequence[float]:
        """Return the seconds of each step since the last call, without stalls of checkpoints."""
        events = [parse_event(line.decode(errors="replace")) for line in self._tail.read()]
        return [
            each.duration_s - each.breakdown_s.checkpoint_stall
            for each in events
            if isinstance(each, StepDone) and each.duration_s > each.breakdown_s.checkpoint_stall
        ]


def find_swept_run(text: str, open_backend: Callable[[str], Backend] = open_backend) -> Run:
    """Return the run in a directory, or the one that a job trains: an id such as slurm:12; without a backend one of the
    local queue.

    Raises:
        UsageError: There is no such run or job, or the job trains none, or does not run.
    """
    backend_name, _, job_id = f"local:{text}".partition(":") if text.isdecimal() else text.partition(":")
    if Path(text).exists() or backend_name not in BACKEND_CLASSES:
        return Run.open_existing(text)
    status = open_backend(backend_name).poll(job_id)
    if status.run_dir is None:
        raise UsageError(f"job {text} ({status.name}) trains no run; a sweep counts the steps of a run")
    if status.state is not JobState.RUNNING:
        raise UsageError(f"job {text} ({status.name}) is {status.state}; sweep a job that runs")
    return Run.open_existing(status.run_dir)


def find_run_nodes(run: Run) -> list[str]:
    """Return the nodes of the newest attempt of a run, by its events."""
    hosts: dict[int, dict[str, None]] = {}
    for line in LineTail(run.events).read():
        if b'"worker_started"' in line and isinstance(
            event := parse_event(line.decode(errors="replace")), WorkerStarted
        ):
            hosts.setdefault(event.attempt, {})[event.host] = None
    return list(hosts[max(hosts)]) if hosts else []


def plan_sweep(fleet: PowerFleet, reading: PowerReading, run: Run, num_caps: int, takes_over: bool) -> SweepPlan:
    """Choose caps that the budgets bear, the lowest settable one among them.

    Raises:
        UsageError: The run is on nodes that are not of the fleet or do not answer, or a guard holds one.
    """
    if not MIN_CAPS <= num_caps <= MAX_CAPS:
        raise UsageError(f"--caps {num_caps}: expected {MIN_CAPS} to {MAX_CAPS}")
    by_name = {node.name: index for index, node in enumerate(fleet.tree.nodes)}
    names = find_run_nodes(run)
    if not names:
        raise UsageError(f"{run.path}: no worker has started; sweep a run that trains")
    for name in names:
        if name not in by_name:
            raise UsageError(f"{name}: {run.path} runs there, and it is no node of {fleet.file.name}")
        if None in reading.bounds_w[by_name[name]]:
            raise UsageError(f"{name}: does not answer, so it cannot be swept")
        check_lease(reading.reports[name], takes_over)
    swept = [by_name[name] for name in names]
    highest, notes = _find_highest_caps(fleet, reading, swept)
    caps_by_type = {}
    for type_name, high_w in highest.items():
        members = [index for index in swept if fleet.tree.nodes[index].type_name == type_name]
        devices = [each for index in members for each in reading.reports[fleet.tree.nodes[index].name].devices]
        low_w = max(each.min_w for each in devices)
        if high_w <= low_w:
            raise UsageError(f"{type_name}: the budgets bear {high_w:.0f} W, the lowest cap: there is nothing to sweep")
        caps_by_type[type_name] = choose_sweep_caps(low_w, high_w, num_caps)
    return SweepPlan(caps_by_type, {name: fleet.tree.nodes[by_name[name]].type_name for name in names}, notes)


def run_sweep(
    fleet: PowerFleet, links: NodeLinks, reading: PowerReading, plan: SweepPlan, run: Run, times: SweepTimes
) -> Generator[list[SweptCap], None, None]:
    """Measure at each cap of a plan; yield what was measured. Old caps come back at the end.

    Raises:
        SweepError: A node does not follow, or the job makes no steps.
    """
    nodes = SweptNodes(
        links,
        plan.type_names,
        1 + max(report.epoch for report in reading.reports.values()),
        make_writer_name(),
        fleet.settings.lease_s,
        seconds_since_boot,
        time.sleep,
        {name: len(reading.reports[name].devices) for name in plan.type_names},
    )
    nodes.take_over()
    entry = {"sweep": str(run.path), "nodes": [*plan.type_names], "caps_w": plan.caps_by_type}
    write_audit(power_state_dir(fleet) / "audit.jsonl", [entry])
    yield from sweep_caps(nodes, plan.caps_by_type, times, RunSteps(run))


def _find_highest_caps(
    fleet: PowerFleet, reading: PowerReading, swept: Sequence[int]
) -> tuple[dict[str, float], list[str]]:
    """The highest cap of each node type that breaks no budget, from the caps of now up; all types rise together."""
    tree, margin = fleet.tree, fleet.settings.margin
    budgets_w = fleet.find_budgets()
    now: dict[str, float] = {}
    most: dict[str, float] = {}
    for index in swept:
        node = tree.nodes[index]
        devices = reading.reports[node.name].devices
        now[node.type_name] = min([*(each.cap_w or 0.0 for each in devices), now.get(node.type_name, float("inf"))])
        most[node.type_name] = min([*(each.max_w for each in devices), most.get(node.type_name, float("inf"))])

    def caps_at(share: float) -> dict[str, float]:
        return {name: min(now[name] + share * (most[name] - now[name]), most[name]) for name in now}

    def find_excess(share: float) -> LevelSum | None:
        bounds = [list(each) for each in reading.bounds_w]
        for index in swept:
            cap_w = caps_at(share)[tree.nodes[index].type_name]
            bounds[index] = [None if bound is None else max(bound, cap_w) for bound in bounds[index]]
        return next(iter(find_excesses(tree, list_committed(tree, bounds, margin), budgets_w)), None)

    if find_excess(1.0) is None:
        return most, []
    if (excess := find_excess(0.0)) is not None:
        raise UsageError(
            f"{excess} already: `phalanx power guard --once --yes` brings the fleet within its budgets; sweep then"
        )
    low, high = 0.0, 1.0
    for _ in range(CAP_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if find_excess(middle) is None else (low, middle)
    found = caps_at(low)
    return found, [
        f"{name}: swept up to {cap_w:.0f} W of {most[name]:.0f} W, since the budgets bear no more"
        for name, cap_w in found.items()
    ]
