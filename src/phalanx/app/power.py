"""Hold the budgets of a fleet by power caps: show, plan, apply and guard."""

import getpass
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx.errors import UnfitNodeError, UsageError
from phalanx.fleet.audit_log import find_audit_problem
from phalanx.fleet.fleet_file import FleetFile, load_fleet_file
from phalanx.fleet.power.allocation import Allocation, NodeCaps, PoweredJob, allocate_caps
from phalanx.fleet.power.capped_tree import count_capped_devices
from phalanx.fleet.power.claims import describe_excesses, list_budgets
from phalanx.fleet.power.guard import GuardIdentity, GuardStatus, PowerGuard, group_by_rack, plan_fallbacks
from phalanx.fleet.power.jobs_file import load_jobs_file
from phalanx.fleet.power.links import NodeLinks
from phalanx.fleet.power.load_targets import LiveTargets, TargetsFileSource, find_active_budgets
from phalanx.fleet.power.messages import NodeReport, NodeRequest
from phalanx.fleet.power.plan_writes import CapWrite
from phalanx.fleet.power_settings import PowerSettings
from phalanx.fleet.power_tree import PowerTree, build_power_tree
from phalanx.run.boot_clock import seconds_since_boot, unix_now
from phalanx.run.private_files import state_root

POLL_INTERVAL_S = 0.2
MAX_APPLY_STEPS, MAX_EQUAL_STEPS = 200, 5


@dataclass(frozen=True)
class PowerFleet:
    """A fleet as power control sees it."""

    file: FleetFile
    tree: PowerTree
    jobs: Sequence[PoweredJob] = ()
    targets: LiveTargets = field(default_factory=LiveTargets)
    path: Path = Path()

    @property
    def settings(self) -> PowerSettings:
        """The section `power` of the fleet file."""
        return self.file.power


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
        LiveTargets(None if targets is None else TargetsFileSource(targets, tree)),
        fleet,
    )


def power_state_dir(fleet: PowerFleet) -> Path:
    """Where this fleet's audit log and this node's record are."""
    return state_root(os.environ) / "power" / fleet.file.name


def read_nodes(fleet: PowerFleet, links: NodeLinks, sleep: Callable[[float], None] = time.sleep) -> PowerReading:
    """Ask all nodes without becoming their writer. A node that does not answer in time is silent."""
    nodes = fleet.tree.nodes
    for node in nodes:
        links.send(node.name, NodeRequest(1, 0, make_writer_name()))
    reports: dict[str, NodeReport] = {}
    until = seconds_since_boot() + fleet.settings.helper.timeout_s
    while True:
        reports |= {report.node: report for report in links.receive()}
        if len(reports) >= links.count_reachable() or seconds_since_boot() >= until:
            break
        sleep(POLL_INTERVAL_S)
    bounds: list[list[float | None]] = []
    notices = []
    for node in nodes:
        report, count = reports.get(node.name), node.power.num_devices
        if report is not None and len(report.devices) != count and not report.refusal:
            notices.append(f"{node.name} has {len(report.devices)} devices; the fleet file has {count}")
        is_known = report is not None and len(report.devices) == count
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
    budgets_w = find_active_budgets(fleet.tree, fleet.targets, unix_now())
    limits = [
        None
        if None in bounds
        else NodeCaps(
            max(device.min_w for device in reading.reports[node.name].devices),
            min(device.max_w for device in reading.reports[node.name].devices),
            len(bounds),
        )
        for node, bounds in zip(fleet.tree.nodes, reading.bounds_w, strict=True)
    ]
    settings = fleet.settings
    return allocate_caps(fleet.tree, limits, fleet.jobs, budgets_w, settings.margin, settings.min_cap_share)


def open_guard(
    fleet: PowerFleet,
    links: NodeLinks,
    reading: PowerReading,
    takes_over: bool,
    find_jobs: Callable[[], Sequence[PoweredJob]] | None = None,
) -> PowerGuard:
    """Return a guard that is about to become the writer of all nodes. `find_jobs`: returns what runs now; by default
    all jobs of the fleet.

    Raises:
        UsageError: Another guard has a lease on a node, or the budgets do not bear the lowest caps.
    """
    for report in reading.reports.values():
        if report.lease_left_s > 0 and not takes_over:
            raise UsageError(
                f"{report.node}: {report.writer} holds this node, with a lease of {report.lease_left_s:.0f} s. Stop it "
                "and wait until the lease has ended, or take its nodes over with --take-over"
            )
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
        find_jobs or (lambda: fleet.jobs),
        lambda: find_active_budgets(fleet.tree, fleet.targets, unix_now()),
        fallbacks_w,
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
        now, active_w = seconds_since_boot(), find_active_budgets(fleet.tree, fleet.targets, unix_now())
        if now >= next_step or active_w != budgets_w:
            budgets_w, next_step = active_w, now + fleet.settings.period_s
            yield audit.write(fleet.tree, guard.step(now))
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
