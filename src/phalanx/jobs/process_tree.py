"""Ends what lives below a process that adopts orphans."""

import time
from collections.abc import Callable

import psutil

KILL_TIMEOUT_S = 30.0
"""Seconds for killed processes to end."""


def kill_descendants(timeout_s: float = KILL_TIMEOUT_S, clock: Callable[[], float] = time.monotonic) -> list[int]:
    """Kill and reap all descendants of this process. Returns the pids that have not ended after `timeout_s`.

    Includes processes that appear meanwhile: a killed process may just have forked, and its child is reparented to this
    process.
    """
    this_process, deadline = psutil.Process(), clock() + timeout_s
    while descendants := this_process.children(recursive=True):
        if clock() >= deadline:
            return [process.pid for process in descendants]
        for process in descendants:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(descendants, timeout=min(1.0, timeout_s))
    return []
