"""Slots for starts of jobs: a file that all jobs of a site share, with the time at which the next one may start."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.run.shared_file import SharedFile

MAX_WAIT_S = 3600.0
"""A slot that begins later is taken for an error of a clock or of the file, and the job starts at once."""
LOCK_TIMEOUT_S = 60.0


class StartSlots:
    """The slots of one site in a file on storage that its jobs share. `clock`: unix seconds, equal on all nodes but for
    what NTP leaves."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time):
        self._file, self._clock = SharedFile(path, "slots for starts of jobs"), clock

    def take(self, duration_s: float) -> float:
        """Take the next slot, of `duration_s` seconds, and return in how many seconds it begins.

        Raises:
            UsageError: The file cannot be written or locked.
        """
        wait_s = 0.0

        def take(found: Any) -> Any:
            nonlocal wait_s
            now = self._clock()
            begin = max(now, _read_free_at(found))
            if begin - now > MAX_WAIT_S:
                begin = now
            wait_s = begin - now
            return {"free_at": begin + duration_s}

        if not self._file.change(take, LOCK_TIMEOUT_S):
            raise UsageError(f"{self._file.path}: another process has held the lock for {LOCK_TIMEOUT_S:.0f} s")
        return wait_s


def _read_free_at(found: Any) -> float:
    """Return when the next slot begins; -inf where no job has taken one, or the file was damaged."""
    try:
        free_at = found["free_at"]
        is_time = isinstance(free_at, int | float) and math.isfinite(free_at)
    except (TypeError, KeyError, OverflowError):
        return -math.inf
    return float(free_at) if is_time else -math.inf
