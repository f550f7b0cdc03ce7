"""Power control as text and JSON."""

from collections.abc import Sequence

from phalanx.formatting import format_percent
from phalanx.text_table import Column, format_table
from phalanx_fleet.power.allocation import Allocation
from phalanx_fleet.power.committed_power import (
    CapWrite,
    LevelReading,
    find_committed_w,
    find_excesses,
    list_committed,
    list_levels,
    plan_writes,
)
from phalanx_fleet.power.control import PowerFleet, PowerReading
from phalanx_fleet.power.guard import GuardStatus
from phalanx_fleet.power.speed_curve import SweptCap
from phalanx_fleet.power_tree import PoweredNode

WATTS_PER_KILOWATT = 1e3
MAX_EXCESSES = 5


def list_level_rows(fleet: PowerFleet, reading: PowerReading) -> list[LevelReading]:
    """Return the levels, each followed by all below it."""
    nodes = []
    for node, bounds in zip(fleet.tree.nodes, reading.bounds_w, strict=True):
        draw_w, committed_w = _find_draw(reading, node), find_committed_w(node.power, bounds, fleet.settings.margin)
        is_read, is_silent = int(draw_w is not None), int(None in bounds)
        nodes.append(LevelReading(node.name, committed_w, draw_w or 0.0, is_read, is_silent))
    found = list_levels(fleet.tree, nodes, fleet.find_budgets())
    return [each for each in found if not each.node]


def format_levels(rows: Sequence[LevelReading]) -> list[str]:
    """Return a table. The draw of a level is missing where a device does not report it."""
    columns = [
        Column("LEVEL"),
        *(Column(title, True) for title in ("BUDGET", "COMMITTED", "DRAW", "HEADROOM", "SILENT")),
    ]
    return format_table(
        columns,
        [
            (
                "  " * row.depth + row.label,
                _kilowatts(row.budget_w),
                _kilowatts(row.committed_w),
                _kilowatts(_find_level_draw(row)),
                _kilowatts(row.headroom_w),
                str(row.num_silent or "-"),
            )
            for row in rows
        ],
    )


def _find_level_draw(row: LevelReading) -> float | None:
    return row.draw_w if row.num_read == row.num_nodes else None


def format_plan(fleet: PowerFleet, reading: PowerReading, allocation: Allocation) -> list[str]:
    """Return caps by job, with the predicted slow-down, and what is committed then."""
    rows = []
    for job in fleet.jobs:
        caps = [allocation.caps_w[node][d] for node, ds in job.devices.items() for d in ds if allocation.caps_w[node]]
        speed = allocation.speeds.get(job.name)
        text = "unknown: not swept" if speed is None else format_percent(1 - speed)
        cap = f"{min(caps):.0f} W" if caps else "silent"
        rows.append((job.name, str(job.num_devices), cap, text))
    before, after = _sum_committed(fleet, reading, None), _sum_committed(fleet, reading, allocation)
    lines = format_table([Column("JOB"), Column("DEVICES", True), Column("CAP", True), Column("SLOW-DOWN")], rows)
    lines.append(f"one cap for all would be {format_percent(allocation.share_for_all)} of each device's most power")
    change = f"{_kilowatts(abs(before - after))} {'less' if after <= before else 'more'}"
    lines.append(f"committed: {_kilowatts(before)} now, {_kilowatts(after)} planned, {change}")
    writes = list_writes(fleet, reading, allocation)
    lines.append(f"{len(writes)} writes; `phalanx power guard --once` prints them")
    if not allocation.is_within:
        budgets_w = fleet.find_budgets()
        for excess in find_excesses(fleet.tree, _list_committed(fleet, reading, allocation), budgets_w)[:MAX_EXCESSES]:
            lines.append(f"not safe: {excess} at the lowest caps, with silent nodes at their maximum")
    return lines


def plan_to_json(fleet: PowerFleet, reading: PowerReading, allocation: Allocation) -> dict[str, object]:
    """Return the levels as they are, and the plan, as JSON values."""
    return {
        "levels": [
            {
                "level": row.label,
                "budget_w": row.budget_w,
                "committed_w": row.committed_w,
                "draw_w": _find_level_draw(row),
                "headroom_w": row.headroom_w,
                "num_silent_nodes": row.num_silent,
            }
            for row in list_level_rows(fleet, reading)
        ],
        "notices": reading.notices,
        "is_within_budgets": allocation.is_within,
        "caps_w": {node.name: caps for node, caps in zip(fleet.tree.nodes, allocation.caps_w, strict=True)},
        "speeds": allocation.speeds,
        "committed_before_w": _sum_committed(fleet, reading, None),
        "committed_after_w": _sum_committed(fleet, reading, allocation),
        "writes": [
            {"node": fleet.tree.nodes[write.node].name, "caps_w": write.caps_w, "is_raise": write.is_raise}
            for write in list_writes(fleet, reading, allocation)
        ],
    }


def list_writes(fleet: PowerFleet, reading: PowerReading, allocation: Allocation) -> list[CapWrite]:
    """Return the writes of a plan, in order."""
    budgets_w = fleet.find_budgets()
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
    tightest = max(status.committed, key=lambda each: each.used_share, default=None)
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


def _find_draw(reading: PowerReading, node: PoweredNode) -> float | None:
    report = reading.reports.get(node.name)
    draws = [] if report is None else [device.draw_w for device in report.devices]
    known = [draw for draw in draws if draw is not None]
    return sum(known) + node.power.rest_max_w if known and len(known) == len(draws) else None


def _sum_committed(fleet: PowerFleet, reading: PowerReading, allocation: Allocation | None) -> float:
    return sum(_list_committed(fleet, reading, allocation))


def _list_committed(fleet: PowerFleet, reading: PowerReading, allocation: Allocation | None) -> list[float]:
    planned: Sequence[Sequence[float | None]] = reading.bounds_w if allocation is None else allocation.caps_w
    caps_w = [caps or bounds for caps, bounds in zip(planned, reading.bounds_w, strict=True)]
    return list_committed(fleet.tree, caps_w, fleet.settings.margin)


def _kilowatts(watts: float | None) -> str:
    return "-" if watts is None else f"{watts / WATTS_PER_KILOWATT:.1f} kW"
