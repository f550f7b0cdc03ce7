"""A stand-in for pynvml: GPUs whose readings follow a load, with delay, averaging, noise and faults."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

FIELDS = {
    "POWER_INSTANT": 186,
    "POWER_AVERAGE": 185,
    "TOTAL_ENERGY_CONSUMPTION": 83,
    "MEMORY_TEMP": 82,
    "TEMPERATURE_SLOWDOWN_TLIMIT": 194,
    "ECC_SBE_VOL_TOTAL": 3,
    "ECC_DBE_VOL_TOTAL": 4,
    "PCIE_REPLAY_COUNTER": 94,
    "NVLINK_THROUGHPUT_DATA_TX": 138,
    "NVLINK_THROUGHPUT_DATA_RX": 139,
    "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": 38,
}
UINT, ULONGLONG, INT = 1, 3, 5
"""nvmlValueType_t."""


class NvmlError(Exception):
    """NVMLError of the stand-in."""


@dataclass
class FakeGpu:
    """One GPU. `load_w(t)` is what it draws at a time; `delay_s` how old readings are; `mean_s` what the mean spans.

    Faults: `is_lost` (every call fails), `frozen_since` (the energy counter stands still from then on), `reset_at` (the
    counters restart), `unsupported` (names of fields and functions).
    """

    uuid: str = "GPU-a"
    load_w: Callable[[float], float] = lambda t: 500.0
    delay_s: float = 0.0
    mean_s: float = 1.0
    noise_w: float = 0.0
    is_lost: bool = False
    frozen_since: float = math.inf
    reset_at: float = math.inf
    unsupported: set[str] = field(default_factory=set)
    xids: list[int] = field(default_factory=list)
    reasons: int = 4
    power_mw: int | None = None
    """Instead of what the load says, and then without the fields of power."""
    values: dict[str, int] = field(default_factory=dict)
    """Values of fields other than power and energy, in NVML's units."""


class FakeNvml:
    """The functions of pynvml that are used, over `gpus`, at the time of `clock`."""

    NVMLError = NvmlError
    NVML_SUCCESS = 0
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, *gpus: FakeGpu, clock: Callable[[], float] = lambda: 0.0, seed: int = 0, init_error: str = ""):
        self.gpus, self.clock, self.random, self.init_error = list(gpus), clock, random.Random(seed), init_error
        self.num_open = 0
        for name, id in FIELDS.items():
            setattr(self, f"NVML_FI_DEV_{name}", id)

    def nvmlInit(self) -> None:
        if self.init_error:
            raise NvmlError(self.init_error)
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self._check(self.gpus[index])

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> bytes:
        return self._check(gpu).uuid.encode()

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        mean_mw = round(1000 * self._mean_w(self._check(gpu, "nvmlDeviceGetPowerUsage")))
        return mean_mw if gpu.power_mw is None else gpu.power_mw

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: FakeGpu) -> int:
        self._check(gpu)
        return 700_000

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        self._check(gpu)
        return 56

    def nvmlDeviceGetMarginTemperature(self, gpu: FakeGpu) -> int:
        self._check(gpu, "nvmlDeviceGetMarginTemperature")
        return 27

    def nvmlDeviceGetTemperatureThreshold(self, gpu: FakeGpu, kind: int) -> int:
        self._check(gpu)
        return {1: 89}[kind]

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        self._check(gpu)
        return {1: 1485, 2: 3201}[kind]

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:
        return self._check(gpu).reasons

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        self._check(gpu)
        return SimpleNamespace(gpu=99, memory=23)

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        self._check(gpu)
        return SimpleNamespace(total=80 << 30, used=60 << 30)

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, ids: list[Any]) -> list[Any]:
        self._check(gpu)
        names = {id: name for name, id in FIELDS.items()}
        return [self._field(gpu, names[each[0] if isinstance(each, tuple) else each]) for each in ids]

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, gpu: FakeGpu, kinds: int, events: object) -> None:
        self._check(gpu, "nvmlDeviceRegisterEvents")

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> Any:
        assert timeout_ms == 0
        for gpu in self.gpus:
            if gpu.xids:
                return SimpleNamespace(device=gpu, eventType=8, eventData=gpu.xids.pop(0))
        raise NvmlError("Timeout")

    def _check(self, gpu: FakeGpu, name: str = "") -> FakeGpu:
        if gpu.is_lost:
            raise NvmlError("GPU is lost")
        if name in gpu.unsupported:
            raise NvmlError("Not Supported")
        return gpu

    def _field(self, gpu: FakeGpu, name: str) -> Any:
        found = {
            "POWER_INSTANT": lambda: round(
                1000 * (self._load(gpu, self._now(gpu)) + self.random.gauss(0, gpu.noise_w))
            ),
            "POWER_AVERAGE": lambda: round(1000 * self._mean_w(gpu)),
            "TOTAL_ENERGY_CONSUMPTION": lambda: round(1000 * self._energy_j(gpu)),
        }.get(name, lambda: gpu.values.get(name))()
        kind = INT if "TLIMIT" in name else ULONGLONG if "ENERGY" in name or "ECC" in name or "NVLINK" in name else UINT
        is_replaced = gpu.power_mw is not None and name.startswith("POWER")
        if found is None or is_replaced or name in gpu.unsupported:
            return SimpleNamespace(nvmlReturn=3, valueType=0, value=SimpleNamespace(dVal=0.0))
        return SimpleNamespace(
            nvmlReturn=0,
            valueType=kind,
            value=SimpleNamespace(**{{UINT: "uiVal", ULONGLONG: "ullVal", INT: "siVal"}[kind]: found}),
        )

    def _now(self, gpu: FakeGpu) -> float:
        return max(0.0, self.clock() - gpu.delay_s)

    def _load(self, gpu: FakeGpu, t: float) -> float:
        return gpu.load_w(t)

    def _mean_w(self, gpu: FakeGpu) -> float:
        now, num = self._now(gpu), 20
        return sum(gpu.load_w(max(0.0, now - gpu.mean_s * (i + 0.5) / num)) for i in range(num)) / num

    def _energy_j(self, gpu: FakeGpu) -> float:
        """The integral of the load since the start or the reset, in steps of 0.1 s as NVML has them."""
        now = min(self._now(gpu), gpu.frozen_since)
        begin = gpu.reset_at if now >= gpu.reset_at else 0.0
        ticks = math.floor((now - begin) * 10 + 1e-9)
        return sum(gpu.load_w(begin + (tick + 0.5) / 10) * 0.1 for tick in range(ticks)) + (0 if begin else 1000.0)
