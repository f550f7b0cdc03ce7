"""A worker that seems stuck: what it prints when it is asked where it is, and whether somebody holds it still."""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from phalanx.run.pulse import Beat

HELD = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
STACK = 16_000
"""Bytes of a stack that are told."""


@dataclass
class Hang:
    """A worker that seems stuck, and where in its log what it answers will begin."""

    rank: int
    log: Path
    before: int
    told: bool = False

    def stack(self) -> str | None:
        """The stack of its threads as it printed them; None while it has not, as when it is held still, or when it
        cannot be read."""
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            file.seek(self.before)
            return file.read(STACK).decode(errors="replace").strip() or None
        return None


def size_of(log: Path) -> int:
    """Bytes that were printed so far, as far as is known."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def quiet(beats: Iterable[Beat | None], now: float) -> float:
    """Seconds since the last sign of any worker; 0 before there was one."""
    return min((now - beat.t for beat in beats if beat is not None), default=0.0)


def alive(beats: Mapping[int, Beat | None]) -> bool:
    """Whether any of these workers is still there, and not only its exit status."""
    for beat in beats.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            if beat is not None and psutil.Process(beat.pid).status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def held_still(beats: Mapping[int, Beat | None]) -> set[int]:
    """Ranks of workers that somebody has stopped."""
    found = set()
    for rank, beat in beats.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            if beat is not None and psutil.Process(beat.pid).status() in HELD:
                found.add(rank)
    return found
