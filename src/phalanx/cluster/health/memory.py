"""Check `memory`: what is free of the machine's and the control group's memory, swap, and /dev/shm."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from phalanx.cluster.discover import cgroup_memory
from phalanx.cluster.health.finding import Figure, Finding, Verdict
from phalanx.cluster.health.site import Site, read
from phalanx.cluster.health.thresholds import GIB, judge


def look(site: Site, space: Callable[[Path], os.statvfs_result] = os.statvfs) -> dict[str, Figure]:
    """Bytes of memory. `available` is the less of what the kernel and what the control group has left."""
    meminfo = read(site.root / "proc/meminfo")
    total, available = field(meminfo, "MemTotal"), field(meminfo, "MemAvailable")
    swap, left = field(meminfo, "SwapTotal"), field(meminfo, "SwapFree")
    limit = cgroup_memory(site.root)
    limit = limit if limit is not None and total is not None and limit < total else None
    used = group_used(site.root)
    if limit is not None and used is not None and available is not None:
        available = min(available, max(0, limit - used))
    try:
        shm = space(site.root / "dev/shm")
    except OSError:  # a machine without it; some containers
        shm = None
    return {
        "total": total,
        "limit": limit,
        "available": available,
        "swap_used": None if swap is None or left is None else swap - left,
        "shm_total": None if shm is None else shm.f_blocks * shm.f_frsize,
        "shm_free": None if shm is None else shm.f_bavail * shm.f_frsize,
    }


def evaluate(figures: dict[str, Figure]) -> list[Finding]:
    """One finding for memory and swap, one for /dev/shm."""
    shm = {name: value for name, value in figures.items() if name.startswith("shm_")}
    return [_memory({name: value for name, value in figures.items() if name not in shm}), _shm(shm)]


def check(site: Site) -> list[Finding]:
    return evaluate(look(site))


def field(meminfo: str, name: str) -> int | None:
    """Bytes of a line of /proc/meminfo, which counts in KiB."""
    match = re.search(rf"^{name}:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def group_used(root: Path) -> int | None:
    """Bytes that this process's control group uses, its files in the page cache apart, which the kernel drops first."""
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controllers and "memory")
        inner = mount / path.lstrip("/")
        folder = inner if inner.is_dir() else mount  # in a container the path may lie outside of what is mounted
        used = read(folder / "memory.current") or read(folder / "memory.usage_in_bytes")
        cached = re.search(r"^(?:total_)?inactive_file (\d+)", read(folder / "memory.stat"), re.MULTILINE)
        if used.isdigit():
            return max(0, int(used) - (int(cached[1]) if cached else 0))
    return None


def _memory(figures: dict[str, Figure]) -> Finding:
    total, available, swap = figures["total"], figures["available"], figures["swap_used"]
    if not isinstance(total, int) or not isinstance(available, int):
        return Finding("memory", Verdict.UNKNOWN, "/proc/meminfo does not tell how much memory there is", figures)
    limit = figures["limit"]
    most = limit if isinstance(limit, int) else total
    whose = "the control group's limit" if isinstance(limit, int) else "the machine's memory"
    told = f"{available / GIB:.1f} of {most / GIB:.1f} GiB free ({available / most:.0%} of {whose})"
    verdict = judge("memory free", available / most)
    if verdict is not Verdict.OK:
        return Finding("memory", verdict, f"{told}: end what holds the rest", figures)
    if isinstance(swap, int) and (verdict := judge("swap used", swap / total)) is not Verdict.OK:
        return Finding("memory", verdict, f"{swap / GIB:.1f} GiB lie in swap: memory ran short; {told}", figures)
    return Finding("memory", Verdict.OK, told, figures)


def _shm(figures: dict[str, Figure]) -> Finding:
    total, free = figures["shm_total"], figures["shm_free"]
    if not isinstance(total, int) or not isinstance(free, int):
        text = "there is no /dev/shm: NCCL and data loaders of some frameworks need it"
        return Finding("shm", Verdict.WARN, text, figures)
    verdict = judge("/dev/shm free", free)
    told = f"{free / GIB:.2f} of {total / GIB:.2f} GiB free in /dev/shm"
    if verdict is not Verdict.OK:
        told += ": NCCL fails or workers die of SIGBUS when it is full; 1 GiB is right (docker: --shm-size=1g)"
    return Finding("shm", verdict, told, figures)
