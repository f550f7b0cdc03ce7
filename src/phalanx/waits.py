"""Waits for what may never come: each has an end, and says now and then that it goes on."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from phalanx.streams import printable

if TYPE_CHECKING:
    import psutil

LOOK = 1.0
"""Seconds between two looks at what is waited for."""
SAYING = 30.0
"""Seconds after which a wait says that it goes on, again and again."""
HELD = 4
"""Looks, one each second, after which processes of ours that were stopped are continued. They are counted, and
not seconds, since a scheduler that suspends a job stops this process, too, and then continues all."""
LONGEST_LOOK = 5.0
"""Seconds that count between two looks, at most: in the rest this process was stopped, and probably what it
waits for as well."""


def at(seconds: float, now: Callable[[], float] = time.time) -> str:
    """The time of day in so many seconds."""
    return time.strftime("%H:%M:%S", time.localtime(now() + seconds))


def say(text: str) -> None:
    """Tell people, where there is no run yet whose events could."""
    print(printable(text), file=sys.stderr, flush=True)


class Wait:
    """A wait for `what`, which lasts `limit` seconds at most; `waited`: how long it has lasted."""

    def __init__(
        self,
        what: str,
        limit: float,
        tell: Callable[[str], None] = say,
        clock: Callable[[], float] = time.monotonic,
        saying: float = SAYING,
    ):
        self.what, self.limit = what, limit
        self._tell, self._clock, self._saying = tell, clock, saying
        self.waited, self._said, self._looked = 0.0, 0.0, clock()

    def begin(self) -> None:
        """Say what is waited for, and until when."""
        until = f" until {at(self.limit)}" if math.isfinite(self.limit) else ""
        self._tell(f"waiting for {self.what}{until}")

    def over(self) -> bool:
        """Whether it has lasted too long. To be called every second or so, since it is this that says that it goes
        on."""
        now = self._clock()
        self.waited += min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        if self.waited >= self.limit:
            return True
        if self.waited - self._said >= self._saying:
            self._said = self.waited
            most = f", for {self.limit:.0f} s at most" if math.isfinite(self.limit) else ""
            self._tell(f"still waiting for {self.what} after {self.waited:.0f} s{most}")
        return False


def stopped(pids: Iterable[int]) -> "list[psutil.Process]":
    """Those of these processes that were stopped by a signal; not by a debugger, which no signal continues."""
    import psutil  # it takes longer than all else here, and nothing may ever have to be waited for

    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_STOPPED:
                found.append(process)
    return found


def resume(processes: "Iterable[psutil.Process]") -> None:
    """Continue processes that were stopped."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
