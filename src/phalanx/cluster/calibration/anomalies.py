"""Find implausible measurements, and say what to do about each. Pure functions of values."""

import math
from collections.abc import Sequence

from phalanx.cluster.spec import (
    AcceleratorSpec,
    CollectiveTiming,
    GemmTiming,
    Measurements,
    OpTiming,
    ScaleUpNetwork,
)

MIN_SHARE_OF_DATA_SHEET = 0.3
"""Share of the data-sheet peak. A lower rate means a fault, not missing tuning."""
MAX_DRIFT = 0.05
MAX_BUSY_CORES = 0.3
"""Cores that background processes of an idle system may use."""
MIN_GEMM_FLOPS = 1e9
"""FLOPs from which the rate of a product depends on the device, not on launch overhead."""
MIN_LINK_BYTES = 2**24
"""Bytes from which the bandwidth of a collective depends on the link, not on latency."""


def find_anomalies(
    accelerator: AcceleratorSpec,
    measurements: Measurements,
    scale_up: ScaleUpNetwork | None,
) -> list[str]:
    """Return one sentence for each finding. `accelerator` and `scale_up` hold data-sheet values."""
    found = []
    if measurements.busy_cores >= MAX_BUSY_CORES:
        busy = f"other processes used {measurements.busy_cores:.1f} cores before the measurements"
        found.append(f"{busy}: all rates are too low; run on an idle machine")
    if measurements.drift > MAX_DRIFT:
        found.append(
            f"the reference product took up to {measurements.drift:.0%} longer at times: other processes ran, or the "
            "device is too hot; run again on an idle machine"
        )
    found += _check_gemm_rates(accelerator, measurements.products)
    return found + _check_collectives(measurements.collectives, scale_up)


def best_gemm_tflops(gemms: Sequence[GemmTiming]) -> dict[str, float]:
    """Return TFLOP/s of the fastest product that one process measured alone, by precision."""
    found: dict[str, float] = {}
    for each in gemms:
        if each.processes == 1:
            rate = 2 * each.m * each.n * each.k / each.seconds / 1e12
            found[each.precision] = max(rate, found.get(each.precision, 0.0))
    return found


def measured_memory_bandwidth(ops: Sequence[OpTiming], device: str) -> float | None:
    """Return the memory bandwidth in GB/s from the largest addition, which no cache holds. On CPUs only tensors up to
    32 MiB count: larger ones include page faults of the operating system."""
    max_bytes = 3 * 2**25 if device == "cpu" else math.inf
    additions = [
        each
        for each in ops
        if each.kind == "add" and each.precision == "fp32" and each.processes == 1 and each.bytes < max_bytes
    ]
    largest = max(additions, key=lambda each: each.bytes, default=None)
    return None if largest is None else largest.bytes / largest.seconds / 1e9


def _check_gemm_rates(device: AcceleratorSpec, gemms: Sequence[GemmTiming]) -> list[str]:
    large = [each for each in gemms if 2 * each.m * each.n * each.k >= MIN_GEMM_FLOPS] or list(gemms)
    found = []
    for precision, rate in best_gemm_tflops(large).items():
        sheet = device.tflops.get(precision)  # type: ignore[call-overload]
        if sheet and rate < MIN_SHARE_OF_DATA_SHEET * sheet:
            found.append(f"{precision} products reach {rate:.3g} of {sheet:.3g} TFLOP/s ({rate / sheet:.0%})")
    return found


def _check_collectives(collectives: Sequence[CollectiveTiming], scale_up: ScaleUpNetwork | None) -> list[str]:
    incorrect = sorted({f"{each.kind} ({each.backend}, {each.ranks} ranks)" for each in collectives if not each.right})
    found = (
        [f"WRONG RESULTS of {', '.join(incorrect)}: do not train here before the cause is known"] if incorrect else []
    )
    large = [each for each in collectives if each.bytes >= MIN_LINK_BYTES]
    best = max((each.busbw_gbps for each in large), default=None)
    if best is not None and scale_up is not None and best < MIN_SHARE_OF_DATA_SHEET * scale_up.gbps:
        found.append(
            f"an all-reduce reaches {best:.3g} of the {scale_up.gbps:.3g} GB/s of {scale_up.link} "
            f"({best / scale_up.gbps:.0%}): run with NCCL_DEBUG=INFO to see whether it is used"
        )
    return found
