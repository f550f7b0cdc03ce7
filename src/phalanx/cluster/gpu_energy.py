"""What GPUs have drawn, by their own counters, which NVIDIA's have since Volta (extra `gpu`: nvidia-ml-py)."""

from collections.abc import Sequence
from typing import Any

from phalanx.cluster.discovery import detect_gpus
from phalanx.cluster.gpu_topology import import_nvml, open_nvml
from phalanx.errors import UnfitNodeError


def read_gpu_joules(uuids: Sequence[str], nvml: Any) -> float | None:
    """Joules that these GPUs together have drawn since their driver was loaded, as NVIDIA's library tells. None where
    the library does not work or one of them does not count, and for no GPU."""
    with open_nvml(nvml) as library:
        if library is None or not uuids:
            return None
        try:
            found = [library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
            return float(sum(library.nvmlDeviceGetTotalEnergyConsumption(each) for each in found)) / 1e3
        except library.NVMLError:
            return None


def read_local_gpu_joules(count: int) -> float | None:
    """The same of the first so many GPUs that workers of this machine take; None where that is not known."""
    if (nvml := import_nvml()) is None:
        return None
    try:
        found = [gpu.uuid for gpu in detect_gpus()][:count]
    except UnfitNodeError:
        return None
    return read_gpu_joules(found, nvml) if len(found) == count and all(found) else None
