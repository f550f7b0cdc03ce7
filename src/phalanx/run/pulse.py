"""Signs of life: what each worker of a node was last seen to finish, in memory that the agent shares with them.

A worker writes a few numbers whenever a part of a step ends, which takes a microsecond and no message, and goes on
whether anybody reads them or not. A worker that is stuck writes nothing: that is what tells.
"""

import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

PLACES = (
    "starting",
    "restoring",
    "compiling",
    "data",
    "forward",
    "backward",
    "exchange",
    "optimizer",
    "checkpoint",
    "other",
    "evaluation",
    "ending",
)
"""What a worker can have finished; the parts of a step are those of `train/timing.py`."""
WORKERS = 1024
"""Most workers of one agent."""
_SLOT = struct.Struct("<qqqqdd")
_SIZE = 64
VARIABLE = "PHALANX_HEARTBEAT_FD"
"""Environment variable with the number of the inherited file."""


@dataclass(frozen=True)
class Beat:
    """The last sign of a worker."""

    pid: int
    count: int
    """Signs so far: of workers that wait for each other, the one with the fewest is waited for."""
    step: int
    place: str
    """What it finished last."""
    t: float
    """Of the machine's monotonic clock, in seconds."""
    busy: float = 0.0
    """Seconds of finished steps in which it did not wait for other workers."""


class Pulses:
    """The agent's side: memory for the signs of all its workers, in a file without a name."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this
        self._file.truncate(WORKERS * _SIZE)
        self._memory = mmap.mmap(self._file.fileno(), WORKERS * _SIZE)

    @property
    def fd(self) -> int:
        """For workers to inherit."""
        return self._file.fileno()

    def clear(self) -> None:
        """Forget all signs: other workers come."""
        self._memory[:] = bytes(len(self._memory))

    def read(self, rank: int) -> Beat | None:
        """The last sign of a worker; None before its first."""
        while True:  # a sign that is being written looks different a moment later
            slot = self._memory[rank * _SIZE : rank * _SIZE + _SLOT.size]
            if slot == self._memory[rank * _SIZE : rank * _SIZE + _SLOT.size]:
                break
        pid, count, step, place, t, busy = _SLOT.unpack(slot)
        return Beat(pid, count, step, PLACES[place], t, busy) if count else None

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
        self._file.close()


class Pulse:
    """The worker's side. `step` is what signs tell until it is set anew."""

    def __init__(self, fd: int, rank: int, clock: Callable[[], float] = time.monotonic):
        self.step = 0
        self.busy = 0.0
        self._memory = mmap.mmap(fd, WORKERS * _SIZE)
        self._at, self._pid, self._count, self._clock = rank * _SIZE, os.getpid(), 0, clock

    def beat(self, place: str) -> None:
        """Something of PLACES has ended."""
        self._count += 1
        told = (self._pid, self._count, self.step, PLACES.index(place), self._clock(), self.busy)
        _SLOT.pack_into(self._memory, self._at, *told)

    def restart(self) -> None:
        """Count from nothing again, as all workers do that meet anew: counts are compared."""
        self._count, self.busy = 0, 0.0


class Silent:
    """In the place of a `Pulse` where nobody listens."""

    step = 0
    busy = 0.0

    def beat(self, place: str) -> None:
        """Nothing."""

    def restart(self) -> None:
        """Nothing."""


def pulse_of(rank: int, environment: Mapping[str, str] = os.environ) -> Pulse | Silent:
    """The pulse of a worker of this rank on its node; a silent one without an agent."""
    fd = environment.get(VARIABLE)
    return Pulse(int(fd), rank) if fd and rank < WORKERS else Silent()
