"""Divide the budgets of a tree into caps. Pure.

All devices of a synchronous job get caps at which they are equally slow, since the slowest one sets the pace. Jobs that
were swept get watts where their own curves gain most speed per watt; jobs that were not swept keep the one cap that all
devices could have, so that nothing is lost by a guess.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from phalanx_fleet.power.committed_power import TOLERANCE_W
from phalanx_fleet.power.speed_curve import SpeedCurve
from phalanx_fleet.power_tree import PowerTree

SPEED_STEPS = 64
"""Steps between the lowest and the highest speed of a job."""
Watts = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PoweredJob:
    """A synchronous job. `devices`: for each node (its index in the tree) how many of its devices, or which.
    `curves`: by node type; without one for each type of its nodes the job is not swept. `priority`: a job of a higher
    one is slowed down later."""

    name: str
    devices: Mapping[int, tuple[int, ...]]
    curves: Mapping[str, SpeedCurve] = field(default_factory=dict)
    priority: int = 0

    @property
    def num_devices(self) -> int:
        return sum(len(each) for each in self.devices.values())


@dataclass(frozen=True)
class NodeCaps:
    """What a node's devices may be set to."""

    min_w: float
    max_w: float
    num_devices: int


@dataclass(frozen=True)
class HeldCaps:
    """What the devices of a node enforce that takes no orders."""

    caps_w: tuple[float, ...]


NodeLimit = NodeCaps | HeldCaps | None
"""None for a node without news, which is counted at its most power."""


@dataclass(frozen=True)
class Allocation:
    """Caps by node type of each group of devices. `speeds`: predicted share of the full speed by job; None where no
    curve says it. `is_within`: whether all budgets hold."""

    caps_w: list[list[float]]
    """For each node, for each device."""
    speeds: dict[str, float | None]
    is_within: bool
    share_for_all: float
    """Largest share of each device's most power that all devices below the tightest level could have."""


class _Group:
    """The devices of a job that can be set. `counts`: how many of each node."""

    def __init__(self, job: PoweredJob, counts: Mapping[int, int], tree: PowerTree, margin: float):
        self.job = job
        self.types = sorted({tree.nodes[node].type_name for node in counts})
        self.watts_per_cap: dict[str, Watts] = {name: np.zeros(len(tree.levels)) for name in self.types}
        for node, count in counts.items():
            self.watts_per_cap[tree.nodes[node].type_name][tree.list_above(node)] += count * (1 + margin)
        self.num_devices = sum(counts.values())
        self.max_caps_w: dict[str, float] = {}
        self.min_caps_w: dict[str, float] = {}
        self.settable_w: dict[str, float] = {}
        """Lowest caps without `min_cap_share`."""

    def watts(self, caps_w: Mapping[str, float]) -> Watts:
        """The committed power of each level."""
        total: Watts = np.sum([self.watts_per_cap[name] * caps_w[name] for name in self.types], axis=0)
        return total

    def is_swept(self) -> bool:
        """Whether the job has a curve for each type of its nodes."""
        return all(name in self.job.curves for name in self.types)

    def speed_at(self, caps_w: Mapping[str, float]) -> float:
        """The share of the full speed of a job that is swept."""
        return min(self.job.curves[name].speed_at(cap) for name, cap in caps_w.items())

    def share_caps(self, share: float) -> dict[str, float]:
        """Caps at a share of each device's most power."""
        return {
            name: min(max(share * self.max_caps_w[name], self.min_caps_w[name]), self.max_caps_w[name])
            for name in self.types
        }


@dataclass
class _Problem:
    groups: list[_Group]
    fixed_w: Watts
    budgets_w: Watts

    def find_over(self, caps: Sequence[Mapping[str, float]]) -> npt.NDArray[np.bool_]:
        """Levels that are over their budget at caps of each group."""
        over: npt.NDArray[np.bool_] = self.sum_watts(caps) > self.budgets_w + TOLERANCE_W
        return over

    def sum_watts(self, caps: Sequence[Mapping[str, float]]) -> Watts:
        """The committed power of each level at caps of each group."""
        return sum((g.watts(each) for g, each in zip(self.groups, caps, strict=True)), self.fixed_w)

    def loosen(self) -> None:
        """Let the groups below levels that do not hold at the lowest caps have the lowest settable ones. A level that
        does not hold with these either lowers nothing outside of it: it counts as full."""
        tight = self.find_over([group.min_caps_w for group in self.groups])
        for group in self.groups:
            if _touches(group, tight):
                group.min_caps_w = group.settable_w
        self.budgets_w = np.maximum(self.budgets_w, self.sum_watts([group.min_caps_w for group in self.groups]))


def allocate_caps(
    tree: PowerTree,
    limits: Sequence[NodeLimit],
    jobs: Sequence[PoweredJob],
    budgets_w: Sequence[float | None],
    margin: float,
    min_cap_share: float,
) -> Allocation:
    """Return caps for all devices that can be set.

    Args:
        tree: The levels and nodes.
        limits: For each node its devices' limits.
        jobs: What runs where. Devices without a job stay at the lowest cap.
        budgets_w: For each level.
        margin: Share by which a device may exceed its cap.
        min_cap_share: Lowest cap of devices without a sweep, as a share of their most power; below levels that do not
            hold with it the lowest settable cap.
    """
    problem = _build_problem(tree, limits, jobs, budgets_w, margin, min_cap_share)
    asked_w = problem.budgets_w
    problem.loosen()
    shares, share_for_all = _fill_equally(problem)
    equal = [group.share_caps(share) for group, share in zip(problem.groups, shares, strict=True)]
    chosen = _exchange(problem, equal)
    is_within = bool(np.all(problem.sum_watts(chosen) <= asked_w + TOLERANCE_W))
    speeds: dict[str, float | None] = {}
    caps_w = [[limit.min_w] * limit.num_devices if isinstance(limit, NodeCaps) else [] for limit in limits]
    for group, caps in zip(problem.groups, chosen, strict=True):
        speeds[group.job.name] = group.speed_at(caps) if group.is_swept() else None
        for node, devices in group.job.devices.items():
            for device in devices if isinstance(limits[node], NodeCaps) else ():
                caps_w[node][device] = caps[tree.nodes[node].type_name]
    return Allocation(caps_w, speeds, is_within, share_for_all)


def _build_problem(
    tree: PowerTree,
    limits: Sequence[NodeLimit],
    jobs: Sequence[PoweredJob],
    budgets_w: Sequence[float | None],
    margin: float,
    min_cap_share: float,
) -> _Problem:
    """The parameters are those of `allocate_caps`."""
    busy = [{device for job in jobs for device in job.devices.get(node, ())} for node in range(len(tree.nodes))]
    fixed: list[float] = []
    for node, limit in zip(tree.nodes, limits, strict=True):
        power, taken = node.power, len(busy[len(fixed)])
        if limit is None:
            fixed.append(power.rest_max_w + power.num_devices * power.device_max_w * (1 + margin))
        elif isinstance(limit, HeldCaps):
            fixed.append(power.rest_max_w + sum(limit.caps_w) * (1 + margin))
        else:
            fixed.append(power.rest_max_w + (limit.num_devices - taken) * limit.min_w * (1 + margin))
    groups = []
    for job in jobs:
        counts = {node: len(devices) for node, devices in job.devices.items() if isinstance(limits[node], NodeCaps)}
        if not counts:
            continue
        group = _Group(job, counts, tree, margin)
        for name in group.types:
            nodes = [node for node in counts if tree.nodes[node].type_name == name]
            found = [limit for node in nodes if isinstance(limit := limits[node], NodeCaps)]
            lowest, highest = max(each.min_w for each in found), min(each.max_w for each in found)
            curve = job.curves.get(name)
            obeyed_w = 0.0 if curve is None else curve.lowest_obeyed_cap(margin)
            floor_w = min_cap_share * highest if curve is None else obeyed_w
            group.max_caps_w[name] = highest
            group.min_caps_w[name] = min(max(lowest, floor_w), highest)
            group.settable_w[name] = min(max(lowest, obeyed_w), highest)
        groups.append(group)
    budgets = np.array([np.inf if each is None else each for each in budgets_w])
    return _Problem(groups, np.array(tree.sum_by_level(fixed)), budgets)


def _fill_equally(problem: _Problem) -> tuple[list[float], float]:
    """Raise one share for all groups until a level is full, then that of the groups that are not below it, and so on.
    Return the share of each group, and the first one."""
    num = len(problem.groups)
    types = sorted({name for group in problem.groups for name in group.types})
    none = np.zeros(len(problem.budgets_w))
    slopes = [np.array([g.watts_per_cap.get(name, none) for g in problem.groups]) for name in types]
    lowest, highest = (
        [np.array([getattr(g, which).get(name, 0.0) for g in problem.groups]) for name in types]
        for which in ("min_caps_w", "max_caps_w")
    )
    shares, is_open = np.zeros(num), np.ones(num, dtype=bool)
    first: float | None = None

    headroom_w = problem.budgets_w - problem.fixed_w
    with np.errstate(divide="ignore", invalid="ignore"):
        starts = [np.nan_to_num(low / high) for low, high in zip(lowest, highest, strict=True)]
    kinks = np.unique(np.clip(np.concatenate([[0.0, 1.0], *starts]), 0.0, 1.0))

    def use_at(share: float) -> Watts:
        each = np.where(is_open, share, shares)
        used = none
        for low, high, slope in zip(lowest, highest, slopes, strict=True):
            used = used + np.minimum(np.maximum(each * high, low), high) @ slope
        return used

    while is_open.any():
        share = _find_share(use_at, kinks, headroom_w)
        first = share if first is None else first
        shares[is_open] = share
        if share >= 1.0:
            break
        over = use_at(share + 1e-6) > headroom_w
        closed = [i for i in np.flatnonzero(is_open) if _touches(problem.groups[i], over)]
        is_open[closed or range(num)] = False
    return [float(each) for each in shares], 1.0 if first is None else first


def _touches(group: _Group, levels: npt.NDArray[np.bool_]) -> bool:
    return any(bool(np.any(watts[levels] > 0)) for watts in group.watts_per_cap.values())


def _find_share(use_at: Callable[[float], Watts], kinks: Watts, headroom_w: Watts) -> float:
    """Return the largest share from 0 to 1 at which every level has headroom, which all have at 0. What is used is a
    straight line between `kinks`, ascending from 0 to 1."""
    limit_w = headroom_w + TOLERANCE_W
    low, high = 0, len(kinks) - 1
    if (use_at(1.0) <= limit_w).all():
        return 1.0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if (use_at(float(kinks[middle])) <= limit_w).all() else (low, middle)
    below_w, above_w = use_at(float(kinks[low])), use_at(float(kinks[high]))
    rises = above_w > limit_w
    parts = (headroom_w[rises] - below_w[rises]) / (above_w[rises] - below_w[rises])
    return float(kinks[low] + max(0.0, float(parts.min())) * (kinks[high] - kinks[low]))


def _exchange(problem: _Problem, equal: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return caps at which swept jobs have exchanged watts; `equal` where that does not predict more speed."""
    swept = [index for index, group in enumerate(problem.groups) if group.is_swept()]
    if not swept:
        return equal
    ladders = {index: _list_rungs(problem.groups[index]) for index in swept}
    position = dict.fromkeys(swept, 0)
    used = problem.sum_watts([ladders[i][0].caps_w if i in ladders else caps for i, caps in enumerate(equal)])
    if np.any(used > problem.budgets_w + TOLERANCE_W):
        return equal
    priorities = sorted({problem.groups[index].job.priority for index in swept}, reverse=True)
    for priority in priorities:
        members = [index for index in swept if problem.groups[index].job.priority == priority]
        used = _climb(problem, members, ladders, position, used)
    chosen = [ladders[i][position[i]].caps_w if i in position else caps for i, caps in enumerate(equal)]
    if len(priorities) > 1 or _mean_speed(problem, swept, chosen) > _mean_speed(problem, swept, equal):
        return chosen
    return equal


@dataclass(frozen=True)
class _Rung:
    """A speed of a job, its caps there, and what it commits of each level."""

    speed: float
    caps_w: dict[str, float]
    watts: Watts


def _list_rungs(group: _Group) -> list[_Rung]:
    """Speeds of a job, lowest first; only those from which no later one gains more per watt."""
    start = group.min_caps_w
    curves = {name: group.job.curves[name] for name in group.types}
    measured = {speed for curve in curves.values() for speed in curve.speeds}
    wanted = np.array(sorted({*np.linspace(group.speed_at(start), 1.0, SPEED_STEPS + 1), *measured}))
    caps = {name: np.clip(each.find_caps(wanted), start[name], group.max_caps_w[name]) for name, each in curves.items()}
    speeds = np.min([np.interp(caps[name], each.caps_w, each.speeds) for name, each in curves.items()], axis=0)
    watts = sum((np.outer(caps[name], group.watts_per_cap[name]) for name in caps), np.zeros(()))
    most_w = watts.max(axis=1).tolist()
    hull: list[int] = []
    points = list(zip(speeds.tolist(), most_w, strict=True))
    for index, point in enumerate(points):
        if hull and point[0] <= points[hull[-1]][0] + 1e-12:
            continue
        while len(hull) > 1 and _gain(points[hull[-2]], points[hull[-1]]) < _gain(points[hull[-1]], point) * (1 - 1e-9):
            hull.pop()
        hull.append(index)
    listed = {name: each.tolist() for name, each in caps.items()}
    return [_Rung(points[i][0], {name: each[i] for name, each in listed.items()}, watts[i]) for i in hull]


def _gain(first: tuple[float, float], second: tuple[float, float]) -> float:
    """Speed per watt from one point of speed and watts to the next."""
    more_w = second[1] - first[1]
    return (second[0] - first[0]) / more_w if more_w > 0 else np.inf


def _climb(
    problem: _Problem,
    members: Sequence[int],
    ladders: Mapping[int, list[_Rung]],
    position: dict[int, int],
    used: Watts,
) -> Watts:
    """Move up the job with the greatest gain per watt, weighted by its devices, until none fits: the last step of each
    is as large as the budgets bear. Return the watts."""

    def push(index: int) -> None:
        rungs, at = ladders[index], position[index]
        if at + 1 < len(rungs):
            more_w = max(float(np.max(rungs[at + 1].watts - rungs[at].watts)), 1e-9)
            gain = (rungs[at + 1].speed - rungs[at].speed) * problem.groups[index].num_devices / more_w
            heapq.heappush(heap, (-gain, index))

    heap: list[tuple[float, int]] = []
    for index in members:
        push(index)
    limit = problem.budgets_w + TOLERANCE_W
    while heap:
        index = heapq.heappop(heap)[1]
        rungs, at = ladders[index], position[index]
        after = used + (rungs[at + 1].watts - rungs[at].watts)
        if (after <= limit).all():
            used, position[index] = after, at + 1
            push(index)
        elif (part := _find_part(problem.budgets_w - used, after - used)) > 0:
            rungs.insert(at + 1, _divide(rungs[at], rungs[at + 1], part))
            used, position[index] = used + (rungs[at + 1].watts - rungs[at].watts), at + 1
    return used


def _find_part(left_w: Watts, more_w: Watts) -> float:
    """Return the largest part of `more_w` that no level lacks."""
    return float(max(0.0, np.min(left_w[more_w > 0] / more_w[more_w > 0])))


def _divide(low: _Rung, high: _Rung, part: float) -> _Rung:
    """Return what is between two rungs: speed, caps and watts are straight lines."""
    caps_w = {name: cap_w + part * (high.caps_w[name] - cap_w) for name, cap_w in low.caps_w.items()}
    return _Rung(low.speed + part * (high.speed - low.speed), caps_w, low.watts + part * (high.watts - low.watts))


def _mean_speed(problem: _Problem, members: Sequence[int], caps: Sequence[Mapping[str, float]]) -> float:
    weights = [problem.groups[index].num_devices for index in members]
    return float(np.average([problem.groups[index].speed_at(caps[index]) for index in members], weights=weights))
