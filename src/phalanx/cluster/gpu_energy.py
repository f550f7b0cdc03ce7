"""What GPUs have drawn, by their own counters, which NVIDIA's have since Volta (extra `gpu`: nvidia-ml-py)."""

from collections.abc import Sequence
from typing import Any

from phalanx.cluster.discover import accelerators
from phalanx.cluster.gpu_links import asked, find_nvml
from phalanx.errors import UnfitNodeError


def joules(uuids: Sequence[str], nvml: Any) -> float | None:
    """Joules that these GPUs together have drawn since their driver was loaded, as NVIDIA's library tells. None where
    the library does not work or one of them does not count, and for no GPU."""
    with asked(nvml) as library:
        if library is None or not uuids:
            return None
        try:
            found = [library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
            return float(sum(library.nvmlDeviceGetTotalEnergyConsumption(each) for each in found)) / 1e3
        except library.NVMLError:
            return None


def joules_here(count: int) -> float | None:
    """The same of the first so many GPUs that workers of this machine take; None where that is not known."""
    if (nvml := find_nvml()) is None:
        return None
    try:
        found = [gpu.uuid for gpu in accelerators()][:count]
    except UnfitNodeError:
        return None
    return joules(found, nvml) if len(found) == count and all(found) else None
