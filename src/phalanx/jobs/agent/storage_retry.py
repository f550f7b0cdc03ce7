"""Delay the restart of a run after a storage failure.

Attempts that cannot begin fail within a second, so `max_restarts` would be used up before a server is back. They are
not counted: the run waits until its directory is readable and writable again, with a longer minimum delay each time,
since its data may lie elsewhere. It ends after `MAX_OUTAGE_S`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.errors import describe_os_error, is_storage_error
from phalanx.run import Event, Run
from phalanx.run.event_types import RunWarning

MAX_OUTAGE_S = 600.0
"""A run ends after storage has failed for this many seconds."""
MIN_DELAY_S, MAX_DELAY_S = 1.0, 30.0
"""Minimum seconds between attempts, doubled each time up to the maximum."""
POLL_INTERVAL_S = 1.0
"""Seconds between polls of the storage."""


@dataclass
class StorageBackoff:
    """Storage has failed since `started_at`, and `num_attempts` attempts could not begin."""

    started_at: float
    num_attempts: int = 0

    def next_delay(self) -> float:
        """Return the minimum delay of the next attempt in seconds. Call once per attempt."""
        self.num_attempts += 1
        return float(min(MAX_DELAY_S, MIN_DELAY_S * 2 ** (self.num_attempts - 1)))

    def wait_until_usable(
        self, run: Run, clock: Callable[[], float], wait: Callable[[float], bool], emit: Callable[[Event], None]
    ) -> str | None:
        """Wait until the run's storage works again.

        `wait` sleeps for the given seconds and returns whether to stop. Returns None on success, or a sentence when the
        outage takes too long or the run is to stop.
        """
        deadline, announced = clock() + self.next_delay(), False
        while (problem := find_storage_problem(run)) is not None or clock() < deadline:
            if clock() - self.started_at > MAX_OUTAGE_S:
                return f"storage has failed for {MAX_OUTAGE_S:.0f} s; start it again when storage works"
            if problem is not None and not announced:
                announced = True
                emit(RunWarning(text=f"waiting for storage: {problem}"))
            if wait(POLL_INTERVAL_S):
                return "asked to stop while storage failed"
        return None


def find_storage_problem(run: Run, fsync: Callable[[int], None] = os.fsync) -> str | None:
    """Return the error when listing checkpoints, or writing and deleting a file there; None if all work."""
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
