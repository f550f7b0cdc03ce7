"""Which of NVML's GPUs a run uses."""

import pytest

from phalanx.cluster import discovery
from phalanx.cluster.discovery import DetectedGpu
from phalanx.errors import UnfitNodeError


def test_a_workers_gpus_are_the_first_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "detect_gpus", lambda: [DetectedGpu("X", 1, None, uuid) for uuid in ("b", "a")])
    assert [discovery.find_local_gpu_ids(count) for count in (1, None)] == [["GPU-b"], ["GPU-b", "GPU-a"]]


def test_no_gpus_are_known_with_a_broken_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[DetectedGpu]:
        raise UnfitNodeError("a GPU does not answer")

    monkeypatch.setattr(discovery, "detect_gpus", broken)
    assert discovery.find_local_gpu_ids(1) == []
