"""Ends what lives below a process that adopts orphans."""

import time
from collections.abc import Callable

import psutil

LEAVING = 30.0
"""Seconds in which processes that were killed must be gone."""


def end_below(seconds: float = LEAVING, clock: Callable[[], float] = time.monotonic) -> list[int]:
    """Kill and reap all processes below this one, those that come meanwhile too: whoever is being killed may just have
    forked, and its child comes to this one. The numbers of those that the kernel keeps for longer than that."""
    own, until = psutil.Process(), clock() + seconds
    while below := own.children(recursive=True):
        if clock() >= until:
            return [process.pid for process in below]
        for process in below:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(below, timeout=min(1.0, seconds))
    return []
