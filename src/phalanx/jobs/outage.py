"""When to start a run again whose storage failed.

Attempts that could not even begin follow each other within a second, so the few that a run has would be over before a
server is back. They are not counted: the run waits until its directory can be written and read again, a little longer
each time since its data may lie elsewhere, and ends when that has gone on for too long.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.errors import storage_failed, words_of
from phalanx.run import Event, Run
from phalanx.run.event_types import RunWarning

PATIENCE = 600.0
"""Seconds of failing storage after which a run ends, to be started again when it is mended."""
FIRST, LONGEST = 1.0, 30.0
"""Seconds from one attempt to the next at least, doubled each time."""
LOOK = 1.0
"""Seconds between two looks at storage: nothing tells when it is back."""


@dataclass
class Outage:
    """Storage fails since `began`, and so many attempts could not begin."""

    began: float
    attempts: int = 0

    def pause(self) -> float:
        """Seconds that the next attempt must wait at least. Call once for each."""
        self.attempts += 1
        return float(min(LONGEST, FIRST * 2 ** (self.attempts - 1)))

    def outlast(
        self, run: Run, clock: Callable[[], float], rest: Callable[[float], bool], emit: Callable[[Event], None]
    ) -> str | None:
        """Wait until the run's storage can be used again; a sentence when that takes too long, or the run is to stop,
        which `rest` tells after so many seconds."""
        until, told = clock() + self.pause(), False
        while (wrong := trouble(run)) is not None or clock() < until:
            if clock() - self.began > PATIENCE:
                return f"storage has failed for {PATIENCE:.0f} s; start it again when it is mended"
            if wrong is not None and not told:
                told = True
                emit(RunWarning(text=f"waiting for storage: {wrong}"))
            if rest(LOOK):
                return "asked to stop while storage failed"
        return None


def trouble(run: Run, sync: Callable[[int], None] = os.fsync) -> str | None:
    """What is wrong with a run's storage now: it must list checkpoints, take a file, and let go of it."""
    probe = run.checkpoints / f".storage.{os.getpid()}.tmp"
    try:
        os.listdir(run.checkpoints)
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(fd, bytes(1))
            sync(fd)
        finally:
            os.close(fd)
            os.unlink(probe)
    except OSError as error:
        if not storage_failed(error) and not isinstance(error, FileNotFoundError):  # nothing is mounted there
            raise
        return words_of(error)
    return None
