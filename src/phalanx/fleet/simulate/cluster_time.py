"""How the devices of a simulated cluster spent their time."""

from dataclasses import dataclass


@dataclass
class ClusterTime:
    """Device-seconds of a cluster by state. All add up to its devices times the time simulated."""

    productive: float = 0.0
    blocked: float = 0.0
    wasted: float = 0.0
    unavailable: float = 0.0
    throttled: float = 0.0
    idle: float = 0.0
    spare: float = 0.0
    repair: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all states."""
        return self.used + self.idle + self.spare + self.repair

    @property
    def used(self) -> float:
        """Sum of the states in which a job has the device."""
        return self.productive + self.blocked + self.wasted + self.unavailable + self.throttled
