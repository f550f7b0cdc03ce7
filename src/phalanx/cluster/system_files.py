"""Read small files of /proc and /sys: lists of CPUs, mounts, and how many cores other processes use while this process
waits or computes.

A load that never changes does not show in the reference product, which then is as slow at the end as at the beginning.
"""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
OBSERVATION_S = 0.4
"""Of waiting; /proc counts in hundredths."""


def read_small_file(path: Path) -> str:
    """Return the text of a file; empty where it is absent, hidden or an error, as the speed of a port that is down."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_small_int(path: Path) -> int | None:
    """Return the integer in a file; None where it has none."""
    text = read_small_file(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def parse_cpu_list(text: str) -> list[int]:
    """Parse the kernel's list of cores: "0-3,8" -> 0, 1, 2, 3, 8."""
    found: list[int] = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def is_memory_backed(path: Path, root: Path = Path("/")) -> bool:
    """Return whether the file system of `path`, which need not exist, is in memory; False if unknown."""
    deepest, file_system = "", ""  # the last mount on a point hides those before it
    for line in read_small_file(root / "proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        # Mount tables write spaces and the like as octal numbers.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields.split(" ")[4])
        if _is_below(point, os.path.abspath(path)) and len(point) >= len(deepest):
            deepest, file_system = point, rest.split(" ")[0]
    return file_system in MEMORY_FILE_SYSTEMS


def _is_below(point: str, directory: str) -> bool:
    return point == "/" or directory == point or directory.startswith(f"{point}/")


def count_busy_cores(root: Path, sleep: Callable[[float], None]) -> float | None:
    """Return the number of cores that other processes use, including time stolen by a hypervisor; None if unknown."""
    before = _read_cpu_ticks(root)
    sleep(OBSERVATION_S)
    after = _read_cpu_ticks(root)
    if before is None or after is None:
        return None
    (busy, total, cores), (busy_then, total_then, _) = after, before
    return cores * (busy - busy_then) / (total - total_then) if total > total_then else None


class OtherLoad:
    """Measure the cores that other processes use while this process computes, from its creation on."""

    def __init__(self, root: Path = Path("/"), own_cpu_s: Callable[[], float] = time.process_time):
        self._root, self._own_cpu_s = root, own_cpu_s
        self._start = (_read_cpu_ticks(root), own_cpu_s())

    def count_cores(self) -> float:
        """Return the mean number of cores that others have used so far; 0 where the kernel does not count."""
        (before, cpu_s_before), after = self._start, _read_cpu_ticks(self._root)
        if before is None or after is None or after[1] <= before[1]:
            return 0.0
        (busy, total, cores), (busy_then, total_then, _) = after, before
        own_ticks = (self._own_cpu_s() - cpu_s_before) * os.sysconf("SC_CLK_TCK")
        return max(0.0, cores * (busy - busy_then - own_ticks) / (total - total_then))


def _read_cpu_ticks(root: Path) -> tuple[int, int, int] | None:
    """Ticks of all cores that were busy, all ticks, and the number of cores."""
    try:
        lines = (root / "proc/stat").read_text().splitlines()
    except OSError:
        return None
    ticks = [int(text) for text in lines[0].split()[1:9]]  # guests, which follow, are in the user's time already
    idle = sum(ticks[3:5])  # waiting for a disk is being idle
    return sum(ticks) - idle, sum(ticks), sum(line.startswith("cpu") for line in lines) - 1
