"""Release nodes from power control: their devices get the caps of before the first order."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import UsageError
from phalanx.recipe.validation_errors import suggest_nearest
from phalanx_fleet.audit_log import find_audit_problem
from phalanx_fleet.power.committed_power import LevelSum, find_excesses, list_committed
from phalanx_fleet.power.control import PowerFleet, PowerReading, check_lease, make_writer_name, power_state_dir
from phalanx_fleet.power.links import NodeLinks, ask_nodes
from phalanx_fleet.power.messages import NodeReport, NodeRequest
from phalanx_fleet.power_tree import PowerTree

ANSWER_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class DeviceRelease:
    """A write. `cap_w` is what the device may be enforcing now; None where it does not answer."""

    node: str
    device: str
    cap_w: float | None
    original_w: float

    def __str__(self) -> str:
        now = "does not answer" if self.cap_w is None else f"{self.cap_w:.0f} W"
        return f"restore {self.node}: {self.device}: {now} -> {self.original_w:.0f} W"


@dataclass(frozen=True)
class ReleasePlan:
    """What a release writes. `notes`: what it cannot restore, and why. `excesses`: budgets that it breaks."""

    writes: list[DeviceRelease]
    notes: list[str]
    excesses: list[LevelSum]


@dataclass(frozen=True)
class NodeRelease:
    """What became of a node. `failure`: why it is not released; `notes`: what was left as it is."""

    node: str
    failure: str
    notes: tuple[str, ...] = ()


def plan_release(fleet: PowerFleet, reading: PowerReading, nodes: Sequence[str]) -> ReleasePlan:
    """Return what releasing nodes writes; all nodes of the fleet without any. Raises UsageError for unknown ones."""
    known = [node.name for node in fleet.tree.nodes]
    for name in nodes:
        if name not in known:
            raise UsageError(f"{name}: no such node in {fleet.file.name}{suggest_nearest(name, known)}")
    chosen = list(nodes or known)
    notes = [f"{name}: does not answer, so nothing is restored" for name in chosen if name not in reading.reports]
    notes += [
        f"{name}: has no recorded caps; it was not capped, or was released before"
        for name in nodes
        if name in reading.reports and not reading.reports[name].original_w
    ]
    writes = list_releases(reading.reports, chosen)
    budgets_w = fleet.find_budgets()
    excesses = find_release_excesses(fleet.tree, reading.bounds_w, writes, budgets_w, fleet.settings.margin)
    return ReleasePlan(writes, notes, excesses)


def release_nodes(
    fleet: PowerFleet, links: NodeLinks, reading: PowerReading, plan: ReleasePlan, takes_over: bool
) -> Iterator[NodeRelease]:
    """Release the nodes of a plan, one after another; yield what became of each.

    Raises:
        UsageError: A guard holds a node, and is not to be ended.
    """
    names = list(dict.fromkeys(each.node for each in plan.writes))
    for name in names:
        check_lease(reading.reports[name], takes_over)
    epoch, writer = 1 + max((report.epoch for report in reading.reports.values()), default=0), make_writer_name()
    for name in names:
        take = NodeRequest(1, epoch, writer, takes_over=True)
        taken = ask_nodes(links, {name: take}, ANSWER_TIMEOUT_S).get(name)
        done = None
        if taken is not None and not taken.refusal:
            request = NodeRequest(2, epoch, writer, session=taken.session, releases=True)
            done = ask_nodes(links, {name: request}, ANSWER_TIMEOUT_S).get(name)
        failure = "does not answer" if taken is None else taken.refusal
        if taken is not None and not failure:
            failure = "does not answer" if done is None else done.refusal
        notes = () if done is None else done.problems
        entry = {"node": name, "releases": True, "failure": failure, "notes": notes}
        problem = find_audit_problem(power_state_dir(fleet) / "audit.jsonl", [entry])
        yield NodeRelease(name, failure, (*notes, problem) if problem else notes)


def list_releases(reports: Mapping[str, NodeReport], nodes: Sequence[str]) -> list[DeviceRelease]:
    """Return the writes that release nodes; none of a node without a recorded cap."""
    return [
        DeviceRelease(name, device.id, device.cap_w, original_w)
        for name in nodes
        if (report := reports.get(name)) is not None and report.original_w
        for device, original_w in zip(report.devices, report.original_w, strict=True)
    ]


def find_release_excesses(
    tree: PowerTree,
    bounds_w: Sequence[Sequence[float | None]],
    releases: Sequence[DeviceRelease],
    budgets_w: Sequence[float | None],
    margin: float,
) -> list[LevelSum]:
    """Return the levels that a release brings over their budget, or further over it."""
    restored: dict[str, list[float]] = {}
    for each in releases:
        restored.setdefault(each.node, []).append(max(each.original_w, each.cap_w or 0.0))
    before = list_committed(tree, bounds_w, margin)
    caps_w = [restored.get(node.name) or bounds for node, bounds in zip(tree.nodes, bounds_w, strict=True)]
    after = list_committed(tree, caps_w, margin)
    was = {each.label: each.watts for each in find_excesses(tree, before, budgets_w)}
    return [each for each in find_excesses(tree, after, budgets_w) if each.watts > was.get(each.label, 0.0)]
