"""Check `matmul`: measure the reference product on each device, and compare it with the calibration and with the other
devices of this machine. Imports torch, so it runs in a separate process.
"""

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.cluster.calibration.hardware_key import hardware_key
from phalanx.cluster.calibration.timing import REFERENCE_OP, time_reference_gemm
from phalanx.cluster.discovery import Machine, discover_machine
from phalanx.cluster.health.finding import CheckContext, FindingValue, HealthFinding, HealthVerdict, evaluate_threshold
from phalanx.cluster.load import load_cluster
from phalanx.cluster.spec import Measurements
from phalanx.errors import RecipeError

MEASUREMENT_S = 0.3
MAX_REPEATS = 8
"""Maximum measurements of a slow device. Other load comes in bursts, and the best measurement counts."""
REPEAT_INTERVAL_S = 0.3
"""Seconds between measurements, so that a burst can pass."""
MAX_FILES_READ = 8
"""Calibrations that are read, the newest first: each takes 0.5 s."""
MIN_PEERS = 3
"""Minimum number of devices or nodes for which a median identifies slow ones."""


@dataclass(frozen=True)
class MatmulTiming:
    """The reference product on one device: its lowest time in seconds."""

    time_s: float
    flops: float

    @property
    def tflops(self) -> float:
        return self.flops / self.time_s / 1e12


def measure_matmul_timing(
    machine: Machine,
    run_in_process: Callable[[str, Any], Any],
    baseline: float | None,
    sleep: Callable[[float], None] = time.sleep,
) -> MatmulTiming:
    """Time the reference product, up to `MAX_REPEATS` times while it is slower than the baseline allows."""
    best: MatmulTiming | None = None
    for number in range(MAX_REPEATS):
        if number:
            sleep(REPEAT_INTERVAL_S)
        row = time_reference_gemm(machine, run_in_process, MEASUREMENT_S)
        if best is None or row["seconds"] < best.time_s:
            best = MatmulTiming(row["seconds"], row["flops"])
        if (
            baseline is None
            or evaluate_threshold("matmul slowdown", slowdown_share(best.time_s, baseline)) is HealthVerdict.PASS
        ):
            break
    assert best is not None
    return best


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
            "baseline_s": baseline,
        }
        if baseline is None and len(timings) < MIN_PEERS:
            summary += "; nothing to compare with: `phalanx calibrate` remembers this machine's rate"
        else:
            share = slowdown_share(timing.time_s, reference_s or median)
            verdict = evaluate_threshold("matmul slowdown", share)
            summary += f", {format_relative_speed(share)} {reference}"
            if verdict is not HealthVerdict.PASS:
                summary += "; see heat and power limits, or what else runs here"
        found.append(HealthFinding(check, verdict, summary, figures))
    return found


def find_calibration(context: CheckContext, key: dict[str, str]) -> Measurements | None:
    """Return the newest calibration with this key, except for the number of GPUs: one may be lost."""
    required = {name: text for name, text in key.items() if name != "count"}
    files = sorted((context.cache_dir / "clusters").glob("*.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[:MAX_FILES_READ]:
        try:
            measured = load_cluster(str(path)).measured
        except RecipeError:  # incomplete, or of another version: `phalanx calibrate` rewrites it
            continue
        if measured is not None and required.items() <= measured.key.items():
            return measured
    return None


def check_matmul(context: CheckContext) -> list[HealthFinding]:
    machine = discover_machine(context.root)
    measurements = find_calibration(context, hardware_key(machine, context.root))
    baseline = baseline_seconds(measurements)
    each = [measure_matmul_timing(machine, call_on_device(index), baseline) for index in range(machine.device_count)]
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
