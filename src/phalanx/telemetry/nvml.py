"""Read NVIDIA's GPUs through NVML (nvidia-ml-py, extra `gpu`).

What readings mean and how long calls take was measured on an H200: docs/benchmarks/gpu-nvml.md. `GetPowerUsage` is the
mean of about a second on Ampere and later (except GA100), so it counts as a mean only where the field POWER_AVERAGE
exists. PCIe throughput is not read: a call takes 20 ms, and the byte counters wrap within a second.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
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
"""NVML_TEMPERATURE_THRESHOLD_SLOWDOWN."""
BLANK_VALUES = frozenset((2**32 - 1, 2**64 - 1))
"""NVML_VALUE_NOT_AVAILABLE in the unsigned types: "no value"."""


@dataclass
class _Gpu:
    handle: Any
    uuid: str
    name: str
    xids: int | None = None
    """Xid errors since the source was opened; None where the driver does not report them."""
    last_xid: int | None = None


class NvmlSource:
    """All NVIDIA GPUs of this machine. `library` is the module pynvml, or a stand-in with its functions.

    Raises SourceUnavailableError where NVML cannot be initialized or has no GPU.
    """

    name = "NVML"

    def __init__(self, library: Any):
        self._nvml = library
        self.problems: list[str] = []
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
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _find_gpus(self) -> Iterator[_Gpu]:
        nvml = self._nvml
        for index in range(self._query(nvml.nvmlDeviceGetCount) or 0):
            handle = self._query(nvml.nvmlDeviceGetHandleByIndex, index)
            uuid = None if handle is None else self._query(nvml.nvmlDeviceGetUUID, handle)
            if uuid is None:
                self.problems.append(f"NVML: GPU {index} cannot be queried; `phalanx doctor` checks it")
                continue
            yield _Gpu(handle, _text(uuid), _text(self._query(nvml.nvmlDeviceGetName, handle) or ""))

    def _choose_fields(self) -> dict[str, Any]:
        """Field ids by name, as far as this nvidia-ml-py knows them."""
        found = {name: getattr(self._nvml, f"NVML_FI_DEV_{name}", None) for name in FIELD_NAMES}
        return {
            name: (id, ALL_LINKS_SCOPE) if "THROUGHPUT" in name else id for name, id in found.items() if id is not None
        }

    def _watch_xids(self) -> Any:
        nvml = self._nvml
        event_set = self._query(nvml.nvmlEventSetCreate)
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
                event = self._nvml.nvmlEventSetWait_v2(self._event_set, 0)
            except self._nvml.NVMLError:  # NVMLError_Timeout: no more of them
                return
            gpu = by_uuid.get(_text(self._query(self._nvml.nvmlDeviceGetUUID, event.device) or ""))
            if gpu is not None and gpu.xids is not None:
                gpu.xids, gpu.last_xid = gpu.xids + 1, int(event.eventData)

    def _read_gpu(self, gpu: _Gpu) -> DeviceSample:
        nvml, handle, fields = self._nvml, gpu.handle, self._read_fields(gpu.handle)
        power_w = _scaled(self._query(nvml.nvmlDeviceGetPowerUsage, handle), 1e-3)
        mean_w, instant_w = _scaled(fields.get("POWER_AVERAGE"), 1e-3), _scaled(fields.get("POWER_INSTANT"), 1e-3)
        if mean_w is None and instant_w is None:
            instant_w = power_w  # before Ampere, and on GA100, it is no mean
        temperature = self._query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        use, memory = (
            self._query(f, handle) for f in (nvml.nvmlDeviceGetUtilizationRates, nvml.nvmlDeviceGetMemoryInfo)
        )
        nvlink_errors = [
            fields[name] for name in FIELD_NAMES if name.startswith("NVLINK") and "ERROR" in name and name in fields
        ]
        return DeviceSample(
            id=gpu.uuid,
            name=gpu.name,
            power_instant_w=instant_w,
            power_mean_w=mean_w,
            power_cap_w=_scaled(self._query(nvml.nvmlDeviceGetEnforcedPowerLimit, handle), 1e-3),
            energy_joules=_scaled(fields.get("TOTAL_ENERGY_CONSUMPTION"), 1e-3),
            core_temperature_c=_scaled(temperature),
            memory_temperature_c=fields.get("MEMORY_TEMP") or None,  # 0: there is no sensor
            thermal_margin_c=self._read_margin(handle, temperature, fields),
            core_clock_hz=_scaled(self._query(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM), 1e6),
            memory_clock_hz=_scaled(self._query(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM), 1e6),
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
        try:
            values: Sequence[Any] = self._nvml.nvmlDeviceGetFieldValues(handle, list(self._fields.values()))
        except self._nvml.NVMLError:
            return {}
        return {
            name: number
            for name, value in zip(self._fields, values, strict=True)
            if value.nvmlReturn == self._nvml.NVML_SUCCESS
            and value.valueType < len(VALUE_MEMBERS)
            and (found := getattr(value.value, VALUE_MEMBERS[value.valueType])) not in BLANK_VALUES
            and math.isfinite(number := float(found))
        }

    def _read_margin(self, handle: Any, temperature: float | None, fields: Mapping[str, float]) -> float | None:
        """Kelvins up to slowing down. The margin of Ada and later is to T.Limit 0; slowing down may begin below."""
        nvml = self._nvml
        margin = self._query(getattr(nvml, "nvmlDeviceGetMarginTemperature", None), handle)
        if margin is not None:
            return float(margin) - fields.get("TEMPERATURE_SLOWDOWN_TLIMIT", 0.0)
        threshold = self._query(nvml.nvmlDeviceGetTemperatureThreshold, handle, SLOWDOWN_THRESHOLD)
        return None if threshold is None or temperature is None else float(threshold) - temperature

    def _read_slow_reasons(self, handle: Any) -> SlowReason | None:
        nvml = self._nvml
        newer = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)  # from nvidia-ml-py 12.535 on
        bits = self._query(newer or nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        return None if bits is None else SlowReason(int(bits) & sum(SlowReason))

    def _query(self, function: Any, *arguments: Any) -> Any:
        """The result of an NVML function; None where driver or GPU do not support it, permit it, or answer."""
        if function is None:
            return None
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None


def _scaled(value: float | None, factor: float = 1.0) -> float | None:
    return None if value is None or value in BLANK_VALUES else float(value) * factor


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
