"""AMD's GPUs that can be capped, through amdsmi. Caps are in microwatts; a virtual machine may not set them."""

from collections.abc import Sequence
from typing import Any

from phalanx.fleet.power.devices import CapDevice, CapError, CapLimits
from phalanx.fleet.power.local_devices import MICROWATTS_PER_WATT
from phalanx.fleet.telemetry.json_values import read_number
from phalanx.fleet.telemetry.local_sources import import_amdsmi

PACKAGE_SENSOR = 0
"""The package power limit, the one that GPUs of data centers have."""


class AmdsmiCapDevice:
    """A GPU. `library` is the module amdsmi, initialized, or a stand-in."""

    def __init__(self, library: Any, handle: Any, index: int):
        self._smi, self._handle = library, handle
        self.id = f"amd-{index}"
        self.id = str(self._call("amdsmi_get_gpu_device_uuid"))

    def read_limits(self) -> CapLimits:
        """Read what the driver takes, and the cap that it has after a restart."""
        info = self._read_info()
        low, high, default = (self._watts(info, key) for key in ("min_power_cap", "max_power_cap", "default_power_cap"))
        return CapLimits(low, high, default)

    def read_cap_w(self) -> float:
        """Read the cap that the driver enforces."""
        return self._watts(self._read_info(), "power_cap")

    def read_draw_w(self) -> float | None:
        """Read the power: `current_socket_power` from MI300 on, `average_socket_power` before."""
        info = self._call("amdsmi_get_power_info")
        found = [read_number(info.get(key)) for key in ("current_socket_power", "average_socket_power")]
        return next((watts for watts in found if watts is not None and 0 < watts < 2**16 - 1), None)

    def read_temperature_c(self) -> float | None:
        """Read the temperature of the hottest spot."""
        return read_number(self._call("amdsmi_get_gpu_metrics_info").get("temperature_hotspot"))

    def set_cap_w(self, cap_w: float) -> None:
        """Set the cap. Only root may, and not in a virtual machine."""
        self._call("amdsmi_set_power_cap", PACKAGE_SENSOR, round(cap_w * MICROWATTS_PER_WATT))

    def _read_info(self) -> dict[str, Any]:
        return dict(self._call("amdsmi_get_power_cap_info"))

    def _watts(self, info: dict[str, Any], key: str) -> float:
        watts = read_number(info.get(key))
        if watts is None:
            raise CapError(f"amdsmi: {self.id}: the driver has no {key}, as in a virtual machine; cap it on its host")
        return watts / MICROWATTS_PER_WATT

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._smi, name)(self._handle, *arguments)
        except (self._smi.AmdSmiException, AttributeError) as error:
            raise CapError(f"amdsmi: {self.id}: {name}: {error}") from error


def open_amdsmi_devices(library: Any = None) -> Sequence[CapDevice]:
    """Return this machine's GPUs. Raises CapError where amdsmi or a GPU is missing."""
    smi = library or import_amdsmi()
    if smi is None:
        raise CapError("amdsmi: ROCm's Python package amdsmi is missing; it comes with ROCm")
    try:
        smi.amdsmi_init()
        handles = smi.amdsmi_get_processor_handles()
    except smi.AmdSmiException as error:
        raise CapError(f"amdsmi: {error}; check the driver with amd-smi") from error
    if not handles:
        raise CapError("amdsmi: the driver lists no GPU")
    return [AmdsmiCapDevice(smi, handle, index) for index, handle in enumerate(handles)]
