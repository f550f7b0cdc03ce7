"""Heartbeats: the progress of each worker of a node, in memory that the agent shares with the workers.

A worker writes a few numbers at the end of each part of a step. That takes a microsecond, needs no message, and does
not depend on a reader. A worker that hangs writes nothing: that is how the agent notices.
"""

import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from phalanx.run.event_types import StepPhases

STEP_PHASE_NAMES = tuple(each.name for each in fields(StepPhases))
PHASE_NAMES = ("starting", "rendezvous", "restoring", "compiling", *STEP_PHASE_NAMES, "evaluation", "ending")
"""What a worker can have finished."""
MAX_WORKERS = 1024
_SLOT_STRUCT = struct.Struct("<qqqqdd")
_SLOT_BYTES = 64
HEARTBEAT_FD_VARIABLE = "PHALANX_HEARTBEAT_FD"
"""Environment variable with the number of the inherited file."""


@dataclass(frozen=True)
class Heartbeat:
    """The last sign of a worker."""

    pid: int
    count: int
    """Signs so far: of workers that wait for each other, the one with the fewest is waited for."""
    step: int
    phase: str
    """The phase that it finished last."""
    t: float
    """Seconds of the machine's monotonic clock."""
    busy_s: float = 0.0
    """Seconds of finished steps in which it did not wait for other workers."""


class HeartbeatTable:
    """The agent's side: memory for the signs of all its workers, in a file without a name."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this
        self._file.truncate(MAX_WORKERS * _SLOT_BYTES)
        self._memory = mmap.mmap(self._file.fileno(), MAX_WORKERS * _SLOT_BYTES)

    @property
    def fd(self) -> int:
        """For workers to inherit."""
        return self._file.fileno()

    def clear(self) -> None:
        """Forget all signs: other workers come."""
        self._memory[:] = bytes(len(self._memory))

    def read(self, rank: int) -> Heartbeat | None:
        """The last sign of a worker; None before its first."""
        while True:  # a sign that is being written looks different a moment later
            slot = self._memory[rank * _SLOT_BYTES : rank * _SLOT_BYTES + _SLOT_STRUCT.size]
            if slot == self._memory[rank * _SLOT_BYTES : rank * _SLOT_BYTES + _SLOT_STRUCT.size]:
                break
        pid, count, step, phase, t, busy_s = _SLOT_STRUCT.unpack(slot)
        return Heartbeat(pid, count, step, PHASE_NAMES[phase], t, busy_s) if count else None

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
        self._file.close()


class HeartbeatWriter:
    """The worker's side. `step` is the step that heartbeats report."""

    def __init__(self, fd: int, rank: int, clock: Callable[[], float] = time.monotonic):
        self.step = 0
        self.busy_s = 0.0
        self._memory = mmap.mmap(fd, MAX_WORKERS * _SLOT_BYTES)
        self._offset, self._pid, self._count, self._clock = rank * _SLOT_BYTES, os.getpid(), 0, clock

    def record(self, phase: str) -> None:
        """Something of PLACES has ended."""
        self._count += 1
        fields = (self._pid, self._count, self.step, PHASE_NAMES.index(phase), self._clock(), self.busy_s)
        # one copy: `pack_into` clears the slot first, and a reader would see the worker's last sign at time 0
        self._memory[self._offset : self._offset + _SLOT_STRUCT.size] = _SLOT_STRUCT.pack(*fields)


class NullHeartbeat:
    """Stands in for a `HeartbeatWriter` where no agent reads heartbeats."""

    step = 0
    busy_s = 0.0

    def record(self, phase: str) -> None:
        """Nothing."""


def open_heartbeat(rank: int, environment: Mapping[str, str] = os.environ) -> HeartbeatWriter | NullHeartbeat:
    """Open the heartbeat of a worker of this local rank; a `NullHeartbeat` without an agent."""
    fd = environment.get(HEARTBEAT_FD_VARIABLE)
    return HeartbeatWriter(int(fd), rank) if fd and rank < MAX_WORKERS else NullHeartbeat()
