"""Check `matmul`: measure the reference product on each device, and compare it with the calibration and with the other
devices of this machine. Imports torch, so it runs in a separate process.
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
"""Maximum measurements of a slow device. Other load comes in bursts, and the best measurement counts."""
REPEAT_INTERVAL_S = 0.3
"""Seconds between measurements, so that a burst can pass."""


@dataclass(frozen=True)
class MatmulTiming:
    """The reference product on one device: its lowest time in seconds, and the clock over the maximum clock, if
    known."""

    time_s: float
    flops: float
    clock_share: float | None = None
    other_busy_cores: float | None = None
    """Cores that other programs used during the measurement; CPU only."""

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
    """Run `time_reference_gemm`, and repeat it up to `MAX_REPEATS` times while it is slower than the baseline allows.

    `own_cpu_time` returns the CPU seconds of all threads of this process, which runs the measurement.
    """
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
    """Return the share of the baseline's rate that is missing; negative if faster."""
    return 1 - baseline / seconds


def format_relative_speed(share: float) -> str:
    """Format a missing share of a rate, as "12% below" or "as fast as", to be followed by the reference."""
    if abs(share) < 0.005:
        return "as fast as"
    return f"{abs(share):.0%} {'below' if share > 0 else 'above'}"


def baseline_seconds(measurements: Measurements | None) -> float | None:
    """Return the seconds of the reference product in a calibration."""
    operations = measurements.operations if measurements else []
    return next((timed.seconds for timed in operations if timed.kind == REFERENCE_OP), None)


def evaluate_matmul(
    name: str, timings: Sequence[MatmulTiming], baseline: float | None, baseline_date: str
) -> list[HealthFinding]:
    """Return one finding per device: compared with the calibration, else with the median of at least 3 devices."""
    median = statistics.median(timing.time_s for timing in timings)
    reference, reference_s = (
        ("the median of its peers", median) if baseline is None else (f"the calibration of {baseline_date}", baseline)
    )
    found = []
    for index, timing in enumerate(timings):
        check = "matmul" if len(timings) == 1 else f"matmul/gpu{index}"
        summary, verdict = f"{timing.tflops:.3g} TFLOP/s", HealthVerdict.PASS
        figures: dict[str, FindingValue] = {
            "device": name,
            "time_s": timing.time_s,
            "tflops": timing.tflops,
            "clock_share": timing.clock_share,
            "baseline_s": baseline,
            "other_busy_cores": timing.other_busy_cores,
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
                f"; clock at {timing.clock_share:.0%} of its maximum" if verdict is not HealthVerdict.PASS else ""
            )
        found.append(HealthFinding(check, verdict, summary, figures))
    return found


def _explain_slowness(other_busy_cores: float | None) -> str:
    """Return a possible cause of a slow device."""
    if other_busy_cores is not None and evaluate_threshold("busy cores", other_busy_cores) is not HealthVerdict.PASS:
        return f"; other programs used {other_busy_cores:.1f} cores: end them, or run again on an idle machine"
    return "; see heat and power limits, or what else runs here"


MIN_PEERS = 3
"""Minimum number of devices or nodes for which a median identifies slow ones."""


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
    """Return a function that runs calls in this process, on the GPU with this index if there is one."""

    def call_function(function: str, payload: dict[str, Any]) -> Any:
        if (device := payload["device"]) != "cpu":
            import torch

            torch.get_device_module(device).set_device(index)
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(payload)

    return call_function
