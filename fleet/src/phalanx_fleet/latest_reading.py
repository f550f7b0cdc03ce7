"""The newest reading of a node: power, cap and temperature margin, and how old they are. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from phalanx.run.telemetry_minutes import NodeMinute, Rollups
from phalanx.telemetry.sample import DeviceSample, NodeSample, SlowReason, describe_slow_reasons

LATE_AFTER_PERIODS = 3
"""Age in periods from which a reading is missing."""
UNREMARKABLE_REASONS = SlowReason.IDLE | SlowReason.APPLICATION_CLOCKS


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


def sum_of_all(values: Iterable[float | None]) -> float | None:
    """Return the sum; None without values."""
    known = _take_all(values)
    return sum(known) if known else None


def min_of_all(values: Iterable[float | None]) -> float | None:
    """Return the minimum; None without values."""
    return min(_take_all(values), default=None)


def _take_all(values: Iterable[float | None]) -> list[float]:
    """Return the values; none where one is missing: the sum of some accelerators would be taken for that of all."""
    found = list(values)
    return [] if None in found else [value for value in found if value is not None]
