"""What sets and reads the power cap of a device. Of this machine: NVIDIA's GPUs through NVML, and CPU packages through
RAPL's files. Each call of a device has a time limit: a driver that hangs on one device must not keep the others from
the ends of their leases."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from phalanx.cluster.device_links import import_nvml
from phalanx.run.boot_clock import seconds_since_boot
from phalanx.telemetry.host import find_rapl_domains
from phalanx_fleet.power_settings import CapDeviceSettings
from phalanx_fleet.telemetry.service_reading import start_call

ROUNDING_ERROR = 1e-4
"""Of a unit: what multiplication adds to a whole number."""
MILLIWATTS_PER_WATT, MICROWATTS_PER_WATT = 1e3, 1e6
NVML_TEMPERATURE_GPU = 0
CALL_TIMEOUT_S = 2.0
"""Drivers answer within tens of milliseconds; the keeper looks at leases once a second."""
T = TypeVar("T")


class CapError(Exception):
    """A device does not answer, or does not take a cap; the text says which and why."""


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


class NvmlCapDevice:
    """A GPU. `library` is the module pynvml, initialized, or a stand-in."""

    def __init__(self, library: Any, handle: Any):
        self._nvml, self._handle = library, handle
        uuid = self._call("nvmlDeviceGetUUID")
        self.id = uuid.decode() if isinstance(uuid, bytes) else str(uuid)

    def read_limits(self) -> CapLimits:
        """Read what the driver takes, and the limit that it has after a restart."""
        low, high = self._call("nvmlDeviceGetPowerManagementLimitConstraints")
        default = self._call("nvmlDeviceGetPowerManagementDefaultLimit")
        return CapLimits(*(watts / MILLIWATTS_PER_WATT for watts in (low, high, default)))

    def read_cap_w(self) -> float:
        """Read the enforced limit, which counts limits set out of band."""
        return float(self._call("nvmlDeviceGetEnforcedPowerLimit")) / MILLIWATTS_PER_WATT

    def read_draw_w(self) -> float | None:
        """Read the power, a mean of about a second from Ampere on."""
        return float(self._call("nvmlDeviceGetPowerUsage")) / MILLIWATTS_PER_WATT

    def read_temperature_c(self) -> float | None:
        return float(self._call("nvmlDeviceGetTemperature", NVML_TEMPERATURE_GPU))

    def set_cap_w(self, cap_w: float) -> None:
        """Set the limit. Only root may."""
        self._call("nvmlDeviceSetPowerManagementLimit", to_device_units(cap_w, MILLIWATTS_PER_WATT))

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, name)(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            raise CapError(f"NVML: {getattr(self, 'id', 'a GPU')}: {name}: {error}") from error


class RaplCapDevice:
    """A CPU package: `folder` is such as /sys/class/powercap/intel-rapl:0. The long and the short window are set."""

    def __init__(self, folder: Path):
        self._folder, self.id = folder, folder.name
        self._files = sorted(folder.glob("constraint_*_power_limit_uw"))
        self._last_energy: tuple[float, float] | None = None
        """Time and joules of the last reading."""

    def read_limits(self) -> CapLimits:
        """Read the most that the package takes; its lowest cap is a third of that, since RAPL names none."""
        high = self._read(self._folder / "constraint_0_max_power_uw")
        return CapLimits(high / 3, high, high)

    def read_cap_w(self) -> float:
        """Read the highest of all windows: the short one lets the package draw more than the long one."""
        if not self._files:
            raise CapError(f"RAPL: {self._folder} has no power limit")
        return max(self._read(file) for file in self._files)

    def read_draw_w(self) -> float | None:
        """Return the mean power since the last call by the energy counter; None at first, and where it has wrapped or
        cannot be read, as without root."""
        now = seconds_since_boot()
        try:
            energy_j = self._read(self._folder / "energy_uj")
        except CapError:
            return None
        last, self._last_energy = self._last_energy, (now, energy_j)
        if last is None or now <= last[0] or energy_j < last[1]:
            return None
        return (energy_j - last[1]) / (now - last[0])

    def read_temperature_c(self) -> float | None:
        return None

    def set_cap_w(self, cap_w: float) -> None:
        """Set all windows. Only root may."""
        for file in self._files:
            try:
                file.write_text(f"{to_device_units(cap_w, MICROWATTS_PER_WATT)}")
            except OSError as error:
                raise CapError(f"RAPL: {file}: {error.strerror}; run as root") from error

    def _read(self, file: Path) -> float:
        try:
            return int(file.read_text()) / MICROWATTS_PER_WATT
        except (OSError, ValueError) as error:
            raise CapError(f"RAPL: {file} cannot be read: {error}") from error


def open_nvml_devices(library: Any = None) -> list[NvmlCapDevice]:
    """Return this machine's GPUs. Raises CapError where NVML or a GPU is missing."""
    nvml = library or import_nvml()
    if nvml is None:
        raise CapError("NVML: the package nvidia-ml-py is missing; pip install 'phalanx[gpu]'")
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise CapError(f"NVML: {error}; check the driver with nvidia-smi") from error
    if not handles:
        raise CapError("NVML: the driver lists no GPU")
    return [NvmlCapDevice(nvml, handle) for handle in handles]


def find_rapl_devices(root: Path = Path("/")) -> Sequence[CapDevice]:
    """Return this machine's CPU packages. Dies of a package that show the same counter of energy have one limit, too:
    they are one device."""
    devices: dict[tuple[str, str], CapDevice] = {}
    for domain in find_rapl_domains(root):
        try:
            counter = (domain.folder / "energy_uj").read_text().strip()
        except OSError:
            counter = domain.folder.name
        devices.setdefault((domain.package, counter), RaplCapDevice(domain.folder))
    return list(devices.values())


class TimedDevice:
    """A device with calls that raise CapError after `timeout_s`. While one hangs, further ones raise at once. One that
    returns late has had its effect: the keeper reads the cap back at its next check."""

    def __init__(self, device: CapDevice, timeout_s: float = CALL_TIMEOUT_S):
        self._device, self._timeout_s = device, timeout_s
        self._last: Future[object] | None = None

    @property
    def id(self) -> str:
        return self._device.id

    def is_hanging(self) -> bool:
        return self._last is not None and not self._last.done()

    def read_limits(self) -> CapLimits:
        return self._call(self._device.read_limits)

    def read_cap_w(self) -> float:
        return self._call(self._device.read_cap_w)

    def read_draw_w(self) -> float | None:
        return self._call(self._device.read_draw_w)

    def read_temperature_c(self) -> float | None:
        return self._call(self._device.read_temperature_c)

    def set_cap_w(self, cap_w: float) -> None:
        self._call(lambda: self._device.set_cap_w(cap_w))

    def _call(self, function: Callable[[], T]) -> T:
        if self.is_hanging():
            raise CapError(f"{self.id}: its driver hangs in an earlier call")
        future = start_call(function, f"device {self.id}")
        self._last = future  # type: ignore[assignment]
        try:
            return future.result(self._timeout_s)
        except TimeoutError:
            raise CapError(f"{self.id}: its driver has not answered for {self._timeout_s:g} s") from None


def open_cap_devices(settings: CapDeviceSettings) -> Sequence[CapDevice]:
    """Return the devices of this machine that may be capped. Raises CapError where one is missing."""
    devices = find_rapl_devices(settings.root) if settings.kind == "rapl" else open_nvml_devices()
    if not devices:
        raise CapError(f"RAPL: {settings.root / 'sys/class/powercap'} has no package; load the module intel_rapl_msr")
    return [TimedDevice(device) for device in select_devices(devices, settings.ids)]


def select_devices(devices: Sequence[CapDevice], ids: Sequence[str] | None) -> Sequence[CapDevice]:
    """Return the devices of the allow list; all without one. Raises CapError for one that is not there."""
    by_id = {device.id: device for device in devices}
    if missing := [id for id in ids or () if id not in by_id]:
        raise CapError(f"{missing[0]}: no such device; there are {', '.join(by_id) or 'none'}")
    return devices if ids is None else [by_id[id] for id in ids]
