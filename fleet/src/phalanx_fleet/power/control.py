"""Hold the budgets of a fleet by power caps: read the jobs file and the tree of what is capped, choose how nodes are
reached, plan, and guard."""

import getpass
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from pydantic import Field

from phalanx.cluster.spec import Figure, StrictModel
from phalanx.errors import DataError, RecipeError, UnfitNodeError, UsageError
from phalanx.recipe.validation_errors import read_user_mapping, suggest_nearest, validate_value
from phalanx.recipe.yaml_loader import location_of_key
from phalanx.run.boot_clock import seconds_since_boot, unix_now
from phalanx.run.private_files import state_root
from phalanx_fleet.audit_log import find_audit_problem
from phalanx_fleet.fleet_file import FleetFile, expand_names, load_fleet_file, node_states_path
from phalanx_fleet.node_states import NodeStates
from phalanx_fleet.power.allocation import Allocation, PoweredJob, allocate_caps
from phalanx_fleet.power.committed_power import CapWrite, describe_excesses, list_budgets
from phalanx_fleet.power.devices import CapDevice, CapError, open_cap_devices
from phalanx_fleet.power.fake_fleet import open_fake_links
from phalanx_fleet.power.guard import (
    GuardIdentity,
    GuardStatus,
    PowerGuard,
    find_node_caps,
    group_by_rack,
    plan_fallbacks,
)
from phalanx_fleet.power.links import (
    HelperLinks,
    LocalLinks,
    NodeLinks,
    ask_nodes,
    connect_by_command,
    connect_to_socket,
    expand_command,
    is_listening,
)
from phalanx_fleet.power.load_targets import LoadTarget, TargetsFileSource, find_active_budgets
from phalanx_fleet.power.messages import NodeReport, NodeRequest
from phalanx_fleet.power.node_keeper import READ_BACK_TOLERANCE_W, NodeKeeper, RecordStore
from phalanx_fleet.power.speed_curve import SpeedCurve, SweepPoint, load_sweep
from phalanx_fleet.power_settings import CapDeviceSettings, Power, PowerSettings
from phalanx_fleet.power_tree import NodePower, PowerTree, build_power_tree

POLL_INTERVAL_S = 0.2
MAX_APPLY_STEPS, MAX_EQUAL_STEPS = 200, 5
KEEPER_START_TIMEOUT_S = 30.0
"""A start of Python, and of the driver's library."""
OpenDevices = Callable[[CapDeviceSettings], Sequence[CapDevice]]


@dataclass(frozen=True)
class PowerFleet:
    """A fleet as power control sees it."""

    file: FleetFile
    tree: PowerTree
    jobs: Sequence[PoweredJob] = ()
    targets: Iterable[LoadTarget] = ()
    path: Path = Path()

    @property
    def settings(self) -> PowerSettings:
        """The section `power` of the fleet file."""
        return self.file.power

    def find_budgets(self) -> list[float | None]:
        """Return the budget of each level that holds now."""
        return find_active_budgets(self.tree, self.targets, unix_now())


@dataclass(frozen=True)
class PowerReading:
    """What all nodes have reported. Watts by level; caps and draws by node and device."""

    reports: Mapping[str, NodeReport]
    bounds_w: list[list[float | None]]
    notices: list[str] = field(default_factory=list)


def load_power_fleet(fleet: Path, jobs: Path | None = None, targets: Path | None = None) -> PowerFleet:
    """Load the files of a fleet. Raises RecipeError for what is wrong in them."""
    file, locations = load_fleet_file(fleet)
    tree = count_capped_devices(build_power_tree(file, locations), file.power.devices)
    return PowerFleet(
        file,
        tree,
        group_by_rack(tree) if jobs is None else load_jobs_file(jobs, tree),
        () if targets is None else TargetsFileSource(targets, tree),
        fleet,
    )


def find_in_repair(fleet: PowerFleet) -> frozenset[str]:
    """Return the nodes that people work on."""
    with NodeStates(node_states_path(fleet.path, fleet.file)) as states:
        return states.list_in_repair()


def power_state_dir(fleet: PowerFleet) -> Path:
    """Where this fleet's audit log and this node's record are."""
    return state_root(os.environ) / "power" / fleet.file.name


def read_nodes(fleet: PowerFleet, links: NodeLinks, sleep: Callable[[float], None] = time.sleep) -> PowerReading:
    """Ask all nodes without becoming their writer. A node that does not answer in time is silent."""
    nodes, request = fleet.tree.nodes, NodeRequest(1, 0, make_writer_name())
    requests = {node.name: request for node in nodes}
    reports = ask_nodes(links, requests, fleet.settings.helper.timeout_s, sleep, seconds_since_boot)
    bounds: list[list[float | None]] = []
    notices, in_repair = [], find_in_repair(fleet)
    for node in nodes:
        report, count = reports.get(node.name), node.power.num_devices
        if report is not None and len(report.devices) != count and not report.refusal:
            notices.append(f"{node.name} has {len(report.devices)} devices; the fleet file has {count}")
        is_known = report is not None and len(report.devices) == count and node.name not in in_repair
        if node.name in in_repair:
            notices.append(f"{node.name} is in repair: counted at its maximum")
        bounds.append([device.cap_w for device in report.devices] if report and is_known else [None] * count)
        if report is not None:
            notices += [f"{node.name}: {each}" for each in (report.refusal, *report.problems) if each]
    return PowerReading(reports, bounds, [*describe_problems(links.problems), *notices])


def describe_problems(problems: Mapping[str, str]) -> list[str]:
    """Return a line for each reason for which nodes are not reached."""
    nodes_by_text: dict[str, list[str]] = {}
    for node, text in problems.items():
        nodes_by_text.setdefault(text, []).append(node)
    return [
        f"{nodes[0]}{f' and {len(nodes) - 1} more' if nodes[1:] else ''}: not reached: {text}"
        for text, nodes in nodes_by_text.items()
    ]


def plan_caps(fleet: PowerFleet, reading: PowerReading) -> Allocation:
    """Return caps within the budgets that hold now. Silent nodes are counted at their maximum."""
    limits = [
        None if None in bounds else find_node_caps(reading.reports[node.name])
        for node, bounds in zip(fleet.tree.nodes, reading.bounds_w, strict=True)
    ]
    settings = fleet.settings
    return allocate_caps(fleet.tree, limits, fleet.jobs, fleet.find_budgets(), settings.margin, settings.min_cap_share)


def check_lease(report: NodeReport, takes_over: bool) -> None:
    """Raise UsageError where a guard holds a node, unless its node is to be taken over."""
    if report.lease_left_s > 0 and not takes_over:
        raise UsageError(
            f"{report.node}: {report.writer} holds this node, with a lease of {report.lease_left_s:.0f} s. Stop it "
            "and wait until the lease has ended, or take its nodes over with --take-over"
        )


def open_guard(fleet: PowerFleet, links: NodeLinks, reading: PowerReading, takes_over: bool) -> PowerGuard:
    """Return a guard that is about to become the writer of all nodes.

    Raises:
        UsageError: Another guard has a lease on a node, or the budgets do not bear the lowest caps.
    """
    for report in reading.reports.values():
        check_lease(report, takes_over)
    fallbacks_w, is_within = plan_fallbacks(fleet.tree, list_budgets(fleet.tree), fleet.settings)
    if not is_within:
        raise UsageError(
            f"{fleet.file.name}: nothing safe to fall back to: with all nodes at their lowest caps "
            f"{describe_excesses(fleet.tree, fallbacks_w, fleet.settings.margin)}. Raise these budgets or remove nodes"
        )
    epoch = 1 + max((report.epoch for report in reading.reports.values()), default=0)
    return PowerGuard(
        fleet.tree,
        fleet.settings,
        GuardIdentity(epoch, make_writer_name()),
        links,
        lambda: fleet.jobs,
        fleet.find_budgets,
        fallbacks_w,
        lambda: find_in_repair(fleet),
    )


def run_guard(
    fleet: PowerFleet,
    guard: PowerGuard,
    audit: "AuditLog",
    duration_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[GuardStatus]:
    """Step once a period, and at once when a budget changes; yield each step. Ends after `duration_s`."""
    began = next_step = seconds_since_boot()
    budgets_w: list[float | None] = []
    while duration_s is None or seconds_since_boot() - began < duration_s:
        now, active_w = seconds_since_boot(), fleet.find_budgets()
        if now >= next_step or active_w != budgets_w:
            budgets_w, next_step = active_w, now + fleet.settings.period_s
            status = guard.step(now)
            if isinstance(fleet.targets, TargetsFileSource):
                status = replace(status, notices=[*status.notices, *fleet.targets.list_problems()])
            yield audit.write(fleet.tree, status)
        sleep(POLL_INTERVAL_S)
        guard.receive()


def apply_caps(
    fleet: PowerFleet, guard: PowerGuard, audit: "AuditLog", sleep: Callable[[float], None] = time.sleep
) -> Iterator[GuardStatus]:
    """Lower, read back and raise until nothing is left to write; yield each step that writes.

    Raises:
        UnfitNodeError: Nodes do not follow, or do not answer.
    """
    last_writes, num_equal = list[CapWrite](), 0
    for _ in range(MAX_APPLY_STEPS):
        status = guard.step(seconds_since_boot())
        num_equal = num_equal + 1 if status.writes == last_writes else 0
        last_writes = status.writes
        yield audit.write(fleet.tree, status)
        if not status.writes and not status.silent_nodes:
            return
        if num_equal == MAX_EQUAL_STEPS:
            raise UnfitNodeError("nodes do not follow, or do not answer; what was applied ends with this command")
        until = seconds_since_boot() + fleet.settings.period_s
        while seconds_since_boot() < until:
            sleep(POLL_INTERVAL_S)
            guard.receive()


class AuditLog:
    """Appends each order to a file of lines of JSON, with time and user."""

    def __init__(self, path: Path):
        """Raises UsageError for a file that cannot be written now: nothing is ordered without a log."""
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            raise UsageError(f"{path}: the audit log cannot be written there: {error.strerror}") from None

    def write(self, tree: PowerTree, status: GuardStatus) -> GuardStatus:
        """Append the orders of a step, and what was unsafe. Return the step, with a notice where the log cannot be
        written any more."""
        lines: list[dict[str, object]] = [
            {"node": tree.nodes[write.node].name, "caps_w": write.caps_w, "is_raise": write.is_raise}
            for write in status.writes
        ]
        lines += [{"unsafe": text} for text in status.unsafe]
        lines += [{"notice": text} for text in status.notices]
        problem = find_audit_problem(self._path, lines)
        return replace(status, notices=[*status.notices, problem]) if problem else status


def make_writer_name() -> str:
    return f"{getpass.getuser()}@{os.uname().nodename}:{os.getpid()}:{secrets.token_hex(4)}"


def count_capped_devices(tree: PowerTree, settings: CapDeviceSettings) -> PowerTree:
    """Return the tree with the devices that are capped: CPU packages for rapl. Raises RecipeError where they are not
    described, or do not fit into a node."""
    if settings.kind != "rapl":
        return tree
    nodes = tuple(replace(node, power=_split_power(node.power, settings)) for node in tree.nodes)
    return replace(tree, nodes=nodes)


def _split_power(power: NodePower, settings: CapDeviceSettings) -> NodePower:
    count, device_w = settings.packages, settings.package_power
    if count is None or device_w is None:
        raise RecipeError("power.devices: rapl needs `packages`, of a node, and `package_power`, the most of each")
    rest_w = power.max_w - count * device_w
    if rest_w < 0:
        raise RecipeError(f"power.devices: {count} packages of {device_w:g} W do not fit into {power.max_w:g} W")
    return NodePower(count, device_w, 0.0, rest_w, min(power.idle_w, rest_w), None)


class SweepEntry(StrictModel):
    """A cap, and what the job did there: steps or tokens a second, and the mean power of a device."""

    cap: Power
    rate: Figure
    draw: Power


class PoweredJobEntry(StrictModel):
    """A job on all devices of its nodes. `sweep`: by node type."""

    nodes: str
    """Names, with ranges such as n[01-04], k[1-2]-[1-4] or n1,n[3-4]."""
    priority: int = Field(0, ge=-(10**6), le=10**6)
    """A job of a higher one is slowed down later."""
    sweep: dict[str, list[SweepEntry]] = Field(default_factory=dict)
    run: Path | None = None
    """Directory of a run with a stored sweep, relative to this file's; instead of `sweep`."""


class PowerJobsFile(StrictModel):
    """Jobs by name."""

    jobs: dict[str, PoweredJobEntry]


def load_jobs_file(path: Path, tree: PowerTree) -> Sequence[PoweredJob]:
    """Load the jobs of a fleet. Raises RecipeError for what is wrong in the file."""
    value, locations = read_user_mapping(path, "`jobs:`")
    file = validate_value(value, locations, PowerJobsFile)
    indices = {node.name: index for index, node in enumerate(tree.nodes)}
    owners: dict[str, str] = {}
    jobs = []
    for name, entry in file.jobs.items():
        where = location_of_key(locations, ("jobs", name))
        try:
            names = expand_names(entry.nodes)
            curves = _fit_curves(entry, path.parent)
        except (ValueError, DataError) as error:
            raise RecipeError(f"{where}: jobs.{name}: {error}") from None
        for node in names:
            if node not in indices:
                raise RecipeError(f"{where}: jobs.{name}: {node}: no such node{suggest_nearest(node, [*indices])}")
            if node in owners:
                raise RecipeError(f"{where}: jobs.{name}: {node} is of job {owners[node]}, too")
            owners[node] = name
        types = {tree.nodes[indices[node]].type_name: tree.nodes[indices[node]].power for node in names}
        if problem := _find_curve_problem(curves, types):
            raise RecipeError(f"{where}: jobs.{name}: {problem}")
        devices = {indices[node]: tuple(range(tree.nodes[indices[node]].power.num_devices)) for node in names}
        jobs.append(PoweredJob(name, devices, curves, entry.priority))
    return jobs


def _find_curve_problem(curves: Mapping[str, SpeedCurve], types: Mapping[str, NodePower]) -> str:
    """Return what is wrong with the node types and caps of a sweep; empty if nothing is."""
    for name, curve in curves.items():
        if name not in types:
            return f"sweep: {name}: no node type of its nodes; they are {', '.join(types)}"
        low_w, high_w = types[name].device_min_cap_w or 0.0, types[name].device_max_w
        for cap_w in (curve.caps_w[0], curve.caps_w[-1]):
            if not low_w - READ_BACK_TOLERANCE_W <= cap_w <= high_w + READ_BACK_TOLERANCE_W:
                return f"sweep: {name}: a device takes caps from {low_w:g} to {high_w:g} W, not {cap_w:g} W"
    return ""


def _fit_curves(entry: PoweredJobEntry, folder: Path) -> dict[str, SpeedCurve]:
    if entry.run is not None:
        if entry.sweep:
            raise DataError("expected one of `sweep` and `run`")
        return load_sweep(folder / entry.run).fit_curves()
    return {
        name: SpeedCurve.fit([SweepPoint(point.cap, point.rate, point.draw) for point in points])
        for name, points in entry.sweep.items()
    }


def open_links(
    fleet: PowerFleet, is_fake: bool, is_read_only: bool = True, open_devices: OpenDevices = open_cap_devices
) -> NodeLinks:
    """Return the way to the nodes: their helpers, the devices of this machine, or a fake fleet.

    Raises:
        UsageError: This machine is no node of the fleet, has no device that can be capped, or has another guard.
    """
    if is_fake:
        return open_fake_links(fleet.tree.nodes, fleet.settings.dead_time_s, fleet.settings.averaging_s)
    here = os.uname().nodename
    names = {node.name for node in fleet.tree.nodes}
    reach = fleet.settings.helper
    own = {here: partial(connect_to_socket, reach.socket)} if here in names and is_listening(reach.socket) else {}
    if reach.command is not None:
        if wrong := sorted(name for name in names if name.startswith("-")):  # it would be an option of the command
            raise UsageError(f"{wrong[0]}: a node that is reached by a command cannot begin with -")
        others = {name: partial(connect_by_command, expand_command(reach.command, name)) for name in names}
        return HelperLinks({**others, **own})
    if here not in names:
        raise UsageError(
            f"{here}: this machine is no node of {fleet.file.name}. Set power.helper.command to reach the helpers of "
            "other nodes, run it on a node, or try it with --fake"
        )
    if own:
        return HelperLinks(own)
    try:
        devices = open_devices(fleet.settings.devices)
        if is_read_only:
            return LocalLinks({here: NodeKeeper(here, devices, RecordStore(record_path(fleet)), is_read_only=True)})
    except CapError as error:
        raise UsageError(f"{here}: {error}. Try it without devices: --fake") from None
    return _start_keeper(fleet, here)


def record_path(fleet: PowerFleet) -> Path:
    """Return the record of this machine where it has no helper."""
    return power_state_dir(fleet) / f"{os.uname().nodename}.json"


def _start_keeper(fleet: PowerFleet, node: str) -> HelperLinks:
    """Start a process that holds the devices: it ends leases also when this one is killed."""
    words = [sys.executable, "-m", "phalanx", "power", "keep-node", str(fleet.path.absolute())]
    links = HelperLinks({node: partial(connect_by_command, words)})
    if not ask_nodes(links, {node: NodeRequest(1, 0, make_writer_name())}, KEEPER_START_TIMEOUT_S):
        links.close()
        reason = links.problems.get(node, "the process that holds the devices does not answer")
        raise UsageError(f"{node}: {reason}")
    return links
