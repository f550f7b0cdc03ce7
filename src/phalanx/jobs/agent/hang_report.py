"""Inspect a worker that may hang: the stacks that it prints on request, and whether it is stopped by a signal."""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from phalanx.run.heartbeat import Heartbeat

STOPPED_STATES = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
MAX_STACK_BYTES = 16_000
"""Maximum bytes of a reported stack."""


@dataclass
class HangReport:
    """A worker that may hang, and the offset in its log at which its stacks will begin."""

    rank: int
    log: Path
    log_offset: int
    reported: bool = False

    def read_stack(self) -> str | None:
        """Return the stacks of its threads from its log; None if they cannot be read, or were not printed yet, as
        by a stopped worker."""
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            file.seek(self.log_offset)
            return file.read(MAX_STACK_BYTES).decode(errors="replace").strip() or None
        return None


def measure_log_size(log: Path) -> int:
    """Return the size of a log in bytes; 0 if unknown."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def measure_silence(heartbeats: Iterable[Heartbeat | None], now: float) -> float:
    """Return the seconds since the last heartbeat of any worker; 0 before the first."""
    return min((now - heartbeat.t for heartbeat in heartbeats if heartbeat is not None), default=0.0)


def find_ended_ranks(heartbeats: Mapping[int, Heartbeat | None]) -> set[int]:
    """Return the ranks of local workers with an ended process, reaped or not."""
    ended_ranks = set()
    for rank, heartbeat in heartbeats.items():
        try:
            if heartbeat is not None and psutil.Process(heartbeat.pid).status() in (
                psutil.STATUS_ZOMBIE,
                psutil.STATUS_DEAD,
            ):
                ended_ranks.add(rank)
        except psutil.NoSuchProcess:
            ended_ranks.add(rank)
    return ended_ranks


def find_stopped_ranks(heartbeats: Mapping[int, Heartbeat | None]) -> set[int]:
    """Return the ranks of local workers that are stopped by a signal or a debugger."""
    stopped_ranks = set()
    for rank, heartbeat in heartbeats.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            if heartbeat is not None and psutil.Process(heartbeat.pid).status() in STOPPED_STATES:
                stopped_ranks.add(rank)
    return stopped_ranks
