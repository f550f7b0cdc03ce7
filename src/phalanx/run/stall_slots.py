"""Slots for stalls of training: a file with the jobs of a site that evaluate or save now, which lowers their power. No
more of them stall together than the site's `max_swing` allows."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.run.fields import read_as
from phalanx.run.shared_file import SharedFile

SWING_SHARES_VARIABLE = "PHALANX_SWING_SHARES"
"""Variable of workers that the agent sets: the shares of their job, as JSON."""
WAIT_LEASE_S = 10.0
"""Seconds for which a job that waits keeps its place in the queue, besides its time until it asks again."""
MAX_STALL_S = 3600.0
"""Seconds after which a stall is taken to be over. An entry of twice as long is taken for an error of a clock."""


@dataclass(frozen=True)
class SwingShare:
    """What one job may do to the power of one site. `holder`: the job's name in the file at `path`. `swing_w`: watts by
    which a stall of the job lowers the site's power at most."""

    site: str
    path: str
    holder: str
    swing_w: float
    max_swing_w: float


def write_swing_shares(shares: Sequence[SwingShare]) -> dict[str, str]:
    """Return the variables of workers by which they find their job's shares."""
    return {SWING_SHARES_VARIABLE: json.dumps([asdict(each) for each in shares])} if shares else {}


def read_swing_shares(environment: Mapping[str, str]) -> tuple[SwingShare, ...]:
    """Undo `write_swing_shares`. UsageError where the variable has another form."""
    try:
        return tuple(read_as(SwingShare, each) for each in json.loads(environment.get(SWING_SHARES_VARIABLE) or "[]"))
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise UsageError(f"{SWING_SHARES_VARIABLE}: the agent of a job sets it; unset it") from None


@dataclass(frozen=True)
class StallEntry:
    """A job that stalls, or waits for that since `since` (unix seconds), until `until` unless it says otherwise."""

    watts: float
    since: float
    until: float
    stalls: bool


@dataclass(frozen=True)
class StallTable:
    """The content of the file: entries by the names of their jobs."""

    jobs: dict[str, StallEntry] = field(default_factory=dict)


class StallSlots:
    """The slots of one site as one job sees them. `clock`: unix seconds, equal on all nodes but for what NTP leaves."""

    def __init__(self, share: SwingShare, clock: Callable[[], float] = time.time):
        self.share, self._clock = share, clock
        self._file = SharedFile(Path(share.path), "slots for evaluations and saves")

    def take(self, duration_s: float, retry_s: float, must: bool = False) -> bool:
        """Return whether the job's stall fits: next to those of jobs that stall or wait for longer, or because there
        are none. If it does, or `must` come, the job has the slot for `duration_s` seconds, at most MAX_STALL_S; if
        not, it is to ask again within `retry_s`.

        Raises:
            UsageError: The file cannot be written or locked.
        """
        fits = False

        def take(found: Any) -> Any:
            nonlocal fits
            now = self._clock()
            jobs = _read_entries(found, now)
            own = jobs.pop(self.share.holder, None)
            since = now if own is None or own.stalls else own.since
            ahead_w = sum(each.watts for each in jobs.values() if each.stalls or each.since < since)
            fits = not ahead_w or ahead_w + self.share.swing_w <= self.share.max_swing_w
            stalls = fits or must
            until = now + (min(duration_s, MAX_STALL_S) if stalls else retry_s + WAIT_LEASE_S)
            jobs[self.share.holder] = StallEntry(self.share.swing_w, since, until, stalls)
            return asdict(StallTable(jobs))

        # a job that is about to train on does not wait for the lock: it asks again
        self._file.change(take, lock_timeout_s=0.0)
        return fits

    def free(self, lock_timeout_s: float = 0.0) -> bool:
        """Give the slot back, or the place in the queue. Return whether that worked: not if another job holds the lock
        for longer than `lock_timeout_s`.

        Raises:
            UsageError: The file cannot be written or locked.
        """

        def free(found: Any) -> Any:
            jobs = _read_entries(found, self._clock())
            jobs.pop(self.share.holder, None)
            return asdict(StallTable(jobs))

        return self._file.change(free, lock_timeout_s)


def _read_entries(found: Any, now: float) -> dict[str, StallEntry]:
    """Return the entries that hold; none where no job has taken a slot, or the file was damaged."""
    try:
        table: StallTable = read_as(StallTable, found)
    except (ValueError, OverflowError):
        return {}
    return {name: each for name, each in table.jobs.items() if now < each.until <= now + 2 * MAX_STALL_S}
