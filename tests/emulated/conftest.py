"""Labs whose workers train on emulated GPUs that compute as the CPU does, and on the CPU to compare with."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulator import build, environment

from phalanx.cluster import discovery
from train_harness import TrainHarness

GPUS = 4
FP8 = {"PHALANX_FLOAT8": "always"}
ROOT = Path(__file__).resolve().parents[2]


class OnGpus(TrainHarness):
    """Its agent looks for emulated GPUs, and its workers train on them."""

    def variables(self) -> dict[str, str]:
        emulated = {**environment(build(), host=True), "NULLGPU_COUNT": str(GPUS), **FP8}
        return with_paths(super().variables(), emulated)


class OnLateGpus(OnGpus):
    """Their copies and events are done as late as CUDA allows."""

    def variables(self) -> dict[str, str]:
        return {**super().variables(), "NULLGPU_DELAY": "1"}


class OnCpu(TrainHarness):
    """The same build of torch without a GPU, with the attention of `hostgpu.py`."""

    def variables(self) -> dict[str, str]:
        own = {"NULLGPU": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parent / "site")}
        return with_paths(super().variables(), own)


def with_paths(*variables: dict[str, str]) -> dict[str, str]:
    """All of them; their PYTHONPATHs one after another."""
    paths = [each["PYTHONPATH"] for each in variables if "PYTHONPATH" in each]
    merged = {name: value for each in variables for name, value in each.items()}
    return {**merged, "PYTHONPATH": os.pathsep.join([*paths, str(ROOT / "src")])}


@pytest.fixture(scope="session")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainHarness]:
    """Four emulated GPUs."""
    folder = tmp_path_factory.mktemp("gpus")
    with pytest.MonkeyPatch.context() as patch, OnGpus(folder, folder / "runs") as lab:
        patch.setattr(discovery, "GPU_DEVICE_FILES", ("proc/self/status",))
        yield lab


@pytest.fixture(scope="session")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainHarness]:
    folder = tmp_path_factory.mktemp("cpu")
    with OnCpu(folder, folder / "runs") as lab:
        yield lab


@pytest.fixture(scope="session")
def late_gpus(gpus: TrainHarness, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainHarness]:
    """What the trials of `gpus` found holds here as well."""
    folder = tmp_path_factory.mktemp("late")
    lab = OnLateGpus(folder, folder / "runs")
    lab.cache = gpus.cache
    with lab:
        yield lab
