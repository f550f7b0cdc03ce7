"""A stand-in for amdsmi: GPUs with what its functions answer, "N/A" and blank numbers included."""

from types import SimpleNamespace
from typing import Any

from fake_nvml import FakeNvml


class AmdSmiException(Exception):
    """AmdSmiException of the stand-in."""


class FakeAmdsmi:
    """The functions of amdsmi that are used. `answers` maps their names, without `amdsmi_`, to what each GPU answers; a
    name that is not there is refused by the driver."""

    AmdSmiException = AmdSmiException
    AmdSmiTemperatureType = SimpleNamespace(HOTSPOT=1)
    AmdSmiTemperatureMetric = SimpleNamespace(CRITICAL=5)

    def __init__(self, *answers: dict[str, Any], init_error: str = ""):
        self.answers, self.init_error, self.num_open = answers, init_error, 0

    def amdsmi_init(self) -> None:
        if self.init_error:
            raise AmdSmiException(self.init_error)
        self.num_open += 1

    def amdsmi_shut_down(self) -> None:
        self.num_open -= 1

    def amdsmi_get_processor_handles(self) -> list[int]:
        return list(range(len(self.answers)))

    def __getattr__(self, name: str) -> Any:
        def answer(handle: int, *arguments: Any) -> Any:
            if name.removeprefix("amdsmi_") not in self.answers[handle]:
                raise AmdSmiException("AMDSMI_STATUS_NOT_SUPPORTED")
            return self.answers[handle][name.removeprefix("amdsmi_")]

        if not name.startswith("amdsmi_get"):
            raise AttributeError(name)
        return answer


class LoadedAmdsmi(FakeAmdsmi):
    """Power and energy of a GPU of `fake_nvml`, with its delay, averaging, noise and faults."""

    def __init__(self, nvml: FakeNvml):
        super().__init__({})
        self.nvml = nvml

    def amdsmi_get_power_info(self, handle: int) -> dict[str, Any]:
        return {"current_socket_power": self.nvml.nvmlDeviceGetPowerUsage(self.nvml.gpus[0]) // 1000}

    def amdsmi_get_energy_count(self, handle: int) -> dict[str, Any]:
        (energy,) = self.nvml.nvmlDeviceGetFieldValues(self.nvml.gpus[0], [83])
        return {"energy_accumulator": energy.value.ullVal, "counter_resolution": 1000.0}
