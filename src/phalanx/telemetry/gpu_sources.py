"""Read NVIDIA's GPUs through NVML (nvidia-ml-py, extra `gpu`), and AMD's through amdsmi (ROCm's Python package).

NVML: what readings mean and how long calls take was measured on an H200: docs/benchmarks/gpu-nvml.md. `GetPowerUsage`
is the mean of about a second on Ampere and later (except GA100), so it counts as a mean only where the field
POWER_AVERAGE exists. PCIe throughput is not read: a call takes 20 ms, and the byte counters wrap within a second.

amdsmi: `current_socket_power` exists on MI300 and later, `average_socket_power` on MI200 and earlier. It answers "N/A"
or the largest number of a type where it has no value. Energy is a counter in units of `counter_resolution` microjoules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.telemetry.sample import DeviceSample, SlowReason, SourceReading, SourceUnavailableError

FIELD_NAMES = (
    "POWER_INSTANT",
    "POWER_AVERAGE",
    "TOTAL_ENERGY_CONSUMPTION",
    "MEMORY_TEMP",
    "TEMPERATURE_SLOWDOWN_TLIMIT",
    "ECC_SBE_VOL_TOTAL",
    "ECC_DBE_VOL_TOTAL",
    "PCIE_REPLAY_COUNTER",
    "NVLINK_THROUGHPUT_DATA_TX",
    "NVLINK_THROUGHPUT_DATA_RX",
    "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
    "NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    "NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
)
"""Fields (`NVML_FI_DEV_*`) that one call reads for a GPU."""
ALL_LINKS_SCOPE = 0xFFFFFFFF
"""Scope of NVLink throughput fields: the sum over all links of a GPU."""
VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Members of nvmlValue_t by nvmlValueType_t."""
SLOWDOWN_THRESHOLD = 1
BLANK_VALUES = frozenset((2**32 - 1, 2**64 - 1))
"""NVML_VALUE_NOT_AVAILABLE in the unsigned types: "no value"."""
VIOLATION_REASONS = {
    "active_ppt_pwr": SlowReason.POWER_CAP,
    "active_prochot_thrm": SlowReason.HW_SLOWDOWN,
    "active_socket_thrm": SlowReason.HW_THERMAL,
    "active_vr_thrm": SlowReason.HW_THERMAL,
    "active_hbm_thrm": SlowReason.HW_THERMAL,
}
"""What amdsmi's violations mean, in the words of NVML's reasons."""
AMD_BLANK_VALUES = frozenset(2**bits - 1 for bits in (8, 16, 32, 64))
"""The largest numbers of the types that the driver has: "no value"."""


class _GpuLibrary:
    """A library of a driver. `error_type`: what its functions raise."""

    def __init__(self, library: Any, error_type: type[Exception]):
        self._library, self._error_type = library, error_type
        self.problems: list[str] = []

    def _query(self, function: str, *arguments: Any) -> Any:
        """The result of a function; None where this version lacks it, or driver or GPU do not support or permit it."""
        call = getattr(self._library, function, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except self._error_type:
            return None


@dataclass
class _Gpu:
    handle: Any
    uuid: str
    name: str
    xids: int | None = None
    """Xid errors since the source was opened; None where the driver does not report them."""
    last_xid: int | None = None


class NvmlSource(_GpuLibrary):
    """All NVIDIA GPUs of this machine. `library` is the module pynvml, or a stand-in with its functions. Raises
    SourceUnavailableError where NVML cannot be initialized or has no GPU."""

    name = "NVML"

    def __init__(self, library: Any):
        super().__init__(library, library.NVMLError)
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            raise SourceUnavailableError(f"NVML: {error}; check the driver with nvidia-smi") from error
        self._gpus = list(self._find_gpus())
        if not self._gpus:
            self.close()
            raise SourceUnavailableError("NVML: the driver lists no GPU")
        self._fields = self._choose_fields()
        self._event_set = self._watch_xids()

    def read(self) -> SourceReading:
        """Read all GPUs. A GPU that is lost has a sample without values."""
        self._collect_xids()
        return SourceReading(tuple(map(self._read_gpu, self._gpus)))

    def close(self) -> None:
        """Shut NVML down."""
        self._query("nvmlShutdown")

    def _find_gpus(self) -> Iterator[_Gpu]:
        for index in range(self._query("nvmlDeviceGetCount") or 0):
            handle = self._query("nvmlDeviceGetHandleByIndex", index)
            uuid = None if handle is None else self._query("nvmlDeviceGetUUID", handle)
            if uuid is None:
                self.problems.append(f"NVML: GPU {index} cannot be queried; `phalanx doctor` checks it")
                continue
            yield _Gpu(handle, _text(uuid), _text(self._query("nvmlDeviceGetName", handle) or ""))

    def _choose_fields(self) -> dict[str, Any]:
        """Field ids by name, as far as this nvidia-ml-py knows them."""
        found = {name: getattr(self._library, f"NVML_FI_DEV_{name}", None) for name in FIELD_NAMES}
        return {
            name: (id, ALL_LINKS_SCOPE) if "THROUGHPUT" in name else id for name, id in found.items() if id is not None
        }

    def _watch_xids(self) -> Any:
        nvml = self._library
        event_set = self._query("nvmlEventSetCreate")
        for gpu in self._gpus if event_set is not None else ():
            try:
                nvml.nvmlDeviceRegisterEvents(gpu.handle, nvml.nvmlEventTypeXidCriticalError, event_set)
            except nvml.NVMLError as error:
                self.problems.append(f"NVML: Xid errors of {gpu.uuid} are not reported: {error}")
            else:
                gpu.xids = gpu.last_xid = 0
        return event_set

    def _collect_xids(self) -> None:
        """Take the Xid events that wait, without waiting for one."""
        by_uuid = {gpu.uuid: gpu for gpu in self._gpus}
        while self._event_set is not None:
            try:
                event = self._library.nvmlEventSetWait_v2(self._event_set, 0)
            except self._library.NVMLError:  # NVMLError_Timeout: no more of them
                return
            gpu = by_uuid.get(_text(self._query("nvmlDeviceGetUUID", event.device) or ""))
            if gpu is not None and gpu.xids is not None:
                gpu.xids, gpu.last_xid = gpu.xids + 1, int(event.eventData)

    def _read_gpu(self, gpu: _Gpu) -> DeviceSample:
        nvml, handle, fields = self._library, gpu.handle, self._read_fields(gpu.handle)
        power_w = _scaled(self._query("nvmlDeviceGetPowerUsage", handle), 1e-3)
        mean_w, instant_w = _scaled(fields.get("POWER_AVERAGE"), 1e-3), _scaled(fields.get("POWER_INSTANT"), 1e-3)
        if mean_w is None and instant_w is None:
            instant_w = power_w  # before Ampere, and on GA100, it is no mean
        temperature = self._query("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU)
        use = self._query("nvmlDeviceGetUtilizationRates", handle)
        memory = self._query("nvmlDeviceGetMemoryInfo", handle)
        nvlink_errors = [
            fields[name] for name in FIELD_NAMES if name.startswith("NVLINK") and "ERROR" in name and name in fields
        ]
        return DeviceSample(
            id=gpu.uuid,
            name=gpu.name,
            power_instant_w=instant_w,
            power_mean_w=mean_w,
            power_cap_w=_scaled(self._query("nvmlDeviceGetEnforcedPowerLimit", handle), 1e-3),
            energy_joules=_scaled(fields.get("TOTAL_ENERGY_CONSUMPTION"), 1e-3),
            core_temperature_c=_scaled(temperature),
            memory_temperature_c=fields.get("MEMORY_TEMP") or None,  # 0: there is no sensor
            thermal_margin_c=self._read_margin(handle, temperature, fields),
            core_clock_hz=_scaled(self._query("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM), 1e6),
            memory_clock_hz=_scaled(self._query("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM), 1e6),
            slow_reasons=self._read_slow_reasons(handle),
            utilization=None if use is None else use.gpu / 100,
            memory_used_bytes=None if memory is None else float(memory.used),
            memory_size_bytes=None if memory is None else float(memory.total),
            ecc_corrected_total=fields.get("ECC_SBE_VOL_TOTAL"),
            ecc_uncorrected_total=fields.get("ECC_DBE_VOL_TOTAL"),
            xid=_scaled(gpu.last_xid),
            xids_total=_scaled(gpu.xids),
            pcie_replays_total=fields.get("PCIE_REPLAY_COUNTER"),
            nvlink_sent_bytes_total=_scaled(fields.get("NVLINK_THROUGHPUT_DATA_TX"), 1024),
            nvlink_received_bytes_total=_scaled(fields.get("NVLINK_THROUGHPUT_DATA_RX"), 1024),
            nvlink_errors_total=sum(nvlink_errors) if nvlink_errors else None,
        )

    def _read_fields(self, handle: Any) -> Mapping[str, float]:
        """The values of all fields that this GPU supports, in NVML's units."""
        values = self._query("nvmlDeviceGetFieldValues", handle, list(self._fields.values()))
        return {
            name: number
            for name, value in zip(self._fields, values or (), strict=values is not None)
            if value.nvmlReturn == self._library.NVML_SUCCESS
            and value.valueType < len(VALUE_MEMBERS)
            and (found := getattr(value.value, VALUE_MEMBERS[value.valueType])) not in BLANK_VALUES
            and math.isfinite(number := float(found))
        }

    def _read_margin(self, handle: Any, temperature: float | None, fields: Mapping[str, float]) -> float | None:
        """Kelvins up to slowing down. The margin of Ada and later is to T.Limit 0; slowing down may begin below."""
        margin = self._query("nvmlDeviceGetMarginTemperature", handle)
        if margin is not None:
            return float(margin) - fields.get("TEMPERATURE_SLOWDOWN_TLIMIT", 0.0)
        threshold = self._query("nvmlDeviceGetTemperatureThreshold", handle, SLOWDOWN_THRESHOLD)
        return None if threshold is None or temperature is None else float(threshold) - temperature

    def _read_slow_reasons(self, handle: Any) -> SlowReason | None:
        name = "nvmlDeviceGetCurrentClocksEventReasons"  # from nvidia-ml-py 12.535 on
        older_name = "nvmlDeviceGetCurrentClocksThrottleReasons"
        bits = self._query(name if hasattr(self._library, name) else older_name, handle)
        return None if bits is None else SlowReason(int(bits) & sum(SlowReason))


def _scaled(value: float | None, factor: float = 1.0) -> float | None:
    return None if value is None or value in BLANK_VALUES else float(value) * factor


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


class AmdsmiSource(_GpuLibrary):
    """All AMD GPUs of this machine. `library` is the module amdsmi, or a stand-in with its functions. Raises
    SourceUnavailableError where the driver does not answer or has no GPU."""

    name = "amdsmi"

    def __init__(self, library: Any):
        super().__init__(library, library.AmdSmiException)
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
        self._query("amdsmi_shut_down")

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
        smi = self._library
        hotspot, critical = smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CRITICAL
        return _number(self._query("amdsmi_get_temp_metric", handle, hotspot, critical))


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
    if isinstance(value, bool) or not isinstance(value, int | float) or value in AMD_BLANK_VALUES or not factor:
        return None
    return float(value) * factor


def _sum(values: Any, factor: float) -> float | None:
    numbers = [number for each in values or () if (number := _number(each, factor)) is not None]
    return sum(numbers) if numbers else None
