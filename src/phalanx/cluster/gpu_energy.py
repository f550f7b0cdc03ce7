"""Read the energy counters of GPUs, which NVIDIA's have since Volta (extra `gpu`: nvidia-ml-py)."""

from collections.abc import Sequence
from typing import Any

from phalanx.cluster.discovery import detect_gpus
from phalanx.cluster.gpu_topology import import_nvml, open_nvml
from phalanx.errors import UnfitNodeError


def read_gpu_joules(uuids: Sequence[str], nvml: Any) -> float | None:
    """Return the total joules of these GPUs since the driver was loaded, from NVML.

    None when NVML does not work, when one of the GPUs has no energy counter, or without GPUs.
    """
    with open_nvml(nvml) as library:
        if library is None or not uuids:
            return None
        try:
            found = [library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
            return float(sum(library.nvmlDeviceGetTotalEnergyConsumption(each) for each in found)) / 1e3
        except library.NVMLError:
            return None


def read_local_gpu_joules(count: int) -> float | None:
    """Return the same for the first `count` GPUs of this machine, which its workers use; None if unknown."""
    if (nvml := import_nvml()) is None:
        return None
    return read_gpu_joules(found, nvml) if len(found := _find_uuids(count)) == count else None


def find_local_gpu_ids(count: int | None) -> list[str]:
    """Return NVML's ids of these GPUs, or without a count of all that CUDA_VISIBLE_DEVICES allows; empty if unknown."""
    return [f"GPU-{uuid}" for uuid in _find_uuids(count)]


def _find_uuids(count: int | None) -> list[str]:
    try:
        found = [gpu.uuid for gpu in detect_gpus()][:count]
    except UnfitNodeError:
        return []
    return found if all(found) else []
