"""Simulate a fleet once: all groups of equal nodes, and what the site drew, used and cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from phalanx.errors import UsageError
from phalanx.planner.storage_costs import SECONDS_PER_DAY
from phalanx_fleet.fleet_file import FleetFile, expand_entries, expand_names
from phalanx_fleet.power_tree import NodePower, PowerTree
from phalanx_fleet.simulate.cluster_simulation import ClusterOutcome, ClusterSimulation
from phalanx_fleet.simulate.job_state import POLICY_CLASSES, SimulatedJob
from phalanx_fleet.simulate.node_pool import NodePool
from phalanx_fleet.simulate.power_model import (
    SAVE_ACTIVITY,
    GroupOutcome,
    add_histories,
    device_power,
    find_cap_speed,
    measure_power,
    set_clocks,
    supply_power,
)
from phalanx_fleet.simulate.random_events import (
    NodeHistory,
    find_rates,
    make_costs,
    merge_level_failures,
    sample_failures,
    sample_jobs,
    sample_level_failures,
)
from phalanx_fleet.simulate.site_hours import FleetHours, SiteFigures, measure_site
from phalanx_fleet.simulate.site_series import SiteHours
from phalanx_fleet.simulation_settings import REPLAY_CLASS, CheckpointEntry, JobClassEntry, SimulationSettings
from phalanx_fleet.thermal.device_series import Values

LEVEL_STREAM = (0, 3)
"""Random numbers of racks, rows and feeds, which are those of all groups."""
DEVICE_STATES = ("productive", "blocked", "wasted", "unavailable", "throttled", "idle", "spare", "repair")
"""Of device time. Without a plant nothing throttles."""
JobTrace = Sequence[tuple[float, int, float]]
"""Submission in seconds, devices, seconds of each job."""


@dataclass
class NodeTypeGroup:
    """Equal nodes of a fleet."""

    type_name: str
    power: NodePower
    nodes: list[NodeHistory]
    num_racks: int


@dataclass
class SimulationResult:
    """Figures of one simulation."""

    shares: dict[str, float] = field(default_factory=dict)
    """Device time by state, as shares; they add up to 1."""
    ettr: float = math.nan
    """Productive device time over all of it from the first start of each job: with saves, wasted work, restarts and
    waits after failures."""
    num_jobs: int = 0
    num_done: int = 0
    stops_by_cause: dict[str, int] = field(default_factory=dict)
    wait_mean_s: float = math.nan
    """From submission to the first start, of jobs that started."""
    wait_p99_s: float = math.nan
    completion_mean_s: float = math.nan
    """From submission to the end, of jobs that are done."""
    makespan_s: float = math.nan
    it_mean_w: float = 0.0
    """Nodes, switches and their conversion losses."""
    it_peak_w: float = 0.0
    it_hourly_swing_w: float = 0.0
    """Highest less lowest mean of an hour."""
    save_step_w: float = 0.0
    """Fall of power within about a second when the largest job begins a blocking save."""
    cap_speed: float = math.nan
    """Mean speed of jobs under the power cap over that without, weighted by their work."""
    site: SiteFigures = field(default_factory=SiteFigures)
    hours: FleetHours | None = field(default=None, compare=False, repr=False)
    intervals_s: dict[str, float] = field(default_factory=dict)
    """Productive seconds between saves of the largest job of each kind."""

    @property
    def num_stops(self) -> int:
        """Stops of jobs by failures."""
        return sum(self.stops_by_cause.values())


def group_nodes(fleet: FleetFile, tree: PowerTree, settings: SimulationSettings) -> list[NodeTypeGroup]:
    """Return the nodes of each kind."""
    batches = _find_batches(settings)
    racks = expand_entries(fleet.racks)
    if unknown := [rack for rack in batches if rack not in racks]:
        raise UsageError(f"simulate.batches: {unknown[0]}: no such rack")
    by_rack: dict[int, list[int]] = {}
    for index, node in enumerate(tree.nodes):
        by_rack.setdefault(node.rack, []).append(index)
    groups: dict[str, NodeTypeGroup] = {}
    for rack, members in by_rack.items():
        first = tree.nodes[members[0]]
        group = groups.setdefault(first.type_name, NodeTypeGroup(first.type_name, first.power, [], 0))
        batch, age = batches.get(tree.levels[rack].name, (None, 0.0))
        above = [tree.levels[level].label for level in tree.list_above(members[0])]
        group.nodes.extend([NodeHistory(batch, age, tuple(above))] * len(members))
        group.num_racks += 1
    return list(groups.values())


def _find_batches(settings: SimulationSettings) -> dict[str, tuple[str | None, float]]:
    """Return batch and age of racks by their names."""
    found: dict[str, tuple[str | None, float]] = {}
    for name, entry in settings.batches.items():
        try:
            racks = expand_names(entry.racks)
        except ValueError as error:
            raise UsageError(f"simulate.batches.{name}.racks: {error}") from None
        for rack in racks:
            if (other := found.setdefault(rack, (name, entry.age_years))[0]) != name:
                raise UsageError(f"simulate.batches.{name}.racks: {rack} is of batch {other}, too")
    return found


def simulate_fleet(
    groups: Sequence[NodeTypeGroup],
    settings: SimulationSettings,
    seed: int,
    trace: JobTrace | None = None,
    site_hours: SiteHours | None = None,
) -> SimulationResult:
    """Simulate a fleet with the random numbers of a seed.

    Where accelerators throttle, it is simulated a second time with jobs that are slower in those hours. Each hour's
    coolant is that of the first time, with the jobs that ran then: their heat, less what throttling takes off.

    Args:
        groups: Its nodes.
        settings: All else.
        seed: Equal seeds give equal figures.
        trace: Replaces the jobs of the settings, and is simulated until all its jobs are done.
        site_hours: What the hourly files of `settings.site` hold.

    Raises UsageError for jobs that can never run or are too many, DataError for hours that a file does not have.
    """
    hours = site_hours or SiteHours()
    result = _simulate_once(groups, settings, seed, trace, hours, None)
    if result.hours is not None and result.site.throttled_device_hours > 0:
        result = _simulate_once(groups, settings, seed, trace, hours, result.hours.allowed_power)
    return result


def _simulate_once(
    groups: Sequence[NodeTypeGroup],
    settings: SimulationSettings,
    seed: int,
    trace: JobTrace | None,
    site_hours: SiteHours,
    allowed_power: Values | None,
) -> SimulationResult:
    """Simulate a fleet once, with accelerators that may draw this power by hour, over their highest."""
    outcomes: list[tuple[NodeTypeGroup, ClusterOutcome, dict[str, JobClassEntry]]] = []
    result = SimulationResult()
    levels = {name for group in groups for node in group.nodes for name in node.levels}
    until_s = settings.days * SECONDS_PER_DAY
    level_failures = sample_level_failures(
        settings.failures, levels, until_s, np.random.default_rng([seed, *LEVEL_STREAM])
    )
    for index, group in enumerate(groups):
        classes = _select_classes(settings, groups, index, trace is not None)
        if trace is not None and index > 0:  # other kinds stand idle until the trace is done
            until_s = outcomes[0][1].end_s
        pool, jobs = _prepare_group(group, classes, settings, (seed, index), trace if index == 0 else None)
        if allowed_power is not None:
            set_clocks(jobs, group.power, settings.power_cap, allowed_power)
        failures = sample_failures(
            settings.failures, group.nodes, group.power.num_devices, until_s, np.random.default_rng([seed, index, 2])
        )
        failures = merge_level_failures(failures, level_failures, group.nodes)
        last_s = math.inf if trace is not None and index == 0 else until_s
        outcome = ClusterSimulation(pool, jobs, POLICY_CLASSES[settings.policy](), failures, last_s).run()
        outcomes.append((group, outcome, classes))
        rates = find_rates(settings.failures, group.nodes, group.power.num_devices)
        for name, entry in classes.items():
            nodes = math.ceil(max(entry.devices) / group.power.num_devices)
            result.intervals_s[name] = make_costs(entry.checkpoint, nodes, rates).interval_s
    _count_time(result, [outcome for _, outcome, _ in outcomes], list(settings.failures), site_hours.plant is not None)
    _count_energy(result, outcomes, settings, site_hours)
    return result


def _select_classes(
    settings: SimulationSettings, groups: Sequence[NodeTypeGroup], index: int, is_replay: bool
) -> dict[str, JobClassEntry]:
    if is_replay and index > 0:
        return {}
    if is_replay:
        return {REPLAY_CLASS: settings.jobs.get(REPLAY_CLASS, JobClassEntry(checkpoint=CheckpointEntry()))}
    names = [group.type_name for group in groups]
    for name, entry in settings.jobs.items():
        if entry.node_type is not None and entry.node_type not in names:
            raise UsageError(
                f"simulate.jobs.{name}.node_type: no nodes of kind {entry.node_type}; there are {', '.join(names)}"
            )
    return {n: entry for n, entry in settings.jobs.items() if (entry.node_type or names[0]) == names[index]}


def _prepare_group(
    group: NodeTypeGroup,
    classes: Mapping[str, JobClassEntry],
    settings: SimulationSettings,
    stream: tuple[int, int],
    trace: JobTrace | None,
) -> tuple[NodePool, list[SimulatedJob]]:
    per_node, power = group.power.num_devices, group.power
    pool = NodePool(len(group.nodes), per_node, math.ceil(settings.spares * len(group.nodes)))
    rates = find_rates(settings.failures, group.nodes, per_node)
    if trace is not None:
        entry = classes[REPLAY_CLASS]
        costs = {size: make_costs(entry.checkpoint, math.ceil(size / per_node), rates) for _, size, _ in trace}
        jobs = [SimulatedJob(at_s, size, work_s, costs[size], 0, entry.activity) for at_s, size, work_s in trace]
    else:
        jobs = sample_jobs(classes, settings.days, per_node, rates, np.random.default_rng([*stream, 1]))
    largest = max((job.devices for job in jobs), default=0)
    largest = max([largest, *(max(entry.devices) for entry in classes.values() if trace is None)])
    if largest > pool.most_devices:
        raise UsageError(
            f"a job of {largest} accelerators can never run: the nodes of kind {group.type_name} have "
            f"{pool.most_devices} without {pool.num_spares} spare nodes"
        )
    curves = [entry.speed_by_cap for entry in classes.values()]
    for job in jobs:
        speed = find_cap_speed(power, job.activity, settings.power_cap, curves[job.kind])
        job.work_s = job.remaining_s = job.work_s / speed
    return pool, jobs


def _count_time(
    result: SimulationResult, outcomes: Sequence[ClusterOutcome], causes: Sequence[str], has_plant: bool
) -> None:
    states = DEVICE_STATES if has_plant else [state for state in DEVICE_STATES if state != "throttled"]
    total = sum(outcome.time.total for outcome in outcomes)
    if total > 0:
        result.shares = {state: sum(getattr(each.time, state) for each in outcomes) / total for state in states}
    used = sum(outcome.time.used + outcome.requeue_wait for outcome in outcomes)
    result.ettr = sum(outcome.time.productive for outcome in outcomes) / used if used > 0 else math.nan
    jobs = [job for outcome in outcomes for job in outcome.jobs]
    waits = [job.first_start_s - job.submit_s for job in jobs if job.first_start_s is not None]
    done = [(job.submit_s, job.finish_s) for job in jobs if job.finish_s is not None]
    result.num_jobs, result.num_done = len(jobs), len(done)
    result.stops_by_cause = {
        cause: sum(outcome.stops_by_cause.get(index, 0) for outcome in outcomes) for index, cause in enumerate(causes)
    }
    if waits:
        result.wait_mean_s, result.wait_p99_s = float(np.mean(waits)), float(np.percentile(waits, 99))
    if done:
        result.completion_mean_s = float(np.mean([end_s - submit_s for submit_s, end_s in done]))
        result.makespan_s = max(end_s for _, end_s in done) - min(submit_s for submit_s, _ in done)


def _count_energy(
    result: SimulationResult,
    outcomes: Sequence[tuple[NodeTypeGroup, ClusterOutcome, dict[str, JobClassEntry]]],
    settings: SimulationSettings,
    site_hours: SiteHours,
) -> None:
    site, cap = settings.site, settings.power_cap
    nodes = add_histories([measure_power(each, group.power, len(group.nodes), cap) for group, each, _ in outcomes])
    num_racks = sum(group.num_racks for group, _, _ in outcomes)
    work_s = capped_s = 0.0
    for group, outcome, classes in outcomes:
        kinds = list(classes.values())
        for job in outcome.jobs:
            speed = find_cap_speed(group.power, job.activity, cap, kinds[job.kind].speed_by_cap)
            work_s, capped_s = work_s + job.work_s * speed * job.devices, capped_s + job.work_s * job.devices
            if job.first_start_s is not None and kinds[job.kind].checkpoint.mode == "sync":
                above_w = device_power(group.power, job.activity, cap) - group.power.device_idle_w
                result.save_step_w = max(result.save_step_w, (1 - SAVE_ACTIVITY) * above_w * job.devices)
    result.cap_speed = work_s / capped_s if capped_s > 0 else math.nan
    seconds = max(outcome.end_s for _, outcome, _ in outcomes)
    if seconds <= 0:
        return
    groups = [GroupOutcome(group.power, len(group.nodes), outcome, cap) for group, outcome, _ in outcomes]
    racks_w = num_racks * site.rack_overhead_w
    result.site, result.hours = measure_site(groups, site, site_hours, racks_w, nodes.hourly_w, nodes.energy_j)
    hours = result.hours
    result.it_mean_w = float((hours.it_w * hours.duration_h).sum() / hours.duration_h.sum())
    result.it_peak_w = supply_power(nodes.peak_w, num_racks, site.conversion_efficiency, site.rack_overhead_w)
    result.it_hourly_swing_w = float(np.ptp(hours.it_w))
