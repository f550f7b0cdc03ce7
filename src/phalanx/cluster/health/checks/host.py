"""Checks of this host: `cpu` (cores, and other programs that use them), `memory` (also of the control group, and
/dev/shm), `disk`, `limits` (open files, and locked memory, which RDMA needs) and `versions` of software.
"""

import errno
import os
import platform
import re
import resource
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from phalanx.cluster.calibration.hardware_key import read_driver_version
from phalanx.cluster.device_links import discover_nics
from phalanx.cluster.discovery import cgroup_dirs, parse_meminfo, read_cgroup_cores, read_cgroup_memory
from phalanx.cluster.environment import package_version
from phalanx.cluster.health.checks.gpus import check_gpus_present
from phalanx.cluster.health.finding import (
    CheckContext,
    FindingValue,
    HealthFinding,
    HealthVerdict,
    evaluate_threshold,
    worst_verdict,
)
from phalanx.cluster.system_files import count_busy_cores, parse_cpu_list, read_small_file
from phalanx.formatting import BYTES_PER_GIB, BYTES_PER_MIB
from phalanx.run.in_memory_checkpoint import DIR_PREFIX

StatVfs = Callable[[Path], os.statvfs_result]
GetRlimit = Callable[[int], tuple[int, int]]
TYPICAL_LOCKED_BYTES = 64 * BYTES_PER_MIB
"""Bytes: what many systems grant, and RDMA needs far more."""
RECORDED_PACKAGES = ("torch", "phalanx", "numpy")
MIN_TORCH_VERSION, TORCH_VERSION_LIMIT = (2, 11), (2, 16)
"""Releases of torch that are supported."""


def measure_cpu(
    context: CheckContext, affinity: Sequence[int] | None = None, sleep: Callable[[float], None] = time.sleep
) -> dict[str, FindingValue]:
    """Measure the CPU: its cores, limits and load."""
    folder = context.root / "sys/devices/system/cpu"
    allowed = sorted(os.sched_getaffinity(0) if affinity is None else affinity)
    return {
        "present": len(parse_cpu_list(read_small_file(folder / "present"))) or None,
        "online": len(parse_cpu_list(read_small_file(folder / "online"))) or None,
        "allowed": len(allowed),
        "quota_cores": read_cgroup_cores(context.root),
        "smt": read_small_file(folder / "smt/control") or None,
        "busy_cores": count_busy_cores(context.root, sleep),
    }


def evaluate_cpu(figures: dict[str, FindingValue]) -> list[HealthFinding]:
    """Return one finding with all problems of the CPU."""
    present, online, allowed, quota = (
        _as_number(figures[name]) for name in ("present", "online", "allowed", "quota_cores")
    )
    busy = _as_number(figures["busy_cores"])
    problems: list[tuple[HealthVerdict, str]] = []
    # with hyper-threading switched off, the second thread of each core is present and not online
    if present and online and online < present and figures["smt"] not in ("off", "forceoff"):
        problems.append((HealthVerdict.WARN, f"{present - online:g} of {present:g} cores are switched off"))
    if allowed == 1 and online is not None and online > 1:
        text = f"this process may use one of {online:g} cores (srun: repeat --cpus-per-task, which it forgets)"
        problems.append((HealthVerdict.WARN, text))
    if quota is not None and allowed is not None and quota < allowed:
        text = f"the control group grants the time of {quota:g} cores where {allowed:g} are allowed"
        problems.append((HealthVerdict.WARN, text))
    if busy is not None and (verdict := evaluate_threshold("busy cores", busy)) is not HealthVerdict.PASS:
        problems.append((verdict, f"other programs keep {busy:.1f} cores busy"))
    summary = f"{_format_number(allowed)} cores allowed of {_format_number(online)} online"
    reason = "; ".join(text for _, text in problems) or summary
    return [HealthFinding("cpu", worst_verdict(verdict for verdict, _ in problems), reason, figures)]


def _as_number(value: FindingValue) -> float | None:
    return value if isinstance(value, int | float) else None


def _format_number(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"


def measure_memory(context: CheckContext, statvfs: StatVfs = os.statvfs) -> dict[str, FindingValue]:
    """Bytes of memory. `available` is the less of what the kernel and what the control group has left."""
    meminfo = read_small_file(context.root / "proc/meminfo")
    total, available = parse_meminfo(meminfo, "MemTotal"), parse_meminfo(meminfo, "MemAvailable")
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
        "shm_total_bytes": None if shm is None else shm.f_blocks * shm.f_frsize,
        "shm_free_bytes": None if shm is None else shm.f_bavail * shm.f_frsize,
    }


def evaluate_memory(figures: dict[str, FindingValue]) -> list[HealthFinding]:
    """Return one finding for memory, and one for /dev/shm."""
    shm = {name: value for name, value in figures.items() if name.startswith("shm_")}
    return [_memory_finding({name: value for name, value in figures.items() if name not in shm}), _shm_finding(shm)]


def read_cgroup_used(root: Path) -> int | None:
    """Return the bytes that this process's cgroup uses, without inactive page cache, which the kernel drops first."""
    for group_dir in cgroup_dirs(root, "memory"):
        used = read_small_file(group_dir / "memory.current") or read_small_file(group_dir / "memory.usage_in_bytes")
        cached = re.search(r"^(?:total_)?inactive_file (\d+)", read_small_file(group_dir / "memory.stat"), re.MULTILINE)
        if used.isdigit():
            return max(0, int(used) - (int(cached[1]) if cached else 0))
    return None


def _memory_finding(figures: dict[str, FindingValue]) -> HealthFinding:
    total, available = figures["total_bytes"], figures["available_bytes"]
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
    advice = "" if verdict is HealthVerdict.PASS else ": end what holds the rest"
    return HealthFinding("memory", verdict, f"{summary}{advice}", figures)


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


def nearest_existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))


def measure_disk_space(folder: Path, statvfs: StatVfs = os.statvfs) -> dict[str, FindingValue]:
    """Measure free space of a folder, or of its nearest existing parent. Raises OSError when the disk fails."""
    nearest = nearest_existing(folder.absolute())
    found = statvfs(nearest)
    return {
        "folder": str(folder),
        "nearest": str(nearest),
        "free_bytes": found.f_bavail * found.f_frsize,
        "total_bytes": found.f_blocks * found.f_frsize,
        "num_inodes": found.f_files or None,  # file systems that make inodes when needed count none
        "num_free_inodes": found.f_favail if found.f_files else None,
        "read_only": bool(found.f_flag & os.ST_RDONLY),
        "writable": os.access(nearest, os.W_OK | os.X_OK),
    }


def evaluate_disk_space(purpose: str, figures: dict[str, FindingValue]) -> HealthFinding:
    """Evaluate the figures of a folder. `purpose`: "run", "cache" or "temp"."""
    free, total, inodes, folder = (figures[name] for name in ("free_bytes", "total_bytes", "num_free_inodes", "folder"))
    assert isinstance(free, int)
    assert isinstance(total, int)
    check = f"disk/{purpose}"
    if figures["read_only"]:
        return HealthFinding(check, HealthVerdict.FAIL, f"{folder}: its file system is mounted read-only", figures)
    if not figures["writable"]:
        return HealthFinding(check, HealthVerdict.FAIL, f"{folder}: this user may not write there", figures)
    verdicts = [evaluate_threshold("run disk free" if purpose == "run" else "cache disk free", free)]
    location = "" if figures["nearest"] == folder else f" (would be made in {figures['nearest']})"
    summary = f"{folder}{location}: {free / BYTES_PER_GIB:.1f} of {total / BYTES_PER_GIB:.1f} GiB free"
    if isinstance(inodes, int) and (verdict := evaluate_threshold("inodes free", inodes)) is not HealthVerdict.PASS:
        verdicts.append(verdict)
        summary += f", only {inodes} free inodes"
    return HealthFinding(check, worst_verdict(verdicts), summary, figures)


def check_disk_space(context: CheckContext, statvfs: StatVfs = os.statvfs) -> list[HealthFinding]:
    findings = []
    for purpose, folder in (("run", context.run_dir), ("cache", context.cache_dir), ("temp", context.temp_dir)):
        try:
            findings.append(evaluate_disk_space(purpose, measure_disk_space(folder, statvfs)))
        except OSError as error:
            advice = "stale file handle of a network file system; mount it again: "
            text = f"{folder}: {advice if error.errno == errno.ESTALE else ''}{error.strerror}"
            figures: dict[str, FindingValue] = {"folder": str(folder), "errno": error.errno}
            findings.append(HealthFinding(f"disk/{purpose}", HealthVerdict.FAIL, text, figures))
    return findings


def measure_ulimits(context: CheckContext, limit: GetRlimit = resource.getrlimit) -> dict[str, FindingValue]:
    """Limits of this process; None: there is none."""
    files, hard_limit = limit(resource.RLIMIT_NOFILE)
    locked, _ = limit(resource.RLIMIT_MEMLOCK)
    return {
        "open_files": None if files == resource.RLIM_INFINITY else files,
        "open_files_most": None if hard_limit == resource.RLIM_INFINITY else hard_limit,
        "locked_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "rdma_ports": sum(card.is_up and card.link_kind != "ethernet" for card in discover_nics(context.root)),
    }


def evaluate_ulimits(figures: dict[str, FindingValue]) -> list[HealthFinding]:
    files, locked = figures["open_files"], figures["locked_bytes"]
    verdicts, summary = [HealthVerdict.PASS], "no limit of open files"
    if isinstance(files, int):
        verdicts.append(evaluate_threshold("open files", files))
        summary = f"{files} open files a process"
        if verdicts[-1] is not HealthVerdict.PASS:
            summary += f": raise it (ulimit -n; at most {figures['open_files_most']} here)"
    if figures["rdma_ports"] and isinstance(locked, int) and locked <= TYPICAL_LOCKED_BYTES:
        verdicts.append(HealthVerdict.WARN)
        summary += f"; only {locked / BYTES_PER_MIB:.0f} MiB may be locked, and RDMA needs more: ulimit -l unlimited"
    return [HealthFinding("ulimits", worst_verdict(verdicts), summary, figures)]


def measure_versions(context: CheckContext) -> dict[str, FindingValue]:
    return {
        "python": platform.python_version(),
        **{name: package_version(name) for name in RECORDED_PACKAGES},
        "kernel": read_small_file(context.root / "proc/sys/kernel/osrelease") or platform.release(),
        "driver": read_driver_version(context.root),
    }


def evaluate_versions(figures: dict[str, FindingValue]) -> list[HealthFinding]:
    torch, driver = figures["torch"], figures["driver"]
    summary = ", ".join(f"{name} {value}" for name, value in figures.items() if value)
    if torch is None:
        text = f"torch is not installed in this Python; {summary}"
        return [HealthFinding("versions", HealthVerdict.FAIL, text, figures)]
    release = tuple(int(part) for part in str(torch).split("+")[0].split(".")[:2] if part.isdigit())
    if not MIN_TORCH_VERSION <= release < TORCH_VERSION_LIMIT:
        lowest, limit = (".".join(map(str, version)) for version in (MIN_TORCH_VERSION, TORCH_VERSION_LIMIT))
        text = f"torch {torch}: expected {lowest} up to below {limit}; {summary}"
        return [HealthFinding("versions", HealthVerdict.WARN, text, figures)]
    if driver is not None and str(torch).endswith("+cpu"):
        text = f"there is a GPU driver, but torch {torch} is built for CPUs only: GPUs would lie idle; {summary}"
        return [HealthFinding("versions", HealthVerdict.WARN, text, figures)]
    return [HealthFinding("versions", HealthVerdict.PASS, summary, figures)]


SHM_PREFIXES = (DIR_PREFIX, "nccl-", "torch_")
"""What workers create in /dev/shm: in-memory checkpoints, and files of NCCL and torch."""
IN_MEMORY_IDLE_S = 3600.0
"""Seconds without a change after which in-memory checkpoints count as abandoned."""
MAX_SHOWN = 5


def find_abandoned_shm(context: CheckContext) -> dict[str, int]:
    """Return bytes by name of what Phalanx' workers of this user (root: of all) left in /dev/shm: files that no process
    has open or mapped, and in-memory checkpoints that did not change for long."""
    shm = context.root / "dev/shm"
    sizes: dict[str, int] = {}
    for path in shm.iterdir() if shm.is_dir() else ():
        try:
            status = path.lstat()
            if not path.name.startswith(SHM_PREFIXES) or context.uid not in (0, status.st_uid):
                continue
            if stat.S_ISREG(status.st_mode):
                sizes[path.name] = status.st_size
            elif stat.S_ISDIR(status.st_mode) and time.time() - status.st_mtime > IN_MEMORY_IDLE_S:
                sizes[path.name] = sum(file.lstat().st_size for file in path.rglob("*"))
        except OSError:  # its owner has just removed it
            continue
    if sizes:
        for process_dir in (context.root / "proc").glob("[0-9]*"):
            for name in _shm_names_of(process_dir):
                sizes.pop(name, None)
    return sizes


def _shm_names_of(process_dir: Path) -> Iterator[str]:
    """Yield the names below /dev/shm that a process has open or mapped."""
    for line in read_small_file(process_dir / "maps").splitlines():
        if "/dev/shm/" in line:
            yield line.partition("/dev/shm/")[2]
    try:
        descriptors = list((process_dir / "fd").iterdir())
    except OSError:  # it ended, or is not readable
        return
    for descriptor in descriptors:
        try:
            link = os.readlink(descriptor)
        except OSError:  # closed meanwhile, like the descriptor of our own listing
            continue
        if link.startswith("/dev/shm/"):
            yield link.removeprefix("/dev/shm/")


def check_leaked_resources(context: CheckContext) -> list[HealthFinding]:
    sizes = find_abandoned_shm(context)
    total = sum(sizes.values())
    figures: dict[str, FindingValue] = {"num_files": len(sizes), "size_bytes": total}
    if not sizes:
        return [HealthFinding("leaked-resources", HealthVerdict.PASS, "nothing left in /dev/shm", figures)]
    names = ", ".join(sorted(sizes)[:MAX_SHOWN]) + (" ..." if len(sizes) > MAX_SHOWN else "")
    reason = f"dead runs left {total / BYTES_PER_MIB:.1f} MiB in /dev/shm: {names}"
    return [HealthFinding("leaked-resources", HealthVerdict.WARN, reason, figures)]


def run_preflight(
    run_dir: Path, expect_devices: int | None = None, root: Path = Path("/"), statvfs: StatVfs = os.statvfs
) -> list[HealthFinding]:
    """Check what changes between attempts, within milliseconds and without a library that could hang: free disk space,
    memory, /dev/shm and the number of GPUs. The node is unfit if a finding is (`HealthVerdict.is_unfit`)."""
    context = CheckContext(run_dir, root=root, expected_devices=expect_devices)
    return [
        *check_disk_space(context, statvfs)[:1],
        *evaluate_memory(measure_memory(context, statvfs)),
        *check_gpus_present(context),
    ]
