"""Check `matmul`: the reference product now, on each device, against what `phalanx calibrate` measured here and
beside the other devices here. Measures with torch: for a process of its own.
"""

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.cluster.calibration.background_load import count_busy_cores
from phalanx.cluster.calibration.hardware_key import hardware_key
from phalanx.cluster.calibration.reference_gemm import REFERENCE_OP, time_reference_gemm
from phalanx.cluster.discovery import Machine, discover_machine
from phalanx.cluster.health.baseline import find_baseline
from phalanx.cluster.health.context import CheckContext
from phalanx.cluster.health.finding import FindingValue, HealthFinding, HealthVerdict
from phalanx.cluster.health.thresholds import evaluate_threshold
from phalanx.cluster.spec import Measurements

MEASUREMENT_S = 0.3
MAX_REPEATS = 8
"""How often a slow one is measured at most: what else runs comes in bursts, and the best counts."""
REPEAT_INTERVAL_S = 0.3
"""Seconds between, so that a burst may pass."""


@dataclass(frozen=True)
class MatmulTiming:
    """The reference product on one device: the least seconds of it, and its clock over the highest, if known."""

    time_s: float
    flops: float
    clock_share: float | None = None
    other_busy_cores: float | None = None
    """Cores that other programs kept busy meanwhile; of CPUs only."""

    @property
    def tflops(self) -> float:
        return self.flops / self.time_s / 1e12


def measure_matmul_timing(
    machine: Machine,
    run_in_process: Callable[[str, Any], Any],
    baseline: float | None,
    root: Path = Path("/"),
    clock: Callable[[], float] = time.monotonic,
    own_cpu_time: Callable[[], float] = time.process_time,
    sleep: Callable[[float], None] = time.sleep,
) -> MatmulTiming:
    """As `time_reference_gemm` finds it; again, for a few times, while it is slower than the baseline allows.
    `own_cpu_time` tells how many seconds all threads of this process, in which it is measured, have computed."""
    best: MatmulTiming | None = None
    for number in range(MAX_REPEATS):
        if number:
            sleep(REPEAT_INTERVAL_S)
        timing = _measure_once(machine, run_in_process, root, clock, own_cpu_time)
        clock_shares = [
            each.clock_share for each in (best, timing) if each is not None and each.clock_share is not None
        ]
        best = timing if best is None or timing.time_s < best.time_s else best
        best = replace(best, clock_share=max(clock_shares, default=None))
        if (
            baseline is None
            or evaluate_threshold("matmul slowdown", slowdown_share(best.time_s, baseline)) is HealthVerdict.PASS
        ):
            break
    assert best is not None
    return best


def _measure_once(
    machine: Machine,
    run_in_process: Callable[[str, Any], Any],
    root: Path,
    clock: Callable[[], float],
    own_cpu_time: Callable[[], float],
) -> MatmulTiming:
    found: dict[str, Any] = {}
    started, cpu_started = clock(), own_cpu_time()
    busy = count_busy_cores(root, lambda _: found.update(time_reference_gemm(machine, run_in_process, MEASUREMENT_S)))
    own_cores = (own_cpu_time() - cpu_started) / max(clock() - started, 1e-9)
    others = max(0.0, busy - own_cores) if busy is not None and machine.device == "cpu" else None
    return MatmulTiming(found["timed"]["seconds"], found["timed"]["flops"], found["clock_share"], others)


def slowdown_share(seconds: float, baseline: float) -> float:
    """The share of the baseline's rate that is missing; negative when it is faster."""
    return 1 - baseline / seconds


def format_relative_speed(share: float) -> str:
    """A share of a rate that is missing, in words before whom it is held against."""
    if abs(share) < 0.005:
        return "as fast as"
    return f"{abs(share):.0%} {'below' if share > 0 else 'above'}"


def baseline_seconds(measurements: Measurements | None) -> float | None:
    """Seconds of the reference product when the machine was probed."""
    operations = measurements.operations if measurements else []
    return next((timed.seconds for timed in operations if timed.kind == REFERENCE_OP), None)


def evaluate_matmul(
    name: str, timings: Sequence[MatmulTiming], baseline: float | None, baseline_date: str
) -> list[HealthFinding]:
    """One finding a device: against the baseline of that date, else against the median of at least three devices."""
    median = statistics.median(timing.time_s for timing in timings)
    reference, reference_s = (
        (f"the probe of {baseline_date}", baseline) if baseline is not None else ("the median of its peers", median)
    )
    found = []
    for index, timing in enumerate(timings):
        check = "matmul" if len(timings) == 1 else f"matmul/gpu{index}"
        summary, verdict = f"{timing.tflops:.3g} TFLOP/s", HealthVerdict.PASS
        figures: dict[str, FindingValue] = {
            "device": name,
            "seconds": timing.time_s,
            "tflops": timing.tflops,
            "clock_share": timing.clock_share,
            "baseline_seconds": baseline,
            "others": timing.other_busy_cores,
        }
        if baseline is None and len(timings) < MIN_PEERS:
            summary += "; nothing to compare with: `phalanx calibrate` remembers this machine's rate"
        else:
            share = slowdown_share(timing.time_s, reference_s or median)
            verdict = evaluate_threshold("matmul slowdown", share)
            summary += f", {format_relative_speed(share)} {reference}"
            if verdict is not HealthVerdict.PASS:
                summary += _explain_slowness(timing.other_busy_cores)
        if timing.clock_share is not None and verdict is HealthVerdict.PASS:
            verdict = evaluate_threshold("clock under load", timing.clock_share)
            summary += (
                f"; clock at {timing.clock_share:.0%} of its highest" if verdict is not HealthVerdict.PASS else ""
            )
        found.append(HealthFinding(check, verdict, summary, figures))
    return found


def _explain_slowness(other_busy_cores: float | None) -> str:
    """Why it may be slow."""
    if other_busy_cores is not None and evaluate_threshold("busy cores", other_busy_cores) is not HealthVerdict.PASS:
        return (
            f"; other programs kept {other_busy_cores:.1f} cores busy meanwhile: end them, or look again when it is "
            "quiet"
        )
    return "; see heat and power limits, or what else runs here"


MIN_PEERS = 3
"""Devices, or nodes, among which a median says who is slow."""


def check_matmul(context: CheckContext) -> list[HealthFinding]:
    machine = discover_machine(context.root)
    cluster = find_baseline(context, hardware_key(machine, context.root), ignored_fields={"count"})
    measurements = cluster.measured if cluster else None
    baseline = baseline_seconds(measurements)
    each = [
        measure_matmul_timing(machine, call_on_device(index), baseline, context.root)
        for index in range(machine.device_count)
    ]
    return evaluate_matmul(machine.device_name, each, baseline, measurements.when[:10] if measurements else "")


def call_on_device(index: int) -> Callable[[str, Any], Any]:
    """Calls in this very process, on the GPU of that number where there are any."""

    def call_function(function: str, payload: dict[str, Any]) -> Any:
        if (device := payload["device"]) != "cpu":
            import torch

            torch.get_device_module(device).set_device(index)
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(payload)

    return call_function
