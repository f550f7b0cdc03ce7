"""The values of a node as a whole, from those of its parts. Pure."""

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_

from phalanx.telemetry.sample import DeviceSample, SlowReason

UNREMARKABLE_REASONS = SlowReason.IDLE | SlowReason.APPLICATION_CLOCKS


def find_slow_reasons(devices: Iterable[DeviceSample]) -> SlowReason:
    """Return why accelerators are slower than they could be."""
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
