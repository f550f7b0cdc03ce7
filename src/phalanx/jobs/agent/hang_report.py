"""A worker that seems stuck: what it prints when it is asked where it is, and whether somebody holds it still."""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from phalanx.run.heartbeat import Heartbeat

STOPPED_STATES = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
MAX_STACK_BYTES = 16_000
"""Bytes of a stack that are told."""


@dataclass
class HangReport:
    """A worker that seems stuck, and where in its log what it answers will begin."""

    rank: int
    log: Path
    log_offset: int
    reported: bool = False

    def read_stack(self) -> str | None:
        """The stack of its threads as it printed them; None while it has not, as when it is held still, or when it
        cannot be read."""
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            file.seek(self.log_offset)
            return file.read(MAX_STACK_BYTES).decode(errors="replace").strip() or None
        return None


def measure_log_size(log: Path) -> int:
    """Bytes that were printed so far, as far as is known."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def measure_silence(heartbeats: Iterable[Heartbeat | None], now: float) -> float:
    """Seconds since the last sign of any worker; 0 before there was one."""
    return min((now - heartbeat.t for heartbeat in heartbeats if heartbeat is not None), default=0.0)


def find_ended_ranks(heartbeats: Mapping[int, Heartbeat | None]) -> set[int]:
    """Ranks of workers of this machine whose process has ended, whether its end was noticed or not."""
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
    """Ranks of workers that somebody has stopped."""
    stopped_ranks = set()
    for rank, heartbeat in heartbeats.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            if heartbeat is not None and psutil.Process(heartbeat.pid).status() in STOPPED_STATES:
                stopped_ranks.add(rank)
    return stopped_ranks
