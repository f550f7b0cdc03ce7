"""Time that is never set, and processes that are known by it.

The wall clock is for people: NTP, an administrator or a resumed virtual machine may set it at any moment. Durations,
waits and the identity of processes go by the seconds since this machine was started. Where they have to outlive a
process they stand in a file as a mark, which names the boot that it belongs to.
"""

import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PROC = Path("/proc")
START_TICKS = 19
"""Where field 22 of /proc/PID/stat stands behind the command's name: clock ticks from boot to the process's start."""


def ticks() -> float:
    """Seconds since this machine was started, time asleep included where the kernel counts it."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@functools.cache
def boot() -> str:
    """What distinguishes this start of the machine from all others; nothing where the kernel has no name for it."""
    with contextlib.suppress(OSError):
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return ""


_OFFSET = time.time() - ticks()


def unix_now() -> float:
    """Unix seconds by the wall clock as it stood when this process began, or the one that it was forked from: between
    two calls exactly so much passes as really did."""
    return _OFFSET + ticks()


@dataclass(frozen=True)
class Steady:
    """The clock of this boot; tests have their own."""

    ticks: Callable[[], float] = ticks
    boot: str = field(default_factory=boot)

    def mark(self, later: float = 0.0) -> str:
        """This moment, or one so many seconds later, to be kept in a file."""
        return f"{self.boot} {self.ticks() + later:.6f}"

    def since(self, mark: str | None) -> float | None:
        """Seconds since a mark, negative before it; None for none, and for one of another boot."""
        if mark is None:
            return None
        of, _, at = mark.rpartition(" ")
        return self.ticks() - float(at) if of == self.boot else None


def born(pid: int) -> str | None:
    """What distinguishes a process from every other that has or had its number; None when there is none. Its number
    alone where the kernel has no /proc."""
    try:
        behind_name = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None if (PROC / "self").exists() or not psutil.pid_exists(pid) else str(pid)
    return f"{boot()} {behind_name[START_TICKS]}"
