"""Measure whether anything else runs here: how many cores other processes use while this process waits or computes. A
load that never changes does not show in the reference product, which then is as slow at the end as at the beginning."""

import os
import time
from collections.abc import Callable
from pathlib import Path

OBSERVATION_S = 0.4
"""Of waiting; /proc counts in hundredths."""


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
