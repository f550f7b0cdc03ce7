"""The reference product: one fixed matrix product, timed before and after each family of measurements, and later to
check whether the machine still has the speed that it was calibrated at.

It becomes slower when other processes run, when the device is too hot, or when it saves power.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.cluster.calibration.timing import BenchTimer, make_timer, median_seconds_of, round_seconds
from phalanx.cluster.discovery import Machine
from phalanx.cluster.gpu_topology import import_nvml
from phalanx.cluster.gpu_topology import lowest_clock_share as gpu_clock_share
from phalanx.cluster.spec import Measurements
from phalanx.recipe.devices import size_table_of

RunInProcess = Callable[[str, Any], Any]
"""Runs `module:function(payload)` in a separate process."""
REFERENCE_OP = "reference"
REFERENCE_SIDE = {"cpu": 1024, "cuda": 8192}
REFERENCE_PRECISION = {"cpu": "fp32", "cuda": "fp16"}
"""Precision that every CPU, and every GPU since 2017, multiplies fast."""
REFERENCE_DURATION_S = 0.3


def time_reference_gemm(
    machine: Machine, run_in_process: RunInProcess, seconds: float = REFERENCE_DURATION_S
) -> dict[str, Any]:
    """Measure the reference product. Returns the fields of an `OpTiming` of kind "reference", and `clock_share`: the
    clock of the device right after it over its maximum clock, None if unknown."""
    payload = {"device": machine.device, "threads": machine.physical_cores, "seconds": seconds}
    found: dict[str, Any] = run_in_process("phalanx.cluster.calibration.reference_gemm:measure_reference", payload)
    return found


def reference_slowdown(
    machine: Machine, measurements: Measurements, run_in_process: RunInProcess, seconds: float = REFERENCE_DURATION_S
) -> float | None:
    """Return the share by which the reference product takes longer now than in `measurements` (negative: less time).

    Takes about 0.3 s. None if `measurements` has no reference product. Above 0.05, other load or heat affects
    measurements.
    """
    baseline_s = next((timed.seconds for timed in measurements.operations if timed.kind == REFERENCE_OP), None)
    return (
        None
        if baseline_s is None
        else time_reference_gemm(machine, run_in_process, seconds)["timed"]["seconds"] / baseline_s - 1
    )


def measure_reference(
    payload: dict[str, Any], timer: BenchTimer | None = None, root: Path = Path("/")
) -> dict[str, Any]:
    """`payload`: `device`, `threads` (CPU), `seconds`."""
    import torch

    device = payload["device"]
    timer = timer or make_timer(device)
    if device == "cpu":
        torch.set_num_threads(payload["threads"])
    side, precision = REFERENCE_SIDE[size_table_of(device)], REFERENCE_PRECISION[size_table_of(device)]
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[precision]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    (taken,) = median_seconds_of(lambda: (timer.time_call(lambda: a @ b),), payload["seconds"], timer)
    clock = cpu_clock_share(root) if device == "cpu" else gpu_clock_share(import_nvml())
    nbytes, flops = 3.0 * side**2 * dtype.itemsize, 2.0 * side**3
    timed = {
        "kind": REFERENCE_OP,
        "precision": precision,
        "bytes": nbytes,
        "flops": flops,
        "seconds": round_seconds(taken),
    }
    return {"timed": {**timed, "shape": [side] * 3}, "clock_share": clock}


def cpu_clock_share(root: Path = Path("/")) -> float | None:
    """The highest present clock of any core over the highest it can have; None in virtual machines, as a rule. Cores
    that rest are slow, so the fastest one counts."""
    now = [_read_khz(path) for path in root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq")]
    max_khz = [_read_khz(path) for path in root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/cpuinfo_max_freq")]
    return max(now) / max(max_khz) if max(now, default=0) and max(max_khz, default=0) else None


def _read_khz(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # a core that was switched off meanwhile
        return 0
