"""Check `disk`: free space, inodes and write permission of the run, cache and temporary directories."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.cluster.disks import find_mount
from phalanx.cluster.health.context import CheckContext
from phalanx.cluster.health.finding import FindingValue, HealthFinding, HealthVerdict, worst_verdict
from phalanx.cluster.health.thresholds import evaluate_threshold
from phalanx.formatting import BYTES_PER_GIB

StatVfs = Callable[[Path], os.statvfs_result]


def nearest_existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))


def measure_disk_space(folder: Path, context: CheckContext, statvfs: StatVfs = os.statvfs) -> dict[str, FindingValue]:
    """Measure free space of a folder, or of its nearest existing parent. Raises OSError when the disk fails."""
    nearest = nearest_existing(folder.absolute())
    found, mount = statvfs(nearest), find_mount(nearest, context.root)
    return {
        "folder": str(folder),
        "nearest": str(nearest),
        "kind": mount.file_system if mount else None,
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
    return list(_check_each_dir(context, statvfs))


def _check_each_dir(context: CheckContext, statvfs: StatVfs) -> Iterator[HealthFinding]:
    for purpose, folder in (("run", context.run_dir), ("cache", context.cache_dir), ("temp", context.temp_dir)):
        try:
            yield evaluate_disk_space(purpose, measure_disk_space(folder, context, statvfs))
        except OSError as error:
            advice = "stale file handle of a network file system; mount it again: "
            text = f"{folder}: {advice if error.errno == errno.ESTALE else ''}{error.strerror}"
            yield HealthFinding(
                f"disk/{purpose}", HealthVerdict.FAIL, text, {"folder": str(folder), "errno": error.errno}
            )
