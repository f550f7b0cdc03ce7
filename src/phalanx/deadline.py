"""Waits with a deadline that report from time to time that they still wait."""

import math
import sys
import time
from collections.abc import Callable

from phalanx.std_streams import escape_control_chars

POLL_INTERVAL_S = 1.0
"""Seconds between two looks at what is waited for."""
REPORT_INTERVAL_S = 30.0
"""Seconds between two reports of a wait."""
MAX_COUNTED_INTERVAL_S = 5.0
"""Seconds that count between two looks, at most: in the rest this process was stopped, and probably what it
waits for as well."""


def format_clock_time(seconds: float, clock: Callable[[], float] = time.time) -> str:
    """Format the time of day in `seconds` seconds."""
    return time.strftime("%H:%M:%S", time.localtime(clock() + seconds))


def print_status(text: str) -> None:
    """Print a status line to stderr, for use before there is a run with events."""
    print(escape_control_chars(text), file=sys.stderr, flush=True)


class Deadline:
    """A wait for `what`, which lasts `limit_s` seconds at most; `waited_s`: how long it has lasted."""

    def __init__(
        self,
        what: str,
        limit_s: float,
        report: Callable[[str], None] = print_status,
        clock: Callable[[], float] = time.monotonic,
        report_interval_s: float = REPORT_INTERVAL_S,
    ):
        self.what, self.limit_s = what, limit_s
        self._report, self._clock, self._report_interval_s = report, clock, report_interval_s
        self.waited_s, self._last_report_s, self._last_check_s = 0.0, 0.0, clock()

    def announce(self) -> None:
        """Say what is waited for, and until when."""
        until = f" until {format_clock_time(self.limit_s)}" if math.isfinite(self.limit_s) else ""
        self._report(f"waiting for {self.what}{until}")

    def check_expired(self) -> bool:
        """Whether the wait has lasted too long. Call it every second or so: it also prints the reports."""
        now = self._clock()
        self.waited_s += min(now - self._last_check_s, MAX_COUNTED_INTERVAL_S)
        self._last_check_s = now
        if self.waited_s >= self.limit_s:
            return True
        if self.waited_s - self._last_report_s >= self._report_interval_s:
            self._last_report_s = self.waited_s
            limit_text = f", for {self.limit_s:.0f} s at most" if math.isfinite(self.limit_s) else ""
            self._report(f"still waiting for {self.what} after {self.waited_s:.0f} s{limit_text}")
        return False
