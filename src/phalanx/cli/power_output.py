"""Power control as text and JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.app.power import PowerFleet, PowerReading
from phalanx.fleet.power.allocation import Allocation
from phalanx.fleet.power.claims import claim_node, find_excesses
from phalanx.fleet.power.guard import GuardStatus
from phalanx.fleet.power.load_targets import find_active_budgets
from phalanx.fleet.power.plan_writes import CapWrite, plan_writes
from phalanx.fleet.power.sweep_file import SweptCap
from phalanx.formatting import format_percent
from phalanx.run.boot_clock import unix_now
from phalanx.text_table import Column, format_table

WATTS_PER_KILOWATT = 1e3
MAX_EXCESSES = 5


@dataclass(frozen=True)
class LevelRow:
    """A level; watts."""

    level: str
    depth: int
    budget_w: float | None
    claim_w: float
    draw_w: float | None
    """Of the devices that report it; None where one does not."""
    silent_nodes: int

    @property
    def headroom_w(self) -> float | None:
        """What is left of the budget."""
        return None if self.budget_w is None else self.budget_w - self.claim_w


def level_rows(fleet: PowerFleet, reading: PowerReading) -> list[LevelRow]:
    """Return the levels, each followed by all below it."""
    tree, margin = fleet.tree, fleet.settings.margin
    claims = [claim_node(n.power, b, margin) for n, b in zip(tree.nodes, reading.bounds_w, strict=True)]
    draws = [_sum_draw(reading, node.name) for node in tree.nodes]
    silent = tree.sum_by_level([float(None in bounds) for bounds in reading.bounds_w])
    unread = tree.sum_by_level([float(draw is None) for draw in draws])
    claims_w, draws_w = tree.sum_by_level(claims), tree.sum_by_level([draw or 0.0 for draw in draws])
    budgets_w = find_active_budgets(tree, fleet.targets, unix_now())
    return [
        LevelRow(
            tree.levels[index].label,
            depth,
            budgets_w[index],
            claims_w[index],
            None if unread[index] else draws_w[index],
            int(silent[index]),
        )
        for index, depth in tree.walk()
    ]


def format_levels(rows: Sequence[LevelRow]) -> list[str]:
    """Return a table."""
    columns = [Column("LEVEL"), *(Column(title, True) for title in ("BUDGET", "CLAIM", "DEVICES DRAW", "HEADROOM"))]
    return format_table(
        [*columns, Column("SILENT", True)],
        [
            (
                "  " * row.depth + row.level,
                _kilowatts(row.budget_w),
                _kilowatts(row.claim_w),
                _kilowatts(row.draw_w),
                _kilowatts(row.headroom_w),
                str(row.silent_nodes or "-"),
            )
            for row in rows
        ],
    )


def format_plan(fleet: PowerFleet, reading: PowerReading, allocation: Allocation) -> list[str]:
    """Return caps by job, with the predicted slow-down, and what claims become."""
    rows = []
    for job in fleet.jobs:
        caps = [allocation.caps_w[node][d] for node, ds in job.devices.items() for d in ds if allocation.caps_w[node]]
        speed = allocation.speeds.get(job.name)
        text = "unknown: not swept" if speed is None else format_percent(1 - speed)
        cap = f"{min(caps):.0f} W" if caps else "silent"
        rows.append((job.name, str(job.num_devices), cap, text))
    before, after = _sum_claims(fleet, reading, None), _sum_claims(fleet, reading, allocation)
    lines = format_table([Column("JOB"), Column("DEVICES", True), Column("CAP", True), Column("SLOW-DOWN")], rows)
    lines.append(f"one cap for all would be {format_percent(allocation.share_for_all)} of each device's most power")
    change = f"{_kilowatts(abs(before - after))} {'less' if after <= before else 'more'}"
    lines.append(f"claim: {_kilowatts(before)} now, {_kilowatts(after)} planned, {change}")
    writes = list_writes(fleet, reading, allocation)
    lines.append(f"{len(writes)} writes; `phalanx power apply` prints them")
    if not allocation.is_within:
        budgets_w = find_active_budgets(fleet.tree, fleet.targets, unix_now())
        for excess in find_excesses(fleet.tree, _list_claims(fleet, reading, allocation), budgets_w)[:MAX_EXCESSES]:
            lines.append(f"not safe: {excess} at the lowest caps, with silent nodes at their maximum")
    return lines


def plan_to_json(fleet: PowerFleet, reading: PowerReading, allocation: Allocation) -> dict[str, object]:
    """Return the plan as JSON values."""
    return {
        "is_within_budgets": allocation.is_within,
        "caps_w": {node.name: caps for node, caps in zip(fleet.tree.nodes, allocation.caps_w, strict=True)},
        "speeds": allocation.speeds,
        "claim_before_w": _sum_claims(fleet, reading, None),
        "claim_after_w": _sum_claims(fleet, reading, allocation),
        "writes": [
            {"node": fleet.tree.nodes[write.node].name, "caps_w": write.caps_w, "is_raise": write.is_raise}
            for write in list_writes(fleet, reading, allocation)
        ],
    }


def list_writes(fleet: PowerFleet, reading: PowerReading, allocation: Allocation) -> list[CapWrite]:
    """Return the writes of a plan, in order."""
    budgets_w = find_active_budgets(fleet.tree, fleet.targets, unix_now())
    return plan_writes(fleet.tree, reading.bounds_w, allocation.caps_w, budgets_w, fleet.settings.margin)


def format_writes(fleet: PowerFleet, writes: Sequence[CapWrite]) -> list[str]:
    """Return a line for each write."""
    return [
        f"{'raise' if write.is_raise else 'lower'} {fleet.tree.nodes[write.node].name}: "
        + ", ".join(f"{cap:.0f} W" for cap in write.caps_w)
        for write in writes
    ]


def format_status(status: GuardStatus) -> str:
    """Return a step of a guard as a line: the level with the least headroom."""
    tightest = max(status.claims, key=lambda each: each.used_share, default=None)
    text = "no level has a budget" if tightest is None else str(tightest)
    lowered = sum(not write.is_raise for write in status.writes)
    return f"{text}; {lowered} lowered, {len(status.writes) - lowered} raised, {len(status.silent_nodes)} silent"


def format_swept_cap(cap: SweptCap) -> str:
    """Return what was measured at a cap as a line."""
    draw = "no power sensor" if cap.draw_w is None else f"{cap.draw_w:.0f} W"
    steadiness = {
        True: "temperatures steady",
        False: "temperatures were not steady",
        None: "no temperature sensor",
    }[cap.is_steady]
    return f"{cap.node_type}: {cap.cap_w:.0f} W: {cap.rate:.4g} steps/s of {cap.num_steps} steps, {draw}; {steadiness}"


def _sum_draw(reading: PowerReading, node: str) -> float | None:
    report = reading.reports.get(node)
    draws = [] if report is None else [device.draw_w for device in report.devices]
    known = [draw for draw in draws if draw is not None]
    return sum(known) if known and len(known) == len(draws) else None


def _sum_claims(fleet: PowerFleet, reading: PowerReading, allocation: Allocation | None) -> float:
    return sum(_list_claims(fleet, reading, allocation))


def _list_claims(fleet: PowerFleet, reading: PowerReading, allocation: Allocation | None) -> list[float]:
    return [
        claim_node(node.power, bounds if allocation is None else allocation.caps_w[i] or bounds, fleet.settings.margin)
        for i, (node, bounds) in enumerate(zip(fleet.tree.nodes, reading.bounds_w, strict=True))
    ]


def _kilowatts(watts: float | None) -> str:
    return "-" if watts is None else f"{watts / WATTS_PER_KILOWATT:.1f} kW"
