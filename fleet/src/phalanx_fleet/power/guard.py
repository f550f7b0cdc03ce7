"""Hold the budgets of a tree: one step a period, from what nodes have reported to the next orders. No clock, no
network: both are passed in.

The guarantee is the sum of caps that devices enforce. The loop on measured power corrects what caps do not bound, and
follows the rule of loops with delay: a period of at least averaging and dead time together, a gain of a quarter upwards
and a half downwards.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from phalanx.errors import UsageError
from phalanx_fleet.power.allocation import Allocation, HeldCaps, NodeCaps, NodeLimit, PoweredJob, allocate_caps
from phalanx_fleet.power.committed_power import (
    CapWrite,
    LevelSum,
    find_excesses,
    list_committed,
    plan_raises,
    plan_writes,
    sum_levels,
)
from phalanx_fleet.power.links import NodeLinks
from phalanx_fleet.power.messages import NodeReport, NodeRequest
from phalanx_fleet.power.node_keeper import READ_BACK_TOLERANCE_W
from phalanx_fleet.power_settings import PowerSettings
from phalanx_fleet.power_tree import PowerTree

MAX_REQUESTS_KEPT = 64
"""Requests of a node that may be without an answer; what is older is late, and so missing."""
LOWER_GAIN, RAISE_GAIN = 0.5, 0.25
"""Share of an error that a step corrects. At a period of averaging and dead time, 1 and more oscillates."""
HYSTERESIS_SHARE = 0.01
"""Share of a cap by which it has to change to be raised, and of a budget that measured power has to be below for a
correction to be given back."""
MAX_DRAW_SHARE = 1.5
"""Over a device's most power: short peaks of GPUs are up to a third above it."""


@dataclass
class NodeAccount:
    """What is known of a node, for the guard with `epoch` and `writer`."""

    epoch: int
    writer: str
    fresh_s: float
    next_seq: int = 1
    report: NodeReport | None = None
    reported_at: float = float("-inf")
    """When the request of the newest report was sent."""
    requests: "OrderedDict[int, tuple[float, NodeRequest]]" = field(default_factory=OrderedDict)

    def add_request(self, request: NodeRequest, now: float) -> None:
        """Remember a request before it is sent."""
        self.requests[request.seq] = now, request
        self.next_seq = request.seq + 1
        while len(self.requests) > MAX_REQUESTS_KEPT:
            self.requests.popitem(last=False)

    def add_report(self, report: NodeReport) -> bool:
        """Take a report; return whether it is newer than the last one. One that answers no request of this guard, or
        an older one than was answered, is late."""
        found = self.requests.get(report.seq)
        if found is None or (self.report is not None and report.seq <= self.report.seq):
            return False
        self.report, self.reported_at = report, found[0]
        for seq in [seq for seq in self.requests if seq < report.seq and seq not in self._orders_in_flight(report)]:
            del self.requests[seq]
        return True

    def is_owned(self) -> bool:
        """Whether this guard is the node's writer, as far as it knows."""
        return self.report is not None and (self.report.epoch, self.report.writer) == (self.epoch, self.writer)

    def is_lost(self) -> bool:
        """Whether another guard is the node's writer, by an epoch that is not below this guard's."""
        return self.report is not None and self.report.writer != self.writer and self.report.epoch >= self.epoch

    def is_fresh(self, now: float) -> bool:
        """Whether the node may be believed: it is owned, and its report is not late."""
        return self.report is not None and self.is_owned() and now - self.reported_at <= self.fresh_s

    def bound_caps(self, now: float, num_devices: int, fallback_w: Sequence[float] = ()) -> list[float | None]:
        """Return the most that each device may be enforcing; None for a silent one.

        A node of which someone else has set a cap takes no orders. Its keeper lowers each device to `fallback_w` when
        its lease has ended: from then on it counts at that; before, each device counts as silent.
        """
        report = self.report
        if report is None or not self.is_fresh(now) or len(report.devices) != num_devices:
            return [None] * num_devices
        bounds = [device.cap_w for device in report.devices]
        if report.foreign_change:
            held = list(zip(bounds, fallback_w, strict=False)) if report.lease_left_s <= 0 else []
            is_held = len(held) == num_devices and all(
                b is not None and b <= f + READ_BACK_TOLERANCE_W for b, f in held
            )
            return [f + READ_BACK_TOLERANCE_W for _, f in held] if is_held else [None] * num_devices
        for seq in self._orders_in_flight(report):
            caps = self.requests[seq][1].caps_w or ()
            bounds = [None if bound is None else max(bound, cap) for bound, cap in zip(bounds, caps, strict=True)]
        return bounds

    def _orders_in_flight(self, report: NodeReport) -> Sequence[int]:
        """Orders that the node may carry out after this report: newer than what it has seen, of the same session."""
        return [
            seq
            for seq, (_, request) in self.requests.items()
            if seq > report.newest_seq and request.caps_w is not None and request.session == report.session
        ]


class LostNodeError(UsageError):
    """Another guard has become the writer of all nodes that answer."""


@dataclass(frozen=True)
class GuardStatus:
    """A step. `committed`: power of all levels with a budget, with what may be enforced now. `measured`: the same by
    sensors. `unsafe`: levels that cannot be brought within their budget, with the reason."""

    committed: list[LevelSum]
    measured: list[LevelSum]
    writes: list[CapWrite]
    speeds: dict[str, float | None]
    silent_nodes: list[str]
    unsafe: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class GuardIdentity:
    """The authority of a guard: its name is its own, and its epoch above those before it."""

    epoch: int
    writer: str


class PowerGuard:
    """Holds the budgets of a tree.

    Args:
        tree: The levels and nodes.
        settings: Margin, lease and periods.
        identity: The epoch and the name of this guard.
        links: Carries requests and reports.
        find_jobs: Returns what runs where now.
        find_budgets: Returns the budget of each level now: that of the fleet file, or of a load target.
        fallbacks_w: Caps of each node's devices when it hears nothing, of `plan_fallbacks`.
        find_in_repair: Returns the nodes that people work on: they get no orders, and count at their maximum.
    """

    def __init__(
        self,
        tree: PowerTree,
        settings: PowerSettings,
        identity: GuardIdentity,
        links: NodeLinks,
        find_jobs: Callable[[], Sequence[PoweredJob]],
        find_budgets: Callable[[], Sequence[float | None]],
        fallbacks_w: Sequence[Sequence[float]],
        find_in_repair: Callable[[], Set[str]] = frozenset,
    ):
        self._tree, self._settings, self._links = tree, settings, links
        self._find_jobs, self._find_budgets = find_jobs, find_budgets
        self._identity = identity
        self._accounts = [NodeAccount(identity.epoch, identity.writer, settings.fresh_s) for _ in tree.nodes]
        self._by_name = {node.name: index for index, node in enumerate(tree.nodes)}
        self._corrections_w = [0.0] * len(tree.levels)
        self._last_committed_w: list[float] = []
        self._allocated: tuple[tuple[object, object, object], Allocation] | None = None
        self._fallbacks_w = fallbacks_w
        self._find_in_repair, self._in_repair = find_in_repair, find_in_repair()
        self._problems: list[str] = []
        self._has_asked = False
        self._first_step: float | None = None
        self._over_since: dict[str, float] = {}

    def receive(self) -> None:
        """Take the reports that have arrived. A node that another guard has, with a lease, is left to it; one without a
        lease, such as a node that was away, gets a new epoch."""
        for report in self._links.receive():
            index = self._by_name.get(report.node)
            if index is None:
                continue
            account = self._accounts[index]
            if not account.add_report(report):
                continue
            self._problems += [f"{report.node}: {problem}" for problem in report.problems]
            if report.refusal and account.is_owned():
                self._problems.append(f"{report.node}: {report.refusal}")
            if report.foreign_change:
                self._problems.append(
                    f"{report.node}: {report.foreign_change}; it takes no orders until a guard is started with "
                    "--take-over, and is counted at its maximum, or at its fallback once its lease has ended"
                )
            if account.is_lost() and report.lease_left_s <= 0:
                self._problems.append(f"{report.node}: had epoch {report.epoch} of {report.writer}; taken over")
                account.epoch = report.epoch + 1
            elif account.is_lost():
                self._problems.append(
                    f"{report.node}: {report.writer} has it with epoch {report.epoch} and a lease of "
                    f"{report.lease_left_s:.0f} s; counted at its maximum"
                )

    def step(self, now: float) -> GuardStatus:
        """Take reports, decide, and send orders. Call it once a period.

        Raises:
            LostNodeError: Another guard has taken over all nodes that answer.
        """
        self.receive()
        self._check_lost(now)
        self._update_repairs()
        budgets_w = list(self._find_budgets())
        bounds = self.bound_caps(now)
        limits = [_find_limit(account.report, each) for account, each in zip(self._accounts, bounds, strict=True)]
        committed_w = list_committed(self._tree, bounds, self._settings.margin)
        measured_w = self._measure_nodes(bounds)
        reduced_w = self._correct(budgets_w, committed_w, measured_w)
        allocation = self._allocate(limits, reduced_w)
        targets = [_bound_raise(each, caps) for each, caps in zip(bounds, allocation.caps_w, strict=True)]
        writes = self._choose_writes(bounds, targets, reduced_w)
        over = find_excesses(self._tree, committed_w, budgets_w)
        self._send(bounds, limits, writes, now, {each.label for each in over})
        notices, self._problems = self._problems, []
        is_known = allocation.is_within or not self._has_asked  # before the first question every node is silent
        unsafe = [] if is_known else self._describe_unsafe(allocation, bounds, budgets_w)
        unsafe += self._describe_disobedience(over, now) if not unsafe else []
        self._has_asked = True
        return GuardStatus(
            sum_levels(self._tree, committed_w, budgets_w),
            sum_levels(self._tree, measured_w, budgets_w),
            writes,
            allocation.speeds,
            [
                node.name
                for node, each in zip(self._tree.nodes, bounds, strict=True)
                if None in each and node.name not in self._in_repair
            ],
            unsafe,
            notices,
        )

    def _update_repairs(self) -> None:
        try:
            found = self._find_in_repair()
        except UsageError as error:
            self._problems.append(f"the nodes in repair are taken as they were: {error}")
            return
        self._problems += [f"{name}: in repair; counted at its maximum" for name in sorted(found - self._in_repair)]
        self._in_repair = found

    def _check_lost(self, now: float) -> None:
        self._first_step = now if self._first_step is None else self._first_step
        lost = [account.report for account in self._accounts if account.report is not None and account.is_lost()]
        if not lost or any(account.is_owned() for account in self._accounts):
            return
        if now - self._first_step > self._settings.fresh_s:  # by then every node that is there has answered
            raise LostNodeError(
                f"{lost[0].writer} has taken over {lost[0].node} with epoch {lost[0].epoch}, and no node is left; this "
                f"guard with epoch {self._identity.epoch} stops, and its leases end within {self._settings.lease_s:g} s"
            )

    def _choose_writes(
        self,
        bounds: Sequence[Sequence[float | None]],
        targets: Sequence[Sequence[float]],
        budgets_w: Sequence[float | None],
    ) -> list[CapWrite]:
        """All lowering; and raises only as far as they fit while no lowering has happened yet."""
        margin = self._settings.margin
        lowering = [w for w in plan_writes(self._tree, bounds, targets, budgets_w, margin) if not w.is_raise]
        lowered = {write.node for write in lowering}
        raises = plan_raises(self._tree, bounds, targets, budgets_w, margin)
        return [*lowering, *(write for write in raises if write.node not in lowered)]

    def bound_caps(self, now: float) -> list[list[float | None]]:
        """Return for each node the most that each device may be enforcing; None where it is silent, or in repair."""
        return [
            [None] * node.power.num_devices
            if node.name in self._in_repair
            else account.bound_caps(now, node.power.num_devices, fallback_w)
            for account, node, fallback_w in zip(self._accounts, self._tree.nodes, self._fallbacks_w, strict=True)
        ]

    def _allocate(self, limits: Sequence[NodeLimit], budgets_w: Sequence[float | None]) -> Allocation:
        """Caps within the budgets."""
        jobs, settings = self._find_jobs(), self._settings
        if self._allocated is not None and self._allocated[0] == (limits, budgets_w, jobs):
            return self._allocated[1]
        allocation = allocate_caps(self._tree, limits, jobs, budgets_w, settings.margin, settings.min_cap_share)
        self._allocated = (limits, budgets_w, jobs), allocation
        return allocation

    def _correct(
        self, budgets_w: Sequence[float | None], committed_w: Sequence[float], measured_w: Sequence[float]
    ) -> list[float | None]:
        """Return the budgets less what caps do not bound: the integral of what is measured above both the budget and
        the committed power, of this step and of the last one, since power follows a cap late."""
        levels_w = self._tree.sum_by_level(committed_w)
        explained_w = [max(each) for each in zip(levels_w, self._last_committed_w or levels_w, strict=True)]
        self._last_committed_w = levels_w
        reduced: list[float | None] = []
        for index, (budget, watts) in enumerate(zip(budgets_w, self._tree.sum_by_level(measured_w), strict=True)):
            if budget is None:
                reduced.append(None)
                continue
            over_w = watts - max(budget, explained_w[index])
            below_w = budget * (1 - HYSTERESIS_SHARE) - watts
            if over_w > 0:
                self._corrections_w[index] += LOWER_GAIN * over_w
            elif below_w > 0:
                self._corrections_w[index] = max(0.0, self._corrections_w[index] - RAISE_GAIN * below_w)
            reduced.append(budget - self._corrections_w[index])
        return reduced

    def _measure_nodes(self, bounds: Sequence[Sequence[float | None]]) -> list[float]:
        """Watts by sensors, with the committed power where a device has none or is silent, and all else in a node at
        its most. What no such device draws is no measurement: the others would have to make way for it."""
        found = []
        for node, account, each in zip(self._tree.nodes, self._accounts, bounds, strict=True):
            margin, power = 1 + self._settings.margin, node.power
            draws = [None] * len(each) if account.report is None else [d.draw_w for d in account.report.devices]
            if len(draws) != len(each):
                draws = [None] * len(each)
            found.append(
                power.rest_max_w
                + sum(
                    power.device_max_w * margin
                    if bound is None
                    else draw
                    if draw is not None and 0 <= draw <= MAX_DRAW_SHARE * power.device_max_w
                    else bound * margin
                    for bound, draw in zip(each, draws, strict=True)
                )
            )
        return found

    def _send(
        self,
        bounds: Sequence[Sequence[float | None]],
        limits: Sequence[NodeLimit],
        writes: Sequence[CapWrite],
        now: float,
        over: Set[str],
    ) -> None:
        """Send each node one request: its new caps, else its caps again, which renews the lease; a node that is silent
        is asked to take this guard as its writer and to report. While a level is over its budget (`over`: their
        labels) no lease below it is renewed."""
        orders = {write.node: write.caps_w for write in writes}
        for index, (node, account, each) in enumerate(zip(self._tree.nodes, self._accounts, bounds, strict=True)):
            known, limit = [bound for bound in each if bound is not None], limits[index]
            renews = over.isdisjoint(self._tree.levels[level].label for level in self._tree.list_above(index))
            caps = orders.get(index) or (tuple(known) if renews and len(known) == len(each) else None)
            is_order = isinstance(limit, NodeCaps) and caps is not None and account.is_owned()
            request = NodeRequest(
                account.next_seq,
                account.epoch,
                account.writer,
                takes_over=not account.is_owned(),
                session="" if account.report is None else account.report.session,
                caps_w=caps if is_order else None,
                fallback_w=_clip(self._fallbacks_w[index], limit) if is_order and isinstance(limit, NodeCaps) else None,
                lease_s=self._settings.lease_s,
            )
            account.add_request(request, now)
            self._links.send(node.name, request)

    def _describe_disobedience(self, excesses: Sequence[LevelSum], now: float) -> list[str]:
        """Levels that stay over their budget although their nodes were asked to lower: lost rights, or a device that
        does not follow."""
        self._over_since = {each.label: self._over_since.get(each.label, now) for each in excesses}
        return [
            f"{each} for {now - self._over_since[each.label]:.0f} s: caps are not lowered as asked"
            for each in excesses
            if each.excess_w > READ_BACK_TOLERANCE_W and now - self._over_since[each.label] > self._settings.fresh_s
        ]

    def _describe_unsafe(
        self,
        allocation: Allocation,
        bounds: Sequence[Sequence[float | None]],
        budgets_w: Sequence[float | None],
    ) -> list[str]:
        lowest = [caps or each for caps, each in zip(allocation.caps_w, bounds, strict=True)]
        lowest_w = list_committed(self._tree, lowest, self._settings.margin)
        return [
            f"{each} at the lowest caps, with silent nodes at their maximum"
            for each in find_excesses(self._tree, lowest_w, budgets_w)
        ]


def group_by_rack(tree: PowerTree) -> list[PoweredJob]:
    """Return a job for all devices of each rack: what runs there when no job is known."""
    devices: dict[int, dict[int, tuple[int, ...]]] = {}
    for index, node in enumerate(tree.nodes):
        devices.setdefault(node.rack, {})[index] = tuple(range(node.power.num_devices))
    return [PoweredJob(tree.levels[rack].label, each) for rack, each in devices.items()]


def plan_fallbacks(
    tree: PowerTree, budgets_w: Sequence[float | None], settings: PowerSettings
) -> tuple[list[tuple[float, ...]], bool]:
    """Return the caps that nodes fall back to, and whether they fit: one share of each device's most power for all
    below the tightest level, and so on."""
    limits = [
        NodeCaps(
            node.power.device_min_cap_w or settings.min_cap_share * node.power.device_max_w,
            node.power.device_max_w,
            node.power.num_devices,
        )
        for node in tree.nodes
    ]
    found = allocate_caps(tree, limits, group_by_rack(tree), budgets_w, settings.margin, settings.min_cap_share)
    return [tuple(caps) for caps in found.caps_w], found.is_within


def _find_limit(report: NodeReport | None, bounds: Sequence[float | None]) -> NodeLimit:
    if report is None or None in bounds:
        return None
    if report.foreign_change:
        return HeldCaps(tuple(bound for bound in bounds if bound is not None))
    return find_node_caps(report)


def find_node_caps(report: NodeReport) -> NodeCaps:
    """Return the caps that all devices of a node take."""
    devices = report.devices
    return NodeCaps(max(each.min_w for each in devices), min(each.max_w for each in devices), len(devices))


def _clip(caps_w: Sequence[float], limits: NodeCaps) -> tuple[float, ...]:
    return tuple(min(max(cap, limits.min_w), limits.max_w) for cap in caps_w)


def _bound_raise(bounds: Sequence[float | None], targets: Sequence[float]) -> list[float]:
    """Go down at once, and up by a share of the way; not at all for a small step."""
    result: list[float] = []
    for bound, target in zip(bounds, targets, strict=False):
        if bound is None:
            return []
        step, least = target - bound, HYSTERESIS_SHARE * target
        result.append(target if step <= 0 else bound if step < least else bound + max(RAISE_GAIN * step, least))
    return result
