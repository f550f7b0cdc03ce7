"""Check `gpus`: the number of GPUs, and whether each responds, is cool, not throttled, unused, and has healthy memory
and links.

Without NVML (`nvidia-ml-py`) GPUs are counted in /proc, and the rest is unknown. NVML may hang on a faulty GPU: run
this check in a process that can be killed.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.cluster.device_links import GpuLinks, discover_gpu_links
from phalanx.cluster.discovery import GPU_DEVICE_FILES
from phalanx.cluster.health.finding import (
    CheckContext,
    FindingValue,
    HealthFinding,
    HealthVerdict,
    evaluate_threshold,
    worst_verdict,
)
from phalanx.cluster.system_files import read_small_int

THROTTLE_REASONS = {
    0x08: ("the hardware slows its clock down (heat, power or a fault of its board)", HealthVerdict.FAIL),
    0x40: ("the hardware slows its clock down: too hot", HealthVerdict.FAIL),
    0x80: ("the power supply slows its clock down", HealthVerdict.FAIL),
    0x20: ("the driver slows its clock down: too hot", HealthVerdict.WARN),
}
"""Meaning of NVML's clock event reasons (nvmlClocksEventReasons). Idle clocks and power limits are not faults."""

NVIDIA_DEVICE_FILES = ("dev/nvidiactl", "dev/dxg")
"""NVML can only work where one of these exists."""
NVML_LIBRARY_NOT_FOUND = 12
"""NVML_ERROR_LIBRARY_NOT_FOUND: the driver may work, but NVML is missing."""


@dataclass(frozen=True)
class GpuState:
    """State of one GPU from NVML; None for unknown values."""

    index: int
    name: str = ""
    unreachable_reason: str | None = None
    """Error when the GPU does not respond."""
    used_memory_share: float | None = None
    temperature_margin_k: float | None = None
    """Kelvin below the temperature at which the GPU slows down."""
    throttle_bits: int = 0
    corrected_ecc_errors: int | None = None
    uncorrected_ecc_errors: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    process_ids: tuple[int, ...] = ()


def count_gpus(root: Path) -> int:
    """Count GPUs without calling the driver: NVIDIA's from /proc, AMD's from the topology in sysfs."""
    nvidia = root / "proc/driver/nvidia/gpus"
    if nvidia.is_dir():
        return len(list(nvidia.iterdir()))
    nodes = root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id")
    return sum((read_small_int(path) or 0) > 0 for path in nodes)  # CPUs are nodes with gpu_id 0


def can_count_gpus(root: Path) -> bool:
    """Whether `count_gpus` can see GPUs at all: containers and sandboxes may hide the folders of drivers."""
    return any((root / name).is_dir() for name in ("proc/driver/nvidia/gpus", "sys/class/kfd/kfd/topology/nodes"))


def _query_gpu(nvml: Any, index: int) -> GpuState:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = nvml.nvmlDeviceGetName(handle)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        return GpuState(index, unreachable_reason=str(error))

    def query(function: str, *arguments: Any) -> Any:
        """Return the result of an NVML function; None if the GPU, its driver or this NVML does not support it."""
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            return getattr(nvml, function)(handle, *arguments)
        return None

    slowdown_c, temperature_c = query("nvmlDeviceGetTemperatureThreshold", 1), query("nvmlDeviceGetTemperature", 0)
    # corrected errors since the driver was loaded, then those that were not corrected
    corrected, uncorrected = (query("nvmlDeviceGetTotalEccErrors", kind, 0) for kind in (0, 1))
    rows = query("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)
    running = query("nvmlDeviceGetComputeRunningProcesses") or []
    return GpuState(
        index,
        name.decode() if isinstance(name, bytes) else str(name),
        used_memory_share=memory.used / memory.total,
        temperature_margin_k=float(slowdown_c - temperature_c) if slowdown_c and temperature_c is not None else None,
        throttle_bits=int(
            query("nvmlDeviceGetCurrentClocksEventReasons") or query("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        ),
        corrected_ecc_errors=corrected,
        uncorrected_ecc_errors=uncorrected,
        remap_pending=bool(rows[2]) or bool(query("nvmlDeviceGetRetiredPagesPendingStatus")),
        remap_failed=bool(rows[3]),
        process_ids=tuple(int(each.pid) for each in running),
    )


def find_gpu_problems(gpu: GpuState) -> list[tuple[HealthVerdict, str]]:
    if gpu.unreachable_reason is not None:
        return [
            (HealthVerdict.FAIL, f"it does not answer ({gpu.unreachable_reason}): reset it, or restart the machine")
        ]
    found = [(verdict, text) for bit, (text, verdict) in THROTTLE_REASONS.items() if gpu.throttle_bits & bit]
    if gpu.uncorrected_ecc_errors:
        text = f"{gpu.uncorrected_ecc_errors} memory errors that could not be corrected since the driver was loaded"
        found.append((HealthVerdict.FAIL, f"{text}: reset it"))
    if gpu.remap_failed:
        found.append((HealthVerdict.FAIL, "bad memory could not be replaced (row remapping failed): replace the board"))
    if gpu.remap_pending:
        found.append((HealthVerdict.WARN, "bad memory is replaced at the next reset: reset it soon"))
    pids = ", ".join(map(str, gpu.process_ids))
    holder = f"process {pids}" if pids else "a process that cannot be seen"
    measured: list[tuple[str, float | None, Callable[[float], str]]] = [
        ("corrected ECC errors", gpu.corrected_ecc_errors, lambda value: f"{value:.3g} corrected memory errors"),
        (
            "GPU temperature margin",
            gpu.temperature_margin_k,
            lambda value: f"{value:.0f} degrees below where it slows down: see cooling",
        ),
        ("GPU memory in use", gpu.used_memory_share, lambda value: f"{value:.0%} of its memory is held by {holder}"),
    ]
    for name, value, describe in measured:
        if value is not None and (verdict := evaluate_threshold(name, value)) is not HealthVerdict.PASS:
            found.append((verdict, describe(value)))
    return found


def evaluate_gpus(gpus: list[GpuState]) -> list[HealthFinding]:
    """A finding for each that has something wrong, or one for all."""
    found = []
    for gpu in gpus:
        if problems := find_gpu_problems(gpu):
            text = "; ".join(words for _, words in problems)
            figures: dict[str, FindingValue] = {
                "index": gpu.index,
                "temperature_margin_k": gpu.temperature_margin_k,
                "used_memory_share": gpu.used_memory_share,
            }
            found.append(
                HealthFinding(f"gpus/gpu{gpu.index}", worst_verdict(verdict for verdict, _ in problems), text, figures)
            )
    hottest = min((gpu.temperature_margin_k for gpu in gpus if gpu.temperature_margin_k is not None), default=None)
    margin_text = "" if hottest is None else f", at least {hottest:.0f} degrees below slowing down"
    return found or [
        HealthFinding("gpus/state", HealthVerdict.PASS, f"all answer, nothing slows them down{margin_text}")
    ]


def evaluate_gpu_count(count: int, expected: int | None) -> HealthFinding:
    """Compare the number of GPUs with the expected one."""
    figures: dict[str, FindingValue] = {"count": count, "expected": expected}
    if expected is not None and count < expected:
        text = f"{count} GPUs where {expected} are expected: see dmesg for XID 79, and the seat of the cards"
        return HealthFinding("gpus/count", HealthVerdict.FAIL, text, figures)
    if expected is not None and count > expected:
        return HealthFinding("gpus/count", HealthVerdict.WARN, f"{count} GPUs where {expected} are expected", figures)
    summary = f"{count} GPUs" if count else "no GPU: a CPU trains"
    summary += "" if expected is None else ", as expected"
    return HealthFinding("gpus/count", HealthVerdict.PASS, summary, figures)


def evaluate_gpu_links(found: tuple[GpuLinks, ...]) -> list[HealthFinding]:
    """Report missing PCIe lanes and NVLinks."""
    problems = [each.narrow_link_warning for each in found if each.narrow_link_warning]
    max_nvlinks = max((each.nvlinks for each in found), default=0)
    problems += [
        f"GPU {each.pci_address}: {each.nvlinks} of {max_nvlinks} NVLinks are up"
        for each in found
        if each.nvlinks < max_nvlinks
    ]
    if problems:
        return [HealthFinding("gpus/links", HealthVerdict.WARN, "; ".join(problems))]
    if not found:
        return []
    nvlinks = f"{max_nvlinks} NVLinks each" if max_nvlinks else "no NVLinks"
    summary = f"PCIe links have all their lanes; {nvlinks}"
    return [HealthFinding("gpus/links", HealthVerdict.PASS, summary, {"num_nvlinks": max_nvlinks})]


def check_gpus(context: CheckContext, nvml: Any) -> list[HealthFinding]:
    """Check all GPUs. `nvml` is NVIDIA's library, or None."""
    expected = context.expected_devices
    if not any((context.root / name).exists() for name in GPU_DEVICE_FILES):
        return [evaluate_gpu_count(0, expected)]
    if not any((context.root / name).exists() for name in NVIDIA_DEVICE_FILES):
        return _findings_without_nvml(context, "read of NVIDIA's GPUs only")
    if nvml is None:
        advice = "read by the package nvidia-ml-py, which is missing (pip install 'phalanx[gpu]')"
        return _findings_without_nvml(context, advice)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if getattr(error, "value", None) == NVML_LIBRARY_NOT_FOUND:
            return _findings_without_nvml(context, "read by libnvidia-ml, which is not in this container")
        text = f"a GPU driver is loaded, but does not answer ({error}): see dmesg, or restart the machine"
        return [HealthFinding("gpus/count", HealthVerdict.FAIL, text)]
    try:
        gpus = [_query_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        found = [
            evaluate_gpu_count(sum(gpu.unreachable_reason is None for gpu in gpus), expected),
            *evaluate_gpus(gpus),
        ]
        if all(gpu.unreachable_reason is None for gpu in gpus):
            found += evaluate_gpu_links(discover_gpu_links(nvml))
        return found
    finally:
        nvml.nvmlShutdown()


def _findings_without_nvml(context: CheckContext, words: str) -> list[HealthFinding]:
    text = f"not known: temperature, memory errors and clocks are {words}"
    count, expected = count_gpus(context.root), context.expected_devices
    count_finding = evaluate_gpu_count(count, expected)
    if count == 0 and not (expected and can_count_gpus(context.root)):
        unknown_text = "unknown: a GPU driver is loaded, but its GPUs cannot be listed"
        count_finding = HealthFinding("gpus/count", HealthVerdict.UNKNOWN, unknown_text)
    return [count_finding, HealthFinding("gpus/state", HealthVerdict.UNKNOWN, text)]


def check_gpus_present(context: CheckContext) -> list[HealthFinding]:
    """Check without the driver that the expected GPUs are there and answer on the PCI bus. Unknown where the
    driver's directory is hidden (gVisor, WSL2)."""
    count = count_gpus(context.root)
    if count == 0 and context.expected_devices and not can_count_gpus(context.root):
        reason = "not known: neither /proc/driver/nvidia nor the topology of AMD's driver can be read here"
        return [HealthFinding("gpus/count", HealthVerdict.UNKNOWN, reason)]
    findings = [evaluate_gpu_count(count, context.expected_devices)]
    for bus in find_lost_gpus(context.root):
        text = f"GPU {bus} fell off the bus (its configuration reads as ones): restart the machine, see XID 79 in dmesg"
        findings.append(HealthFinding("gpus/count", HealthVerdict.FAIL, text, {"bus": bus}))
    return findings


def find_lost_gpus(root: Path) -> list[str]:
    """Addresses of NVIDIA's GPUs that fell off the bus: reading their configuration gives nothing but ones."""
    folder = root / "proc/driver/nvidia/gpus"
    found = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    return [bus for bus in found if _read_vendor(root / "sys/bus/pci/devices" / bus / "config") == b"\xff\xff"]


def _read_vendor(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(2)
    except OSError:  # hidden in this container
        return None
