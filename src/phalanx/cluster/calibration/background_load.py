"""Whether anything else runs here: how many cores are busy while this process waits. A load that never changes does not
show in the reference product, which then is as slow at the end as at the beginning."""

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


def _read_cpu_ticks(root: Path) -> tuple[int, int, int] | None:
    """Ticks of all cores that were busy, all ticks, and the number of cores."""
    try:
        lines = (root / "proc/stat").read_text().splitlines()
    except OSError:
        return None
    ticks = [int(text) for text in lines[0].split()[1:9]]  # guests, which follow, are in the user's time already
    idle = sum(ticks[3:5])  # waiting for a disk is being idle
    return sum(ticks) - idle, sum(ticks), sum(line.startswith("cpu") for line in lines) - 1
