"""A node of the fleet: its newest reading, with power, cap and temperature margin, what its backend says, and what
Phalanx decided. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from phalanx.jobs.backends.base import BackendNode, NodeService
from phalanx.run.telemetry_minutes import NodeMinute, Rollups
from phalanx.telemetry.sample import SAMPLE_INTERVAL_S, DeviceSample, NodeSample, SlowReason, describe_slow_reasons
from phalanx_fleet.node_states import OUT_OF_SERVICE, NodeChange, NodeState
from phalanx_fleet.telemetry.service_reading import sum_of_all, take_all

LATE_AFTER_PERIODS = 3
"""Age in periods from which a reading is missing."""
UNREMARKABLE_REASONS = SlowReason.IDLE | SlowReason.APPLICATION_CLOCKS
DOWN_STATE = "down"
"""Shown for a healthy node on which its backend starts no jobs for another reason than a drain."""
NO_READING_STATE, STALE_STATE = "no reading", "stale"
"""Shown for a healthy node that was never read, or not of late: it may be anything."""
SHOWN_STATES = (*NodeState, DOWN_STATE, NO_READING_STATE, STALE_STATE)


@dataclass(frozen=True)
class LatestReading:
    """A node at `time` (seconds since the epoch). The next reading is due `period_s` later."""

    time: float
    period_s: float
    draw_w: float | None = None
    """Power at the node's power supplies where `parts` is `node`, else the sum of those parts."""
    parts: str | None = None
    """What `draw_w` covers: `node`, `CPU and accelerators`, `accelerators` or `CPU`."""
    is_estimate: bool = False
    """Whether `draw_w` has an estimated part."""
    device_draw_w: float | None = None
    """Sum of the power of the accelerators."""
    device_cap_w: float | None = None
    """Sum of the caps that they enforce."""
    margin_k: float | None = None
    """Kelvins that the hottest accelerator has up to the temperature from which it slows down."""
    num_devices: int | None = None
    """Accelerators of which these are sums."""
    slow_because: str | None = None
    """Why accelerators are slower than they could be."""
    failed_fans: float | None = None

    def is_late(self, now: float) -> bool:
        """Whether its values are missing by now: it is more than 3 periods old, or of a clock that is ahead as far."""
        return abs(now - self.time) > LATE_AFTER_PERIODS * self.period_s


def reading_from_sample(sample: NodeSample, period_s: float) -> LatestReading:
    host, devices = sample.host, sample.devices
    powers = [device.power_w for device in devices]
    draw, parts = sum_power(host.node_power_w, host.cpu_power_w, powers)
    reasons = find_slow_reasons(devices)
    return LatestReading(
        sample.time,
        period_s,
        draw,
        parts,
        is_estimate=host.cpu_power_is_estimate and parts is not None and "CPU" in parts,
        device_draw_w=sum_of_all(powers),
        device_cap_w=sum_of_all(device.power_cap_w for device in devices),
        num_devices=len(devices),
        margin_k=min_of_all(device.thermal_margin_c for device in devices),
        slow_because=describe_slow_reasons(reasons) if reasons else None,
        failed_fans=host.failed_fans,
    )


def reading_from_minute(minute: NodeMinute) -> LatestReading:
    """Return the reading of a minute: means, and the least margin."""
    host, devices = minute.host, list(minute.devices.values())
    powers = [
        _mean(device, "power_mean_w" if "power_mean_w" in device.values else "power_instant_w") for device in devices
    ]
    draw, parts = sum_power(_mean(host, "node_power_w"), _mean(host, "cpu_power_w"), powers)
    margins = (device.values.get("thermal_margin_c") for device in devices)
    return LatestReading(
        minute.time + minute.duration_s,
        minute.duration_s,
        draw,
        parts,
        is_estimate=minute.cpu_power_is_estimate and parts is not None and "CPU" in parts,
        device_draw_w=sum_of_all(powers),
        device_cap_w=sum_of_all(_mean(device, "power_cap_w") for device in devices),
        num_devices=len(devices),
        margin_k=min_of_all(None if each is None else each.min for each in margins),
        failed_fans=_mean(host, "failed_fans"),
    )


def _mean(rollups: Rollups, name: str) -> float | None:
    found = rollups.values.get(name)
    return None if found is None else found.mean


def find_slow_reasons(devices: Iterable[DeviceSample]) -> SlowReason:
    return reduce(or_, (each.slow_reasons or SlowReason(0) for each in devices), SlowReason(0)) & ~UNREMARKABLE_REASONS


def sum_power(
    node_w: float | None, cpu_w: float | None, device_powers_w: Sequence[float | None]
) -> tuple[float | None, str | None]:
    """Return watts, and what they cover."""
    if node_w is not None:
        return node_w, "node"
    devices_w = sum_of_all(device_powers_w)
    if device_powers_w and devices_w is None:
        return None, None
    if devices_w is None:
        return (None, None) if cpu_w is None else (cpu_w, "CPU")
    return (devices_w, "accelerators") if cpu_w is None else (devices_w + cpu_w, "CPU and accelerators")


def min_of_all(values: Iterable[float | None]) -> float | None:
    """Return the minimum; None without values."""
    return min(take_all(values), default=None)


@dataclass(frozen=True)
class FleetNode:
    """A node as `phalanx nodes ls` shows it."""

    name: str
    state: str
    """A NodeState, or `down`."""
    reason: str | None
    """Why it is in this state."""
    backend: BackendNode | None
    """None for a node that only a file or a run names."""
    reading: LatestReading | None
    rack: str | None = None
    """Location id of its rack, where the nodes file has it."""
    cooling: str | None = None
    """What is wrong with its cooling now."""

    def find_shown_state(self, now: float) -> str:
        """Return the state to show, one of SHOWN_STATES: of a healthy node without news that there are none."""
        if self.state != NodeState.HEALTHY or (self.reading is not None and not self.reading.is_late(now)):
            return self.state
        return NO_READING_STATE if self.reading is None else STALE_STATE


def make_fleet_node(
    name: str,
    backend: BackendNode | None,
    change: NodeChange | None,
    reading: LatestReading | None,
    rack: str | None = None,
    cooling: str | None = None,
) -> FleetNode:
    """Return a node of what is known about it. `change`: its newest one in the table of nodes."""
    state, reason = merge_state(backend, change)
    return FleetNode(name, state, reason, backend, reading, rack, cooling)


def merge_state(backend: BackendNode | None, change: NodeChange | None) -> tuple[str, str | None]:
    """Return the state of a node, and why. What the backend does counts: a node that was drained or undrained there is
    in that state, and the reason names a contradiction."""
    state = NodeState.HEALTHY if change is None else change.state
    decided = None if change is None or state is NodeState.HEALTHY else f"{change.reason} ({change.actor})"
    if backend is None:
        return state, decided
    is_out = state in OUT_OF_SERVICE
    if backend.service is NodeService.DRAINED:
        return (state, decided) if is_out else (NodeState.DRAINED, backend.reason)
    if is_out and backend.service is NodeService.OPEN:
        return state, f"{decided}; but the backend starts jobs there: it was undrained without Phalanx"
    if backend.service is NodeService.DOWN and not is_out:
        return DOWN_STATE, backend.reason or decided
    return state, decided


def merge_readings(readings: Iterable[LatestReading | None], now: float) -> LatestReading | None:
    """The newest reading, with the power at the node's supplies of another where that is not late either, and with the
    cap and margin of accelerators, and failed fans, that only another has."""
    known = sorted((each for each in readings if each is not None), key=lambda each: -each.time)
    if not known:
        return None
    newest, *others = known
    for other in others:
        if other.is_late(now) or newest.is_late(now):
            continue
        if other.parts == "node" and newest.parts != "node":
            newest = replace(newest, draw_w=other.draw_w, parts="node", is_estimate=False)
        if newest.failed_fans is None:
            newest = replace(newest, failed_fans=other.failed_fans)
        if newest.device_cap_w is None and newest.margin_k is None:
            newest = replace(
                newest,
                device_draw_w=other.device_draw_w,
                device_cap_w=other.device_cap_w,
                num_devices=other.num_devices,
                margin_k=other.margin_k,
                slow_because=other.slow_because,
            )
    return newest


def find_newest_reading(readings: Iterable[LatestReading | None]) -> LatestReading | None:
    """The newest reading; None without any."""
    return max((each for each in readings if each is not None), key=lambda reading: reading.time, default=None)


def add_samples(nodes: Iterable[FleetNode], samples: Mapping[str, NodeSample]) -> list[FleetNode]:
    """Return the nodes with the newer of both readings: their own, and that of the sample that their agent has sent."""
    return [
        node
        if (sample := samples.get(node.name)) is None or (node.reading is not None and sample.time < node.reading.time)
        else replace(node, reading=reading_from_sample(sample, SAMPLE_INTERVAL_S))
        for node in nodes
    ]
