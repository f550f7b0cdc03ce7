"""What power caps did to a run, and how its power rises and falls: from the minutes of its nodes, its steps, and the
sweep that is stored with it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError
from phalanx.observe.history import RunHistory, StepTable
from phalanx.run import Run
from phalanx.run.telemetry_minutes import NodeMinute, NodeMinuteTail
from phalanx.safe_files import read_json

SWEEP_FILE = "power_sweep.json"
MAX_MINUTES_BYTES = 24 << 20
"""Bytes of all nodes' minutes that are read, from their ends: to parse as much takes 2 s."""
MINUTE_S = 60.0
POWER_COLUMNS = ("power_mean_w", "power_instant_w")
CAP_STEP_W = 5.0
"""Caps that differ by less count as one: a guard that redistributes moves them by little."""


@dataclass(frozen=True)
class CapPhase:
    """The minutes of a run in which its accelerators had one cap. Means of an accelerator in W."""

    cap_w: float
    draw_w: float
    duration_s: float
    units_per_s: float
    energy_j_per_unit: float | None
    """Joules of accelerators; None where minutes of some nodes are missing."""


@dataclass(frozen=True)
class PowerSummary:
    """Power of a run's accelerators in the minutes that were read, of `num_nodes` nodes."""

    phases: tuple[CapPhase, ...]
    """By cap, the highest first; a minute with a change of caps is in none."""
    lost_s: float | None
    """Seconds that caps have cost, by the sweep; None without one."""
    saved_j: float | None
    """Joules of accelerators less than the same work without caps, by the sweep."""
    swing_w: float
    """Greatest difference of power within a minute: of readings of each second, summed over accelerators. At most this,
    since they need not fall together."""
    ramp_w_per_s: float
    """Greatest rise of the mean power from one minute to the next."""
    covered_s: float
    num_nodes: int


@dataclass(frozen=True)
class _Minute:
    """A minute of all nodes that have it. `cap_w`: None while caps change, or where they differ."""

    cap_w: float | None
    power_w: float
    swing_w: float
    num_devices: int
    num_nodes: int


@dataclass(frozen=True)
class _Sweep:
    """Steps a second and watts at each cap in ascending order, neither falling with the cap."""

    caps_w: npt.NDArray[np.float64]
    rates: npt.NDArray[np.float64]
    draws_w: npt.NDArray[np.float64]

    def speed_at(self, cap_w: float) -> float:
        return float(np.interp(cap_w, self.caps_w, self.rates) / self.rates[-1])


def summarize_power(run: Run, history: RunHistory) -> PowerSummary | None:
    """Summarize what nodes have recorded; None where no accelerator's power was."""
    minutes = _join_minutes(_read_minutes(run))
    if not minutes:
        return None
    units = _count_units(history.steps)
    phases = _find_phases(minutes, units, history.num_nodes)
    sweep = _read_sweep(run)
    lost_s = saved_j = None
    if sweep is not None:
        trained = [each for time, each in minutes.items() if each.cap_w is not None and units.get(time)]
        speeds = [sweep.speed_at(each.cap_w or 0.0) for each in trained]
        lost_s = sum(MINUTE_S * (1 - speed) for speed in speeds)
        saved_j = sum(
            MINUTE_S * (speed * float(sweep.draws_w[-1]) * each.num_devices - each.power_w)
            for speed, each in zip(speeds, trained, strict=True)
        )
    ordered = sorted(minutes.items())
    rises = [
        (after.power_w - before.power_w) / MINUTE_S
        for (first, before), (second, after) in pairwise(ordered)
        if second == first + 1 and before.num_nodes == after.num_nodes
    ]
    return PowerSummary(
        phases=tuple(phases),
        lost_s=lost_s,
        saved_j=saved_j,
        swing_w=max(each.swing_w for each in minutes.values()),
        ramp_w_per_s=max([0.0, *rises]),
        covered_s=MINUTE_S * len(minutes),
        num_nodes=max(each.num_nodes for each in minutes.values()),
    )


def _read_minutes(run: Run) -> list[NodeMinute]:
    """The last minutes of each node that has accelerators with a power."""
    paths = sorted(run.telemetry.glob("*.jsonl"))
    found: list[NodeMinute] = []
    for path in paths:
        try:
            tail = NodeMinuteTail(path, MAX_MINUTES_BYTES // len(paths))
            found += tail.read_chosen(lambda line: any(name.encode() in line for name in POWER_COLUMNS))
        except (OSError, DataError):  # no file; the run may come from a stranger
            continue
    return found


def _join_minutes(found: Sequence[NodeMinute]) -> dict[int, _Minute]:
    """The whole minutes by the number of the minute since the epoch in which their middle is: nodes begin theirs at any
    second."""
    by_time: dict[int, list[NodeMinute]] = defaultdict(list)
    for minute in found:
        if minute.duration_s > MINUTE_S / 2:
            by_time[int((minute.time + minute.duration_s / 2) // MINUTE_S)].append(minute)
    joined = {}
    for time, minutes in by_time.items():
        devices = [device for minute in minutes for device in minute.devices.values()]
        powers = [
            next((device.values[name] for name in POWER_COLUMNS if name in device.values), None) for device in devices
        ]
        known = [power for power in powers if power is not None]
        if not known or len(known) < len(powers):
            continue
        caps = [cap for device in devices if (cap := device.values.get("power_cap_w")) is not None]
        is_steady = len(caps) == len(devices) and max(c.max for c in caps) - min(c.min for c in caps) < CAP_STEP_W
        joined[time] = _Minute(
            cap_w=CAP_STEP_W * round(caps[0].mean / CAP_STEP_W) if is_steady else None,
            power_w=sum(power.mean for power in known),
            swing_w=sum(power.max - power.min for power in known),
            num_devices=len(devices),
            num_nodes=len(minutes),
        )
    return joined


def _count_units(steps: StepTable) -> dict[int, float]:
    """Tokens (or samples) by minute: those of a step in the minute in which it ended."""
    units: dict[int, float] = defaultdict(float)
    for time, count in zip(steps.time, steps.tokens, strict=True):
        if np.isfinite(time) and np.isfinite(count):
            units[int(time // MINUTE_S)] += float(count)
    return units


def _find_phases(minutes: dict[int, _Minute], units: dict[int, float], num_nodes: int) -> list[CapPhase]:
    by_cap: dict[float, list[tuple[_Minute, float]]] = defaultdict(list)
    for time, minute in minutes.items():
        if minute.cap_w is not None and units.get(time):
            by_cap[minute.cap_w].append((minute, units[time]))
    phases = []
    for cap_w, found in sorted(by_cap.items(), reverse=True):
        power_w, count = sum(minute.power_w for minute, _ in found), sum(each for _, each in found)
        is_complete = all(minute.num_nodes >= num_nodes for minute, _ in found)
        phases.append(
            CapPhase(
                cap_w=cap_w,
                draw_w=power_w / sum(minute.num_devices for minute, _ in found),
                duration_s=MINUTE_S * len(found),
                units_per_s=count / (MINUTE_S * len(found)),
                energy_j_per_unit=MINUTE_S * power_w / count if is_complete else None,
            )
        )
    return phases


def _read_sweep(run: Run) -> _Sweep | None:
    """The sweep that is stored with the run, of its first node type; None without one that can be read."""
    try:
        points = read_json(run.path / SWEEP_FILE)["caps"]
        first = points[0]["node_type"]
        rows = sorted(
            (float(each["cap_w"]), float(each["rate"]), float(each["draw_w"] or each["cap_w"]))
            for each in points
            if each["node_type"] == first
        )
    except (OSError, DataError, KeyError, TypeError, ValueError, IndexError):
        return None
    if len(rows) < 2 or min(min(row) for row in rows) <= 0:
        return None
    caps, rates, draws = np.array(rows).T
    return _Sweep(caps, np.maximum.accumulate(rates), np.maximum.accumulate(draws))
