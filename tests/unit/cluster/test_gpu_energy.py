"""What GPUs drew, by a library that is made up."""

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cluster import gpu_energy
from phalanx.cluster.discovery import DetectedGpu
from phalanx.errors import UnfitNodeError


class NVMLError(Exception):
    """What the library raises."""


def library(**counters: int | None) -> Any:
    """NVML with GPUs of these UUIDs, and what they count in millijoules; None: one that does not."""

    def count(handle: str) -> int:
        if (found := counters[handle]) is None:
            raise NVMLError
        return found

    def handle(uuid: str) -> str:
        if uuid.removeprefix("GPU-") not in counters:
            raise NVMLError
        return uuid.removeprefix("GPU-")

    names = {"nvmlDeviceGetHandleByUUID": handle, "nvmlDeviceGetTotalEnergyConsumption": count}
    return SimpleNamespace(NVMLError=NVMLError, nvmlInit=lambda: None, nvmlShutdown=lambda: None, **names)


def test_the_energy_of_gpus_is_the_sum_of_their_counters() -> None:
    assert gpu_energy.read_gpu_joules(["a", "b"], library(a=1500, b=500, c=9)) == 2.0


@pytest.mark.parametrize("uuids", [[], ["a", "old"], ["a", "gone"]])
def test_nothing_is_said_of_gpus_of_which_one_does_not_count(uuids: list[str]) -> None:
    assert gpu_energy.read_gpu_joules(uuids, library(a=1500, old=None)) is None


def test_a_workers_gpus_are_the_first_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_energy, "import_nvml", lambda: library(a=1000, b=2000))
    monkeypatch.setattr(gpu_energy, "detect_gpus", lambda: [DetectedGpu("X", 1, None, uuid) for uuid in ("b", "a")])
    assert [gpu_energy.read_local_gpu_joules(count) for count in (1, 2, 3)] == [2.0, 3.0, None]
    assert [gpu_energy.find_local_gpu_ids(count) for count in (1, None)] == [["GPU-b"], ["GPU-b", "GPU-a"]]


def test_a_broken_driver_says_nothing_of_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[DetectedGpu]:
        raise UnfitNodeError("a GPU does not answer")

    monkeypatch.setattr(gpu_energy, "import_nvml", lambda: library(a=1000))
    monkeypatch.setattr(gpu_energy, "detect_gpus", broken)
    assert gpu_energy.read_local_gpu_joules(1) is None
    assert gpu_energy.find_local_gpu_ids(1) == []
