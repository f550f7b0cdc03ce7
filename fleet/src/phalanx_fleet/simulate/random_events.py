"""What happens at random: jobs, of distributions or of a trace, and failures: of nodes by cause, batch and age, and of
racks, rows and feeds."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import DataError
from phalanx.planner.storage_costs import SECONDS_PER_DAY
from phalanx_fleet.csv_table import open_csv
from phalanx_fleet.simulate.cluster_simulation import NodeFailure
from phalanx_fleet.simulate.job_state import CheckpointCosts, SimulatedJob, choose_interval
from phalanx_fleet.simulation_settings import CheckpointEntry, FailureEntry, JobClassEntry

SECONDS_PER_HOUR = 3600.0
SECONDS_PER_YEAR = 365.25 * SECONDS_PER_DAY
TRACE_COLUMNS = ("submit_s", "duration_s", "gpus")


@dataclass(frozen=True)
class NodeHistory:
    """What the failure rate of a node depends on."""

    batch: str | None = None
    age_years: float = 0.0
    levels: tuple[str, ...] = ()
    """Rack, row and feeds that it is in, such as "rack r01"."""


@dataclass(frozen=True)
class LevelFailure:
    """A failure of a rack, row or feed."""

    time_s: float
    level: str
    cause: int
    repair_s: float


@dataclass(frozen=True)
class FailureRates:
    """Failures per second: the mean of a node, and those of a rack, row or feed that come on top."""

    node_per_s: float
    levels: tuple[tuple[float, float, float], ...] = ()
    """Failures per second of one rack, row or feed; how many there are of them per node, and how many a node is in."""

    def of_job(self, num_nodes: int) -> float:
        """Return the failures per second of a job on this number of nodes, which are in as few racks as can be."""
        return num_nodes * self.node_per_s + sum(
            rate * max(least, num_nodes * per_node) for rate, per_node, least in self.levels
        )


def find_node_rates(entry: FailureEntry, nodes: Sequence[NodeHistory], devices_per_node: int) -> NDArray[np.float64]:
    """Return the failures per second of each node by one cause, without the factor of its age."""
    per_day = entry.per_1000_node_days / 1000.0 / SECONDS_PER_DAY
    base = per_day + entry.per_1000_device_years / 1000.0 * devices_per_node / SECONDS_PER_YEAR
    return np.array([base * entry.batch_factors.get(node.batch or "", 1.0) for node in nodes])


def sample_failures(
    causes: Mapping[str, FailureEntry],
    nodes: Sequence[NodeHistory],
    devices_per_node: int,
    until_s: float,
    rng: np.random.Generator,
) -> list[NodeFailure]:
    """Draw failures of all nodes up to `until_s`, in the order of time. Each cause is a Poisson process with a rate
    that changes with the age of the node."""
    found: list[NodeFailure] = []
    ages = np.array([node.age_years for node in nodes])
    for cause, entry in enumerate(causes.values()):
        if entry.level != "node":
            continue
        most = max(entry.age_factors.values(), default=1.0)
        most = max(most, 1.0) if entry.age_factors and min(entry.age_factors) > 0 else most
        counts = rng.poisson(find_node_rates(entry, nodes, devices_per_node) * most * until_s)
        which = np.repeat(np.arange(len(nodes)), counts)
        times = rng.uniform(0.0, until_s, len(which))
        if entry.age_factors:
            starts = np.array(sorted(entry.age_factors))
            factors = np.array([1.0, *(entry.age_factors[start] for start in starts.tolist())])
            now = factors[np.searchsorted(starts, ages[which] + times / SECONDS_PER_YEAR, side="right")]
            kept = rng.uniform(0.0, most, len(which)) < now
            which, times = which[kept], times[kept]
        repairs = _sample_repairs(entry, len(which), rng)
        found += map(NodeFailure, times.tolist(), zip(which.tolist()), [cause] * len(which), repairs.tolist())
    return sorted(found, key=lambda failure: (failure.time_s, failure.nodes))


def sample_level_failures(
    causes: Mapping[str, FailureEntry], levels: Iterable[str], until_s: float, rng: np.random.Generator
) -> list[LevelFailure]:
    """Draw failures of racks, rows and feeds up to `until_s`."""
    found: list[LevelFailure] = []
    for cause, entry in enumerate(causes.values()):
        if entry.level == "node":
            continue
        names = sorted({name for name in levels if name.startswith(f"{entry.level} ")})
        which = np.repeat(names, rng.poisson(find_level_rate(entry) * until_s, len(names)))
        times = rng.uniform(0.0, until_s, len(which))
        repairs = _sample_repairs(entry, len(which), rng)
        found += map(LevelFailure, times.tolist(), which.tolist(), [cause] * len(which), repairs.tolist())
    return found


def merge_level_failures(
    failures: Sequence[NodeFailure], level_failures: Sequence[LevelFailure], nodes: Sequence[NodeHistory]
) -> list[NodeFailure]:
    """Return failures of nodes with those of the racks, rows and feeds that they are in, in the order of time."""
    members: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in node.levels:
            members.setdefault(name, []).append(index)
    found = [
        NodeFailure(each.time_s, tuple(members[each.level]), each.cause, each.repair_s)
        for each in level_failures
        if each.level in members
    ]
    return sorted([*failures, *found], key=lambda failure: (failure.time_s, failure.nodes))


def find_level_rate(entry: FailureEntry) -> float:
    return entry.per_1000_level_years / 1000.0 / SECONDS_PER_YEAR


def _sample_repairs(entry: FailureEntry, number: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw the seconds of repairs; 0 where there is none."""
    repairs = entry.repair_h * SECONDS_PER_HOUR * np.exp(entry.repair_sigma * rng.standard_normal(number))
    return np.where(rng.uniform(size=number) < entry.repair_share, repairs, 0.0)


def find_rates(causes: Mapping[str, FailureEntry], nodes: Sequence[NodeHistory], devices_per_node: int) -> FailureRates:
    """Return the rates of nodes, and of the racks, rows and feeds that they are in."""
    levels = []
    for entry in causes.values():
        if entry.level != "node" and nodes:
            found = Counter(name for node in nodes for name in node.levels if name.startswith(f"{entry.level} "))
            levels.append((find_level_rate(entry), len(found) / len(nodes), found.total() / len(nodes)))
    return FailureRates(mean_node_rate(causes, nodes, devices_per_node), tuple(levels))


def mean_node_rate(causes: Mapping[str, FailureEntry], nodes: Sequence[NodeHistory], devices_per_node: int) -> float:
    """Return the mean failures per second of a node, at the age that it has at the start."""
    total = 0.0
    for entry in causes.values():
        rates = find_node_rates(entry, nodes, devices_per_node)
        factors = [
            next(
                (entry.age_factors[start] for start in sorted(entry.age_factors, reverse=True) if start <= n.age_years),
                1.0,
            )
            for n in nodes
        ]
        total += float(np.mean(rates * np.array(factors))) if len(nodes) else 0.0
    return total


def make_costs(entry: CheckpointEntry, num_nodes: int, rates: FailureRates) -> CheckpointCosts:
    """Return what saves cost a job on this number of nodes."""
    blocked_s, lag_s = (entry.save_s, 0.0) if entry.mode == "sync" else (entry.stall_s, entry.save_s)
    failures_per_s = rates.of_job(num_nodes)
    mtbf_s = math.inf if failures_per_s == 0 else 1.0 / failures_per_s
    interval_s = choose_interval(blocked_s, lag_s, mtbf_s) if entry.interval_s == "daly" else entry.interval_s
    return CheckpointCosts(interval_s, blocked_s, lag_s, entry.restart_s)


def sample_jobs(
    classes: Mapping[str, JobClassEntry],
    days: float,
    devices_per_node: int,
    rates: FailureRates,
    rng: np.random.Generator,
) -> list[SimulatedJob]:
    """Draw the jobs of all classes, in the order of submission."""
    jobs: list[SimulatedJob] = []
    for kind, entry in enumerate(classes.values()):
        number = entry.count + int(rng.poisson(entry.per_day * days))
        submitted = np.concatenate(
            [np.zeros(entry.count), rng.uniform(0.0, days * SECONDS_PER_DAY, number - entry.count)]
        )
        weights = np.array(list(entry.devices.values()))
        devices = rng.choice(np.array(list(entry.devices)), number, p=weights / weights.sum())
        medians_h = np.array([entry.hours.get(size, entry.median_h) for size in devices.tolist()])
        work_s = medians_h * SECONDS_PER_HOUR * np.exp(entry.sigma * rng.standard_normal(number))
        activities = np.full(number, entry.activity)
        if entry.activity_spread > 0 and 0 < entry.activity < 1:
            total = 1.0 / entry.activity_spread
            activities = rng.beta(entry.activity * total, (1.0 - entry.activity) * total, number)
        costs = {
            size: make_costs(entry.checkpoint, math.ceil(size / devices_per_node), rates) for size in entry.devices
        }
        jobs += [
            SimulatedJob(submit_s, size, work, costs[size], kind, activity)
            for submit_s, size, work, activity in zip(
                submitted.tolist(), devices.tolist(), work_s.tolist(), activities.tolist(), strict=True
            )
        ]
    return sorted(jobs, key=lambda job: job.submit_s)


def read_job_trace(path: Path) -> list[tuple[float, int, float]]:
    """Read a CSV file with the columns submit_s, gpus and duration_s; others are ignored. Return submission, devices
    and duration of each job, in the order of submission. Raises DataError with line, column and value."""
    rows: list[tuple[float, int, float]] = []
    with open_csv(path) as table:
        if missing := [name for name in TRACE_COLUMNS if name not in table.columns]:
            raise DataError(
                f"{path}: no column {missing[0]}; expected {', '.join(TRACE_COLUMNS)}, found {table.describe_columns()}"
            )
        for line, row in table.iterate({name: name for name in TRACE_COLUMNS}):
            submit_s, duration_s, gpus = (_read_number(path, line, name, row[name]) for name in TRACE_COLUMNS)
            if gpus < 1 or gpus != int(gpus):
                raise DataError(f"{path}:{line}: gpus: expected a whole number above 0, found {gpus:g}")
            rows.append((submit_s, int(gpus), duration_s))
    if not rows:
        raise DataError(f"{path}: no jobs")
    return sorted(rows, key=lambda row: row[0])  # jobs of one second stay in the order of the file


def _read_number(path: Path, line: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise DataError(f"{path}:{line}: {column}: expected a number of 0 or more, found {text!r}")
    return value
