"""Open what of a node is capped, as its settings say."""

from collections.abc import Sequence

from phalanx.fleet.node_control_settings import CapDeviceSettings
from phalanx.fleet.power.amd_devices import open_amdsmi_devices
from phalanx.fleet.power.clock_lock import ClockLockDevice
from phalanx.fleet.power.device_range import select_devices
from phalanx.fleet.power.devices import CapDevice, CapError
from phalanx.fleet.power.local_devices import find_rapl_devices, open_nvml_devices
from phalanx.fleet.power.redfish_limit import open_redfish_device
from phalanx.fleet.power.timed_device import TimedDevice
from phalanx.fleet.telemetry.redfish import RedfishOptions


def open_cap_devices(settings: CapDeviceSettings, node: str) -> Sequence[CapDevice]:
    """Return the devices of this machine that may be capped. Raises CapError where one is missing."""
    devices = select_devices(_open_all(settings, node), settings)
    return devices if settings.kind == "redfish" else [TimedDevice(device) for device in devices]


def _open_all(settings: CapDeviceSettings, node: str) -> Sequence[CapDevice]:
    if settings.kind == "redfish":
        if settings.redfish is None:
            raise CapError("devices of kind redfish need `redfish: {url: ...}`")
        fields = settings.redfish.model_dump() | {"url": settings.redfish.url.replace("{node}", node)}
        return [open_redfish_device(RedfishOptions(**fields), settings.max_cap)]
    if settings.kind == "amdsmi":
        return open_amdsmi_devices()
    if settings.kind == "rapl":
        found = find_rapl_devices(settings.root)
        if not found:
            raise CapError(
                f"RAPL: {settings.root / 'sys/class/powercap'} has no package; load the module intel_rapl_msr"
            )
        return found
    gpus = open_nvml_devices()
    return gpus if settings.kind == "nvml" else [ClockLockDevice(gpu, settings.clocks) for gpu in gpus]
