"""A stand-in for dcgm-exporter over the GPUs of `fake_nvml`: values are renewed at an interval, so they are late."""

import urllib.error
from dataclasses import dataclass
from typing import Any

from fake_nvml import FakeGpu, FakeNvml

INT64_BLANK = 9223372036854775794


@dataclass
class FakeExporter:
    """Faults: `is_down`; `frozen_since` (the exporter repeats its page from then on); `is_blank` (energy has DCGM's
    code for "no value"); `has_times` (each value carries its time, as those of a Prometheus server)."""

    nvml: FakeNvml
    interval_s: float = 30.0
    is_down: bool = False
    frozen_since: float = float("inf")
    is_blank: bool = False
    has_times: bool = False

    def fetch(self, url: str) -> str:
        if self.is_down:
            raise urllib.error.URLError(ConnectionRefusedError(111, "Connection refused"))
        asked_at: Any = self.nvml.clock
        rendered_at = min(asked_at(), self.frozen_since) // self.interval_s * self.interval_s
        self.nvml.clock = lambda: rendered_at
        try:
            return "".join(self._render(gpu, rendered_at) for gpu in self.nvml.gpus)
        finally:
            self.nvml.clock = asked_at

    def _render(self, gpu: FakeGpu, time_s: float) -> str:
        labels, end = f'{{gpu="0",UUID="{gpu.uuid}",modelName="NVIDIA H100"}}', ""
        if self.has_times:
            end = f" {round(1000 * time_s)}"
        (energy,) = self.nvml.nvmlDeviceGetFieldValues(gpu, [83])
        values = {
            "DCGM_FI_DEV_POWER_USAGE": self.nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "DCGM_FI_DEV_GPU_TEMP": self.nvml.nvmlDeviceGetTemperature(gpu, 0),
            "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": INT64_BLANK if self.is_blank else energy.value.ullVal,
        }
        return "".join(f"{name}{labels} {value}{end}\n" for name, value in values.items())
