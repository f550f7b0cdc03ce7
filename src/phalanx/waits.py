"""Waits for what may never come: each has an end, and says now and then that it goes on."""

import sys
import time
from collections.abc import Callable

from phalanx.streams import printable

LOOK = 1.0
"""Seconds between two looks at what is waited for."""
SAYING = 30.0
"""Seconds after which a wait says that it goes on, again and again."""
LONGEST_LOOK = 5.0
"""Seconds that count between two looks, at most: in the others this process was held still itself, and what it waits
for as well, as far as it knows."""


def say(text: str) -> None:
    """Tell people, where there is no run yet whose events could."""
    print(printable(text), file=sys.stderr, flush=True)


class Wait:
    """A wait for `what`, which lasts `limit` seconds at most."""

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
        self._waited, self._told, self._looked = 0.0, 0.0, clock()

    def over(self) -> bool:
        """Whether it has lasted too long. To be called every second or so, since it is this that says that it goes
        on."""
        now = self._clock()
        self._waited += min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        if self._waited >= self.limit:
            return True
        if self._waited - self._told >= self._saying:
            self._told = self._waited
            self._tell(f"still waiting for {self.what} after {self._waited:.0f} s, for {self.limit:.0f} s at most")
        return False
