"""Time that is never set, and processes that are known by it.

The wall clock is for people: NTP, an administrator or a resumed virtual machine may set it at any moment. Durations,
waits and the identity of processes go by the seconds since this machine was started. Where they have to outlive a
process they stand in a file as a mark, which names the boot that it belongs to.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PROC_ROOT = Path("/proc")
START_TIME_FIELD = 19
"""Where field 22 of /proc/PID/stat stands behind the command's name: clock ticks from boot to the process's start."""


def seconds_since_boot() -> float:
    """Seconds since this machine was started, time asleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@functools.cache
def boot_id() -> str:
    """What distinguishes this start of the machine from all others."""
    return (PROC_ROOT / "sys/kernel/random/boot_id").read_text().strip()


_UNIX_OFFSET_S = time.time() - seconds_since_boot()


def unix_now() -> float:
    """Unix seconds by the wall clock as it stood when this process began, or the one that it was forked from: between
    two calls exactly so much passes as really did."""
    return _UNIX_OFFSET_S + seconds_since_boot()


@dataclass(frozen=True)
class BootClock:
    """The clock of this boot; tests have their own."""

    now: Callable[[], float] = seconds_since_boot
    boot_id: str = field(default_factory=boot_id)

    def make_timestamp(self, offset_s: float = 0.0) -> str:
        """Format the moment `offset_s` seconds from now, to be stored in a file."""
        return f"{self.boot_id} {self.now() + offset_s:.6f}"

    def seconds_since(self, timestamp: str | None) -> float | None:
        """Seconds since a mark, negative before it; None for none, and for one of another boot."""
        if timestamp is None:
            return None
        of, _, at = timestamp.rpartition(" ")
        return self.now() - float(at) if of == self.boot_id else None


def process_identity(pid: int) -> str | None:
    """What distinguishes a process from every other that has or had its number; None when there is none."""
    try:
        stat_fields = (PROC_ROOT / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return f"{boot_id()} {stat_fields[START_TIME_FIELD]}"
