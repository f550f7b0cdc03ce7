"""The newest reading of a node: power, cap and temperature margin, and how old they are. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from phalanx.fleet.telemetry.sample import NodeSample, SlowReason, describe_slow_reasons
from phalanx.run.telemetry_minutes import NodeMinute, Rollups

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
    cap_w: float | None = None
    """Sum of the caps that the accelerators enforce."""
    margin_k: float | None = None
    """Kelvins that the hottest accelerator has up to the temperature from which it slows down."""
    num_devices: int | None = None
    """Accelerators of which `cap_w` is the sum."""
    slow_because: str | None = None
    """Why accelerators are slower than they could be."""

    def is_late(self, now: float) -> bool:
        """Whether its values are missing by now: it is more than 3 periods old, or of a clock that is ahead as far."""
        return abs(now - self.time) > LATE_AFTER_PERIODS * self.period_s


def reading_from_sample(sample: NodeSample, period_s: float) -> LatestReading:
    """Return the reading of a sample."""
    host, devices = sample.host, sample.devices
    draw, parts = _sum_power(host.node_power_w, host.cpu_power_w, [device.power_w for device in devices])
    reasons = reduce(or_, (device.slow_reasons or SlowReason(0) for device in devices), SlowReason(0))
    notable = reasons & ~UNREMARKABLE_REASONS
    return LatestReading(
        sample.time,
        period_s,
        draw,
        parts,
        is_estimate=host.cpu_power_is_estimate and parts is not None and "CPU" in parts,
        cap_w=_sum_all(device.power_cap_w for device in devices),
        num_devices=len(devices),
        margin_k=_least(device.thermal_margin_c for device in devices),
        slow_because=describe_slow_reasons(notable) if notable else None,
    )


def reading_from_minute(minute: NodeMinute) -> LatestReading:
    """Return the reading of a minute: means, and the least margin."""
    host, devices = minute.host, list(minute.devices.values())
    powers = [_mean(device, _power_column(device)) for device in devices]
    draw, parts = _sum_power(_mean(host, "node_power_w"), _mean(host, "cpu_power_w"), powers)
    margins = (device.values.get("thermal_margin_c") for device in devices)
    return LatestReading(
        minute.time + minute.duration_s,
        minute.duration_s,
        draw,
        parts,
        is_estimate=minute.cpu_power_is_estimate and parts is not None and "CPU" in parts,
        cap_w=_sum_all(_mean(device, "power_cap_w") for device in devices),
        num_devices=len(devices),
        margin_k=_least(None if each is None else each.min for each in margins),
    )


def _power_column(device: Rollups) -> str:
    return "power_mean_w" if "power_mean_w" in device.values else "power_instant_w"


def _mean(rollups: Rollups, name: str) -> float | None:
    found = rollups.values.get(name)
    return None if found is None else found.mean


def _sum_power(
    node_w: float | None, cpu_w: float | None, device_powers_w: Sequence[float | None]
) -> tuple[float | None, str | None]:
    """Return watts, and what they cover. The sum of some of the accelerators would be taken for that of all: None."""
    if node_w is not None:
        return node_w, "node"
    devices_w = _sum_all(device_powers_w)
    if device_powers_w and devices_w is None:
        return None, None
    if devices_w is None:
        return (None, None) if cpu_w is None else (cpu_w, "CPU")
    return (devices_w, "accelerators") if cpu_w is None else (devices_w + cpu_w, "CPU and accelerators")


def _sum_all(values: Iterable[float | None]) -> float | None:
    """The sum; None where there is no value, or one is missing."""
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if known and len(known) == len(found) else None


def _least(values: Iterable[float | None]) -> float | None:
    """The least value; None where there is none, or one is missing: it could be the least."""
    found = list(values)
    known = [value for value in found if value is not None]
    return min(known) if known and len(known) == len(found) else None
