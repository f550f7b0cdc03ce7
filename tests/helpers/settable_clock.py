"""A clock that tests set."""

from dataclasses import dataclass


@dataclass
class SettableClock:
    """Gives `now`."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now
