"""Read AMD's GPUs through amdsmi (ROCm's Python package).

`current_socket_power` exists on MI300 and later, `average_socket_power` on MI200 and earlier. amdsmi answers "N/A" or
the largest number of a type where it has no value. Energy is a counter in units of `counter_resolution` microjoules.
"""

from __future__ import annotations

import contextlib
from typing import Any

from phalanx.telemetry.sample import DeviceSample, SlowReason, SourceReading, SourceUnavailableError

VIOLATION_REASONS = {
    "active_ppt_pwr": SlowReason.POWER_CAP,
    "active_prochot_thrm": SlowReason.HW_SLOWDOWN,
    "active_socket_thrm": SlowReason.HW_THERMAL,
    "active_vr_thrm": SlowReason.HW_THERMAL,
    "active_hbm_thrm": SlowReason.HW_THERMAL,
}
"""What amdsmi's violations mean, in the words of NVML's reasons."""
BLANK_VALUES = frozenset(2**bits - 1 for bits in (8, 16, 32, 64))
"""The largest numbers of the types that the driver has: "no value"."""


class AmdsmiSource:
    """All AMD GPUs of this machine. `library` is the module amdsmi, or a stand-in with its functions.

    Raises SourceUnavailableError where the driver does not answer or has no GPU.
    """

    name = "amdsmi"

    def __init__(self, library: Any):
        self._smi = library
        self.problems: list[str] = []
        try:
            library.amdsmi_init()
            handles = library.amdsmi_get_processor_handles()
        except library.AmdSmiException as error:
            raise SourceUnavailableError(f"amdsmi: {error}; check the driver with amd-smi") from error
        if not handles:
            self.close()
            raise SourceUnavailableError("amdsmi: the driver lists no GPU")
        self._gpus = [(handle, *self._name(index, handle)) for index, handle in enumerate(handles)]

    def read(self) -> SourceReading:
        """Read all GPUs. A GPU that is lost has a sample without values."""
        return SourceReading(tuple(self._read_gpu(handle, id, name) for handle, id, name in self._gpus))

    def close(self) -> None:
        """Shut amdsmi down."""
        with contextlib.suppress(self._smi.AmdSmiException):
            self._smi.amdsmi_shut_down()

    def _name(self, index: int, handle: Any) -> tuple[str, str]:
        uuid = self._query("amdsmi_get_gpu_device_uuid", handle)
        asic = self._query("amdsmi_get_gpu_asic_info", handle) or {}
        return str(uuid or f"amd-{index}"), str(asic.get("market_name", ""))

    def _read_gpu(self, handle: Any, id: str, name: str) -> DeviceSample:
        metrics = self._query("amdsmi_get_gpu_metrics_info", handle) or {}
        power = self._query("amdsmi_get_power_info", handle) or {}
        cap = self._query("amdsmi_get_power_cap_info", handle) or {}
        energy = self._query("amdsmi_get_energy_count", handle) or {}
        memory = self._query("amdsmi_get_gpu_vram_usage", handle) or {}
        ecc = self._query("amdsmi_get_gpu_total_ecc_count", handle) or {}
        violations = self._query("amdsmi_get_violation_status", handle)
        temperature, critical = _number(metrics.get("temperature_hotspot")), self._read_critical(handle)
        return DeviceSample(
            id=id,
            name=name,
            power_instant_w=_number(power.get("current_socket_power")),
            power_mean_w=_number(power.get("average_socket_power")),
            power_cap_w=_number(cap.get("power_cap"), 1e-6),
            energy_joules=_number(energy.get("energy_accumulator"), 1e-6 * energy.get("counter_resolution", 0.0)),
            core_temperature_c=temperature,
            memory_temperature_c=_number(metrics.get("temperature_mem")),
            thermal_margin_c=None if critical is None or temperature is None else critical - temperature,
            core_clock_hz=_number(metrics.get("current_gfxclk"), 1e6),
            memory_clock_hz=_number(metrics.get("current_uclk"), 1e6),
            slow_reasons=_decode(violations),
            utilization=_number(metrics.get("average_gfx_activity"), 0.01),
            memory_used_bytes=_number(memory.get("vram_used"), 2**20),
            memory_size_bytes=_number(memory.get("vram_total"), 2**20),
            ecc_corrected_total=_number(ecc.get("correctable_count")),
            ecc_uncorrected_total=_number(ecc.get("uncorrectable_count")),
            pcie_replays_total=_number(metrics.get("pcie_replay_count_acc")),
            nvlink_sent_bytes_total=_sum(metrics.get("xgmi_write_data_acc"), 1024),
            nvlink_received_bytes_total=_sum(metrics.get("xgmi_read_data_acc"), 1024),
        )

    def _read_critical(self, handle: Any) -> float | None:
        smi = self._smi
        hotspot, critical = smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CRITICAL
        return _number(self._query("amdsmi_get_temp_metric", handle, hotspot, critical))

    def _query(self, function: str, *arguments: Any) -> Any:
        """The result of an amdsmi function; None where this version lacks it, or the driver refuses it."""
        call = getattr(self._smi, function, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except self._smi.AmdSmiException:
            return None


def _decode(violations: Any) -> SlowReason | None:
    if not isinstance(violations, dict) or all(violations.get(name) in (None, "N/A") for name in VIOLATION_REASONS):
        return None
    found = SlowReason(0)
    for name, reason in VIOLATION_REASONS.items():
        if violations.get(name) is True:
            found |= reason
    return found


def _number(value: Any, factor: float = 1.0) -> float | None:
    """A value in base units; None for what means that there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value in BLANK_VALUES or not factor:
        return None
    return float(value) * factor


def _sum(values: Any, factor: float) -> float | None:
    numbers = [number for each in values or () if (number := _number(each, factor)) is not None]
    return sum(numbers) if numbers else None
