"""Find breaches of load targets: measured power above the target's limit, from the first sight to the end under one id.
Pure but for the ids."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.fleet.power.load_targets import LoadTarget

BREACH_SHARE = 0.01
"""Share of a limit by which power has to be above it: less is noise of the sensors."""
CRITICAL_SHARE = 0.2
RESPONSE_S = 10.0
"""Seconds that the guard has from the start of a target until what is above it is a breach."""
ESCALATION_S = 60.0
"""Seconds after which a breach is escalated."""


@dataclass(frozen=True)
class Breach:
    """A breach of a target, in one of its states. Times in unix seconds."""

    id: str
    target: LoadTarget
    status: Literal["active", "escalated", "resolved"]
    measured_w: float
    detected_s: float
    resolved_s: float | None = None

    @property
    def is_critical(self) -> bool:
        """Whether power is far above the limit."""
        return self.measured_w > (self.target.limit_w or 0.0) * (1 + CRITICAL_SHARE)

    def __str__(self) -> str:
        limit_w = self.target.limit_w or 0.0
        return f"breach {self.status}: {self.target.level} at {self.measured_w:.0f} W, target {limit_w:.0f} W"


class BreachTracker:
    """Follows the breaches of all levels."""

    def __init__(self) -> None:
        self._open: dict[str, Breach] = {}
        self._since: dict[str, tuple[LoadTarget, float]] = {}

    def update(
        self, targets: Mapping[str, LoadTarget], measured_w: Mapping[str, float], unix_time_s: float
    ) -> list[Breach]:
        """Return the breaches of which the state has changed.

        Args:
            targets: The active one of each level.
            measured_w: Of each level that has one.
            unix_time_s: Now.
        """
        changed = []
        for level in {*targets, *self._open}:
            target, watts = targets.get(level), measured_w.get(level, 0.0)
            if target is None:
                self._since.pop(level, None)
            elif level not in self._since or self._since[level][0] != target:
                self._since[level] = target, unix_time_s
            found = self._update_level(level, target, watts, unix_time_s)
            if found is not None:
                changed.append(found)
        return changed

    def _update_level(self, level: str, target: LoadTarget | None, watts: float, now: float) -> Breach | None:
        breach = self._open.get(level)
        is_over = target is not None and watts > (target.limit_w or 0.0) * (1 + BREACH_SHARE)
        if breach is not None and not is_over:
            del self._open[level]
            return replace(breach, status="resolved", measured_w=watts, resolved_s=now)
        if target is None or not is_over:
            return None
        if breach is None:
            if now - self._since[level][1] < RESPONSE_S:
                return None
            self._open[level] = Breach(str(uuid.uuid4()), target, "active", watts, now)
            return self._open[level]
        if breach.status == "active" and now - breach.detected_s >= ESCALATION_S:
            self._open[level] = replace(breach, status="escalated", measured_w=watts)
            return self._open[level]
        return None
