"""When to start a run again whose storage failed.

Attempts that could not even begin follow each other within a second, so the few that a run has would be over before a
server is back. They are not counted: the run waits until its directory can be written and read again, a little longer
each time since its data may lie elsewhere, and ends when that has gone on for too long.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.errors import describe_os_error, is_storage_error
from phalanx.run import Event, Run
from phalanx.run.event_types import RunWarning

MAX_OUTAGE_S = 600.0
"""Seconds of failing storage after which a run ends, to be started again when it is mended."""
MIN_DELAY_S, MAX_DELAY_S = 1.0, 30.0
"""Seconds from one attempt to the next at least, doubled each time."""
POLL_INTERVAL_S = 1.0
"""Seconds between two looks at storage: nothing tells when it is back."""


@dataclass
class StorageBackoff:
    """Storage fails since `started_at`, and so many attempts could not begin."""

    started_at: float
    num_attempts: int = 0

    def next_delay(self) -> float:
        """Seconds that the next attempt must wait at least. Call once for each."""
        self.num_attempts += 1
        return float(min(MAX_DELAY_S, MIN_DELAY_S * 2 ** (self.num_attempts - 1)))

    def wait_until_usable(
        self, run: Run, clock: Callable[[], float], wait: Callable[[float], bool], emit: Callable[[Event], None]
    ) -> str | None:
        """Wait until the run's storage can be used again; a sentence when that takes too long, or the run is to stop,
        which `wait` tells after so many seconds."""
        deadline, announced = clock() + self.next_delay(), False
        while (problem := find_storage_problem(run)) is not None or clock() < deadline:
            if clock() - self.started_at > MAX_OUTAGE_S:
                return f"storage has failed for {MAX_OUTAGE_S:.0f} s; start it again when it is mended"
            if problem is not None and not announced:
                announced = True
                emit(RunWarning(text=f"waiting for storage: {problem}"))
            if wait(POLL_INTERVAL_S):
                return "asked to stop while storage failed"
        return None


def find_storage_problem(run: Run, fsync: Callable[[int], None] = os.fsync) -> str | None:
    """What is wrong with a run's storage now: it must list checkpoints, take a file, and let go of it."""
    test_file = run.checkpoints / f".storage.{os.getpid()}.tmp"
    try:
        os.listdir(run.checkpoints)
        fd = os.open(test_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(fd, bytes(1))
            fsync(fd)
        finally:
            os.close(fd)
            os.unlink(test_file)
    except OSError as error:
        if not is_storage_error(error) and not isinstance(error, FileNotFoundError):  # nothing is mounted there
            raise
        return describe_os_error(error)
    return None
