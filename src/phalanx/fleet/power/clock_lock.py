"""Lock clocks where caps are not bounds: an A40 draws up to 1.21 times its lowest cap. A lock guarantees no watts, so
its claim is the most that a sweep measured at that clock, and the guard's margin; without a sweep it is the hardware's
maximum.

The guard asks for caps in watts. A cap is kept by the highest clock of which the measured most is no higher.
"""

from collections.abc import Sequence

from phalanx.fleet.node_control_settings import ClockEntry
from phalanx.fleet.power.devices import CapError, CapLimits
from phalanx.fleet.power.local_devices import NvmlCapDevice

CLOCK_TOLERANCE_MHZ = 20.0
"""Clocks are set in steps of 15 MHz."""


class ClockLockDevice:
    """A GPU of which the clock is locked. NVML cannot read a lock back: one of before this process is unknown, and so
    is one above which the clock was seen; both count as the hardware's maximum."""

    def __init__(self, device: NvmlCapDevice, clocks: Sequence[ClockEntry]):
        if not clocks:
            raise CapError("clock locks need `clocks`, with the most power that a sweep measured at each")
        self.id = device.id
        self._device = device
        self._points = sorted((entry.most_power, entry.clock_mhz) for entry in clocks)
        self._locked: tuple[float, float] | None = None
        """Claim and clock."""

    def read_limits(self) -> CapLimits:
        """Return the claims of the lowest clock and of none."""
        high = self._device.read_limits().max_w
        return CapLimits(min(self._points[0][0], high), high, high)

    def read_cap_w(self) -> float:
        """Return the claim of the lock that is in force."""
        most_w = self._device.read_limits().max_w
        if self._locked is None:
            return most_w
        watts, clock_mhz = self._locked
        if self._device.read_clock_mhz() > clock_mhz + CLOCK_TOLERANCE_MHZ:
            return most_w
        return min(watts, most_w)

    def read_draw_w(self) -> float | None:
        """Read the power."""
        return self._device.read_draw_w()

    def read_temperature_c(self) -> float | None:
        """Read the temperature."""
        return self._device.read_temperature_c()

    def set_cap_w(self, cap_w: float) -> None:
        """Lock the highest clock that was measured within a cap; at the hardware's maximum, end the lock."""
        if cap_w >= self._device.read_limits().max_w:
            self._locked = None
            self._device.reset_clock()
            return
        fitting = [point for point in self._points if point[0] <= cap_w]
        if not fitting:
            raise CapError(f"{self.id}: no clock was measured within {cap_w:.0f} W")
        self._locked = None
        self._device.lock_clock(max(clock for _, clock in fitting))
        self._locked = max(fitting, key=lambda point: point[1])
