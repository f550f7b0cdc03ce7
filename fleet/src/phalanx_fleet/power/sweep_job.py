"""Sweep the power caps of a running job: choose nodes and caps, measure, and store the curve with the run."""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import BACKEND_CLASSES, Backend, open_backend
from phalanx.jobs.spec import JobState
from phalanx.run.boot_clock import seconds_since_boot
from phalanx.run.directory import Run
from phalanx.run.event_types import StepDone, WorkerStarted
from phalanx.run.events import LineTail, parse_event
from phalanx_fleet.audit_log import write_audit
from phalanx_fleet.power.committed_power import LevelSum, find_committed_w, find_excesses
from phalanx_fleet.power.control import PowerFleet, PowerReading, check_lease, make_writer_name, power_state_dir
from phalanx_fleet.power.links import NodeLinks
from phalanx_fleet.power.speed_curve import choose_sweep_caps
from phalanx_fleet.power.sweep import SweepTimes, SweptNodes, sweep_caps
from phalanx_fleet.power.sweep_file import SweptCap

MIN_CAPS, MAX_CAPS = 3, 7
CAP_BISECTIONS = 20


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
        committed = [find_committed_w(node.power, each, margin) for node, each in zip(tree.nodes, bounds, strict=True)]
        return next(iter(find_excesses(tree, committed, budgets_w)), None)

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
