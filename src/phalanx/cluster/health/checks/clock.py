"""Check `clock`: whether this machine's clock is synchronized (adjtimex(2)), and whether it agrees with that of the
run's file server. `cluster/health/compare_nodes.py` compares the clocks of nodes.
"""

import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.cluster.disks import find_mount
from phalanx.cluster.health.checks.disk_space import nearest_existing
from phalanx.cluster.health.context import CheckContext
from phalanx.cluster.health.finding import FindingValue, HealthFinding, HealthVerdict
from phalanx.cluster.health.thresholds import evaluate_threshold

STA_UNSYNC = 0x40
"""STA_UNSYNC of <sys/timex.h>."""
SERVER_TIMESTAMP_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "ceph", "9p", "virtiofs"})
"""File systems on which the server, not the client, sets the modification time of a file."""


@dataclass(frozen=True)
class KernelClock:
    """The kernel's clock state. `max_error_s`: maximum error in seconds."""

    synchronised: bool
    max_error_s: float


class _Timex(ctypes.Structure):
    """The first fields of struct timex, and padding for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 512),
    )


def read_kernel_clock() -> KernelClock | None:
    """Read the clock state from the kernel without changing it; None where that fails, as in some containers."""
    if sys.platform != "linux":
        return None
    found = _Timex()
    if ctypes.CDLL(None).adjtimex(ctypes.byref(found)) < 0:
        return None
    return KernelClock(not found.status & STA_UNSYNC, found.maxerror / 1e6)


def server_offset(folder: Path, context: CheckContext, now: Callable[[], float] = time.time) -> float | None:
    """Return the seconds that this machine's clock is ahead of that of the file server of `folder`, accurate to 0.01 s.

    None when the folder is local or not writable.
    """
    nearest = nearest_existing(folder.absolute())
    mount = find_mount(nearest, context.root)
    if (
        mount is None
        or mount.file_system not in SERVER_TIMESTAMP_FILE_SYSTEMS
        or not os.access(nearest, os.W_OK | os.X_OK)
    ):
        return None
    with tempfile.NamedTemporaryFile(prefix=".phalanx-doctor-", dir=nearest) as file:
        before = now()
        file.write(b"\0")
        file.flush()
        os.fsync(file.fileno())
        return (before + now()) / 2 - os.stat(file.name).st_mtime


def evaluate_clock(kernel: KernelClock | None, server_offset_s: float | None) -> list[HealthFinding]:
    """Evaluate the kernel's clock state and, on a network file system, the offset to the server's clock."""
    figures: dict[str, FindingValue] = {
        "synchronised": None if kernel is None else kernel.synchronised,
        "max_error_s": None if kernel is None else kernel.max_error_s,
        "server_offset_s": server_offset_s,
    }
    if (
        server_offset_s is not None
        and (verdict := evaluate_threshold("clock skew", abs(server_offset_s))) is not HealthVerdict.PASS
    ):
        direction = "ahead of" if server_offset_s > 0 else "behind"
        text = (
            f"this clock is {abs(server_offset_s):.1f} s {direction} the file server's: start a time service (chrony) "
            "on both"
        )
        return [HealthFinding("clock", verdict, text, figures)]
    if kernel is None:
        text = "unknown: the kernel does not report whether its clock is synchronized"
        return [HealthFinding("clock", HealthVerdict.UNKNOWN, text, figures)]
    if not kernel.synchronised:
        text = "the clock is not synchronized: start a time service (chrony, systemd-timesyncd)"
        return [HealthFinding("clock", HealthVerdict.WARN, text, figures)]
    verdict = evaluate_threshold("clock error", kernel.max_error_s)
    return [HealthFinding("clock", verdict, f"synchronized; maximum error {kernel.max_error_s:.3g} s", figures)]


def check_clock(context: CheckContext) -> list[HealthFinding]:
    return evaluate_clock(read_kernel_clock(), server_offset(context.run_dir, context))
