"""Devices that may be capped within a range only, and only some of them: the allow list of a node."""

from collections.abc import Sequence

from phalanx.fleet.node_control_settings import CapDeviceSettings
from phalanx.fleet.power.devices import CapDevice, CapError, CapLimits


class RangedCapDevice:
    """A device of which the caps are narrowed to a range."""

    def __init__(self, device: CapDevice, min_w: float | None, max_w: float | None):
        self.id = device.id
        self._device, self._min_w, self._max_w = device, min_w, max_w

    def read_limits(self) -> CapLimits:
        """Read the caps that the device takes and the range allows."""
        limits = self._device.read_limits()
        low = max(limits.min_w, self._min_w or 0.0)
        high = limits.max_w if self._max_w is None else min(limits.max_w, self._max_w)
        if low > high:
            raise CapError(
                f"{self.id} takes caps from {limits.min_w:g} to {limits.max_w:g} W; min_cap and max_cap allow none"
            )
        return CapLimits(low, high, limits.default_w)

    def read_cap_w(self) -> float:
        """Read the enforced cap."""
        return self._device.read_cap_w()

    def read_draw_w(self) -> float | None:
        """Read the power."""
        return self._device.read_draw_w()

    def read_temperature_c(self) -> float | None:
        """Read the temperature."""
        return self._device.read_temperature_c()

    def set_cap_w(self, cap_w: float) -> None:
        """Set a cap; the keeper has compared it with the limits, and restores caps that were outside of them."""
        self._device.set_cap_w(cap_w)


def select_devices(devices: Sequence[CapDevice], settings: CapDeviceSettings) -> Sequence[CapDevice]:
    """Return the devices of the allow list, each within its range. Raises CapError for one that is not there."""
    known = {device.id: device for device in devices}
    if settings.ids is not None and (missing := [id for id in settings.ids if id not in known]):
        raise CapError(f"{missing[0]}: no such device; there are {', '.join(known) or 'none'}")
    chosen = devices if settings.ids is None else [known[id] for id in settings.ids]
    if settings.min_cap is None and settings.max_cap is None:
        return chosen
    return [RangedCapDevice(device, settings.min_cap, settings.max_cap) for device in chosen]
