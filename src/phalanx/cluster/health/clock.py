"""Check `clock`: whether something keeps this machine's time right, as the kernel tells (adjtimex(2)), and whether the
run's file server has the same time. How far nodes are apart, `fleet.py` says.
"""

import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.cluster.disks import mount_of
from phalanx.cluster.health.disk import existing
from phalanx.cluster.health.finding import Figure, Finding, Verdict
from phalanx.cluster.health.site import Site
from phalanx.cluster.health.thresholds import judge

UNSYNCHRONISED = 0x40
"""STA_UNSYNC of <sys/timex.h>."""
SERVED = frozenset({"nfs", "nfs4", "ceph", "9p", "virtiofs"})
"""File systems on which the server, not the client, says when a file was written."""


@dataclass(frozen=True)
class KernelClock:
    """What the kernel believes of its clock. `error`: seconds that it may be wrong at most."""

    synchronised: bool
    error: float


class _Timex(ctypes.Structure):
    """The head of struct timex, and room for the rest of it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 512),
    )


def kernel_clock() -> KernelClock | None:
    """Asked of the kernel, nothing changed; None where it does not answer, as in some containers."""
    if sys.platform != "linux":
        return None
    found = _Timex()
    if ctypes.CDLL(None).adjtimex(ctypes.byref(found)) < 0:
        return None
    return KernelClock(not found.status & UNSYNCHRONISED, found.maxerror / 1e6)


def server_offset(folder: Path, site: Site, now: Callable[[], float] = time.time) -> float | None:
    """Seconds that this machine's clock is ahead of the file server's of `folder`; None where the folder is not served,
    or cannot be written to. Good to a hundredth of a second."""
    nearest = existing(folder.absolute())
    mount = mount_of(nearest, site.root)
    if mount is None or mount.kind not in SERVED or not os.access(nearest, os.W_OK | os.X_OK):
        return None
    with tempfile.NamedTemporaryFile(prefix=".phalanx-doctor-", dir=nearest) as file:
        before = now()
        file.write(b"\0")
        file.flush()
        os.fsync(file.fileno())
        return (before + now()) / 2 - os.stat(file.name).st_mtime


def evaluate(kernel: KernelClock | None, offset: float | None) -> list[Finding]:
    """What the kernel says, and beside it the server's clock where there is one."""
    figures: dict[str, Figure] = {
        "synchronised": None if kernel is None else kernel.synchronised,
        "error": None if kernel is None else kernel.error,
        "server_offset": offset,
    }
    if offset is not None and (verdict := judge("clock skew", abs(offset))) is not Verdict.OK:
        way = "ahead of" if offset > 0 else "behind"
        text = f"this clock is {abs(offset):.1f} s {way} the file server's: start a time service (chrony) on both"
        return [Finding("clock", verdict, text, figures)]
    if kernel is None:
        text = "not known: the kernel does not tell whether its time is kept right"
        return [Finding("clock", Verdict.UNKNOWN, text, figures)]
    if not kernel.synchronised:
        text = "the kernel says that nothing keeps its time right: start a time service (chrony, systemd-timesyncd)"
        return [Finding("clock", Verdict.WARN, text, figures)]
    verdict = judge("clock error", kernel.error)
    return [Finding("clock", verdict, f"kept right to {kernel.error:.3g} s, as the kernel believes", figures)]


def check(site: Site) -> list[Finding]:
    return evaluate(kernel_clock(), server_offset(site.run, site))
