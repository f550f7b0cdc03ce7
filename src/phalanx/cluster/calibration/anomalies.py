"""Find implausible measurements, and say what to do about each. Pure functions of values."""

from collections.abc import Sequence

from phalanx.cluster.spec import (
    AcceleratorSpec,
    CollectiveTiming,
    GemmTiming,
    Measurements,
    OpTiming,
    ScaleUpNetwork,
    StorageSpec,
)
from phalanx.formatting import format_bytes

MIN_SHARE_OF_DATA_SHEET = 0.3
"""Share of the data-sheet peak. A lower rate means a fault, not missing tuning."""
MAX_DRIFT = 0.05
MAX_BUSY_CORES = 0.3
"""Cores that background processes of an idle system may use."""
MIN_DISK_GB_PER_S = 0.05
"""GB/s; a disk at this rate takes 20 s for 1 GB."""
MIN_CLOCK_SHARE = 0.7
MIN_GEMM_FLOPS = 1e9
"""FLOPs from which the rate of a product depends on the device, not on launch overhead."""
MIN_LINK_BYTES = 2**24
"""Bytes from which the bandwidth of a collective depends on the link, not on latency."""
MAX_BF16_SLOWDOWN = 1.1


def find_anomalies(
    accelerator: AcceleratorSpec,
    measurements: Measurements,
    clock_share: float | None,
    scale_up: ScaleUpNetwork | None,
    link_warnings: Sequence[str] = (),
) -> list[str]:
    """Return one sentence for each finding. `accelerator` and `scale_up` hold data-sheet values; `clock_share` is the
    clock under load as a share of its maximum."""
    return [
        *_check_drift(measurements.drift),
        *_check_clock(clock_share),
        *_check_gemm_rates(accelerator, measurements.products),
        *_check_bf16(measurements.products),
        *_check_memory_bandwidth(accelerator, measurements.operations),
        *link_warnings,
        *_check_collectives(measurements.collectives, scale_up),
        *_check_storage(measurements.storage),
    ]


def best_gemm_tflops(gemms: Sequence[GemmTiming]) -> dict[str, float]:
    """Return TFLOP/s of the fastest product that one process measured alone, by precision."""
    found: dict[str, float] = {}
    for each in gemms:
        if each.processes == 1:
            rate = 2 * each.m * each.n * each.k / each.seconds / 1e12
            found[each.precision] = max(rate, found.get(each.precision, 0.0))
    return found


def measured_memory_bandwidth(ops: Sequence[OpTiming]) -> float | None:
    """Return the memory bandwidth in GB/s from the largest addition, which no cache holds.

    On CPUs only tensors up to 32 MiB count: larger ones include page faults of the operating system.
    """
    added = [each for each in ops if each.kind == "add" and each.precision == "fp32" and each.processes == 1]
    cached_sizes = (
        [each for each in added if each.bytes < 3 * 2**25] if any(e.kind == "fresh_memory" for e in ops) else added
    )
    largest = max(cached_sizes or added, key=lambda each: each.bytes, default=None)
    return None if largest is None else largest.bytes / largest.seconds / 1e9


def find_background_load(busy: float | None) -> list[str]:
    """Report `busy` cores that other processes used before the measurements began."""
    if busy is None or busy < MAX_BUSY_CORES:
        return []
    return [
        f"other processes used {busy:.1f} cores before the measurements: all rates are too low; run on an idle machine"
    ]


def _check_drift(drift: float) -> list[str]:
    if drift <= MAX_DRIFT:
        return []
    return [
        f"the reference product took up to {drift:.0%} longer at times: other processes ran, or the device is too "
        "hot; run again on an idle machine"
    ]


def _check_clock(share: float | None) -> list[str]:
    if share is None or share >= MIN_CLOCK_SHARE:
        return []
    return [f"the clock under load was at {share:.0%} of its maximum: heat, a power limit, or a power-saving mode"]


def _check_gemm_rates(device: AcceleratorSpec, gemms: Sequence[GemmTiming]) -> list[str]:
    large = [each for each in gemms if 2 * each.m * each.n * each.k >= MIN_GEMM_FLOPS] or list(gemms)
    found = []
    for precision, rate in best_gemm_tflops(large).items():
        sheet = device.tflops.get(precision)  # type: ignore[call-overload]
        if sheet and rate < MIN_SHARE_OF_DATA_SHEET * sheet:
            found.append(f"{precision} products reach {rate:.3g} of {sheet:.3g} TFLOP/s ({rate / sheet:.0%})")
    return found


def _check_bf16(gemms: Sequence[GemmTiming]) -> list[str]:
    """Compare bf16 with fp32 on the shapes that both were measured with."""
    by_shape: dict[tuple[object, ...], dict[str, float]] = {}
    for each in gemms:
        by_shape.setdefault((each.m, each.n, each.k, each.layout, each.processes), {})[each.precision] = each.seconds
    pairs = [(times["fp32"], times["bf16"]) for times in by_shape.values() if {"fp32", "bf16"} <= set(times)]
    fp32, bf16 = (sum(times) for times in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    if bf16 <= MAX_BF16_SLOWDOWN * fp32:
        return []
    return [
        f"bf16 products take {bf16 / fp32:.1f} times as long as fp32: this device has no hardware for them; use fp32"
    ]


def _check_memory_bandwidth(device: AcceleratorSpec, operations: Sequence[OpTiming]) -> list[str]:
    rate = measured_memory_bandwidth(operations)
    if rate is None or not device.memory_gbps or rate >= MIN_SHARE_OF_DATA_SHEET * device.memory_gbps:
        return []
    return [f"memory gives {rate:.3g} of {device.memory_gbps:.3g} GB/s ({rate / device.memory_gbps:.0%})"]


def _check_collectives(collectives: Sequence[CollectiveTiming], scale_up: ScaleUpNetwork | None) -> list[str]:
    incorrect = sorted({f"{each.kind} ({each.backend}, {each.ranks} ranks)" for each in collectives if not each.right})
    found = (
        [f"WRONG RESULTS of {', '.join(incorrect)}: do not train here before the cause is known"] if incorrect else []
    )
    large = [each for each in collectives if each.kind == "all_reduce" and each.bytes >= MIN_LINK_BYTES]
    best = max((each.busbw_gbps for each in large), default=None)
    if best is not None and scale_up is not None and best < MIN_SHARE_OF_DATA_SHEET * scale_up.gbps:
        found.append(
            f"an all-reduce reaches {best:.3g} of the {scale_up.gbps:.3g} GB/s of {scale_up.link} "
            f"({best / scale_up.gbps:.0%}): run with NCCL_DEBUG=INFO to see whether it is used"
        )
    return found


def _check_storage(storage: StorageSpec | None) -> list[str]:
    if storage is None:
        return []
    rates = {"writes": storage.node_write_gbps, "reads": storage.node_read_gbps}
    return [
        f"the disk {operation} {format_bytes(1e9 * rate)}/s: training will wait for checkpoints and data; "
        "choose another --dir"
        for operation, rate in rates.items()
        if rate is not None and rate < MIN_DISK_GB_PER_S
    ]
