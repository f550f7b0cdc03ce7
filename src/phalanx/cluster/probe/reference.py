"""The reference product: one matrix product that is timed before and after each family of measurements, and whenever
somebody asks whether this machine still is what it was when it was measured.

A machine that others use, that is too hot or saves power shows it here. Which product it is never changes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.cluster.description import Measured
from phalanx.cluster.discover import Machine
from phalanx.cluster.gpu_links import clock_share as gpu_clock_share
from phalanx.cluster.gpu_links import find_nvml
from phalanx.cluster.probe.timing import Watch, medians, rounded, watch_for
from phalanx.recipe.devices import sizes_for

Call = Callable[[str, Any], Any]
"""Runs `module:function(payload)` in a process of its own."""
KIND = "reference"
SIDE = {"cpu": 1024, "cuda": 8192}
PRECISION = {"cpu": "fp32", "cuda": "fp16"}
"""What every CPU, and every GPU since 2017, multiplies well."""
SECONDS = 0.3


def time_reference(machine: Machine, call: Call, seconds: float = SECONDS) -> dict[str, Any]:
    """The reference product now, as the fields of a `Timed` of kind "reference", and `clock_share`: the clock of the
    device just after it over the highest it can have, None where nothing tells."""
    payload = {"device": machine.device, "threads": machine.cores, "seconds": seconds}
    found: dict[str, Any] = call("phalanx.cluster.probe.reference:measure", payload)
    return found


def verify_reference(machine: Machine, measured: Measured, call: Call, seconds: float = SECONDS) -> float | None:
    """By what share the reference product takes longer now than when `measured` was found (negative: less), in about
    0.3 s; None where it was not measured. Above 0.05 one measures something else than the machine alone."""
    then = next((timed.seconds for timed in measured.operations if timed.kind == KIND), None)
    return None if then is None else time_reference(machine, call, seconds)["timed"]["seconds"] / then - 1


def measure(payload: dict[str, Any], watch: Watch | None = None, root: Path = Path("/")) -> dict[str, Any]:
    """`payload`: `device`, `threads` (CPU), `seconds`."""
    import torch

    device = payload["device"]
    watch = watch or watch_for(device)
    if device == "cpu":
        torch.set_num_threads(payload["threads"])
    side, precision = SIDE[sizes_for(device)], PRECISION[sizes_for(device)]
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[precision]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    (taken,) = medians(lambda: (watch.took(lambda: a @ b),), payload["seconds"], watch)
    clock = cpu_clock_share(root) if device == "cpu" else gpu_clock_share(find_nvml())
    nbytes, flops = 3.0 * side**2 * dtype.itemsize, 2.0 * side**3
    timed = {"kind": KIND, "precision": precision, "bytes": nbytes, "flops": flops, "seconds": rounded(taken)}
    return {"timed": {**timed, "shape": [side] * 3}, "clock_share": clock}


def cpu_clock_share(root: Path = Path("/")) -> float | None:
    """The highest present clock of any core over the highest it can have; None in virtual machines, as a rule. Cores
    that rest are slow, so the fastest one counts."""
    now = [_khz(path) for path in root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq")]
    most = [_khz(path) for path in root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/cpuinfo_max_freq")]
    return max(now) / max(most) if max(now, default=0) and max(most, default=0) else None


def _khz(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # a core that was switched off meanwhile
        return 0
