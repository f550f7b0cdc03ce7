"""Check `memory`: free memory of the machine and of the control group, swap, and /dev/shm."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from phalanx.cluster.discovery import read_cgroup_memory
from phalanx.cluster.health.context import CheckContext, read_small_file
from phalanx.cluster.health.finding import FindingValue, HealthFinding, HealthVerdict
from phalanx.cluster.health.thresholds import evaluate_threshold
from phalanx.formatting import BYTES_PER_GIB


def measure_memory(
    context: CheckContext, statvfs: Callable[[Path], os.statvfs_result] = os.statvfs
) -> dict[str, FindingValue]:
    """Bytes of memory. `available` is the less of what the kernel and what the control group has left."""
    meminfo = read_small_file(context.root / "proc/meminfo")
    total, available = parse_meminfo(meminfo, "MemTotal"), parse_meminfo(meminfo, "MemAvailable")
    swap, free_swap = parse_meminfo(meminfo, "SwapTotal"), parse_meminfo(meminfo, "SwapFree")
    limit = read_cgroup_memory(context.root)
    limit = limit if limit is not None and total is not None and limit < total else None
    used_bytes = read_cgroup_used(context.root)
    if limit is not None and used_bytes is not None and available is not None:
        available = min(available, max(0, limit - used_bytes))
    try:
        shm = statvfs(context.root / "dev/shm")
    except OSError:  # a machine without it; some containers
        shm = None
    return {
        "total_bytes": total,
        "limit_bytes": limit,
        "available_bytes": available,
        "used_swap_bytes": None if swap is None or free_swap is None else swap - free_swap,
        "shm_total_bytes": None if shm is None else shm.f_blocks * shm.f_frsize,
        "shm_free_bytes": None if shm is None else shm.f_bavail * shm.f_frsize,
    }


def evaluate_memory(figures: dict[str, FindingValue]) -> list[HealthFinding]:
    """Return one finding for memory and swap, and one for /dev/shm."""
    shm = {name: value for name, value in figures.items() if name.startswith("shm_")}
    return [_memory_finding({name: value for name, value in figures.items() if name not in shm}), _shm_finding(shm)]


def check_memory(context: CheckContext) -> list[HealthFinding]:
    return evaluate_memory(measure_memory(context))


def parse_meminfo(meminfo: str, name: str) -> int | None:
    """Bytes of a line of /proc/meminfo, which counts in KiB."""
    match = re.search(rf"^{name}:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def read_cgroup_used(root: Path) -> int | None:
    """Return the bytes that this process's cgroup uses, without inactive page cache, which the kernel drops first."""
    for line in read_small_file(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controllers and "memory")
        inner = mount / path.lstrip("/")
        group_dir = inner if inner.is_dir() else mount  # in a container the path may lie outside of what is mounted
        used = read_small_file(group_dir / "memory.current") or read_small_file(group_dir / "memory.usage_in_bytes")
        cached = re.search(r"^(?:total_)?inactive_file (\d+)", read_small_file(group_dir / "memory.stat"), re.MULTILINE)
        if used.isdigit():
            return max(0, int(used) - (int(cached[1]) if cached else 0))
    return None


def _memory_finding(figures: dict[str, FindingValue]) -> HealthFinding:
    total, available, swap = figures["total_bytes"], figures["available_bytes"], figures["used_swap_bytes"]
    if not isinstance(total, int) or not isinstance(available, int):
        return HealthFinding(
            "memory", HealthVerdict.UNKNOWN, "/proc/meminfo does not tell how much memory there is", figures
        )
    limit = figures["limit_bytes"]
    total_bytes = limit if isinstance(limit, int) else total
    limit_name = "the control group's limit" if isinstance(limit, int) else "the machine's memory"
    summary = (
        f"{available / BYTES_PER_GIB:.1f} of {total_bytes / BYTES_PER_GIB:.1f} GiB free "
        f"({available / total_bytes:.0%} of {limit_name})"
    )
    verdict = evaluate_threshold("memory free", available / total_bytes)
    if verdict is not HealthVerdict.PASS:
        return HealthFinding("memory", verdict, f"{summary}: end what holds the rest", figures)
    if isinstance(swap, int) and (verdict := evaluate_threshold("swap used", swap / total)) is not HealthVerdict.PASS:
        return HealthFinding(
            "memory", verdict, f"{swap / BYTES_PER_GIB:.1f} GiB lie in swap: memory ran short; {summary}", figures
        )
    return HealthFinding("memory", HealthVerdict.PASS, summary, figures)


def _shm_finding(figures: dict[str, FindingValue]) -> HealthFinding:
    total, free = figures["shm_total_bytes"], figures["shm_free_bytes"]
    if not isinstance(total, int) or not isinstance(free, int):
        text = "there is no /dev/shm: NCCL and data loaders of some frameworks need it"
        return HealthFinding("shm", HealthVerdict.WARN, text, figures)
    verdict = evaluate_threshold("/dev/shm free", free)
    summary = f"{free / BYTES_PER_GIB:.2f} of {total / BYTES_PER_GIB:.2f} GiB free in /dev/shm"
    if verdict is not HealthVerdict.PASS:
        summary += ": NCCL fails or workers die of SIGBUS when it is full; 1 GiB is right (docker: --shm-size=1g)"
    return HealthFinding("shm", verdict, summary, figures)
