"""What sets and reads the power cap of one device. Implementations: NVML, RAPL, and the fake fleet."""

import math
from dataclasses import dataclass
from typing import Protocol


class CapError(Exception):
    """A device does not answer, or does not take a cap; the text says which and why."""


ROUNDING_ERROR = 1e-4
"""Of a unit: what multiplication adds to a whole number."""


@dataclass(frozen=True)
class CapLimits:
    """The caps that a device takes, and the one that it has after a restart."""

    min_w: float
    max_w: float
    default_w: float


def to_device_units(cap_w: float, units_per_watt: float = 1.0) -> int:
    """Return a cap as a device takes it, rounded down: a cap that is rounded up commits more than was planned."""
    return math.floor(cap_w * units_per_watt + ROUNDING_ERROR)


class CapDevice(Protocol):
    """A device of this node that can be capped. Methods raise CapError."""

    @property
    def id(self) -> str:
        """UUID, or another name that stays the same when devices are renumbered."""

    def read_limits(self) -> CapLimits:
        """Read the caps that it takes."""

    def read_cap_w(self) -> float:
        """Read the cap that it enforces now: of all limits, also those set out of band, the lowest."""

    def read_draw_w(self) -> float | None:
        """Read its power; None where it has no sensor."""

    def read_temperature_c(self) -> float | None:
        """Read its temperature; None where it has no sensor."""

    def set_cap_w(self, cap_w: float) -> None:
        """Ask it to enforce a cap. Only reading back says whether it does."""
