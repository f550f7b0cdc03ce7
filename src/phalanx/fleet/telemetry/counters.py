"""Differences of counters, and counters that no longer change. Pure: readings and times in, differences out."""

from dataclasses import dataclass, field, replace

from phalanx.fleet.telemetry.sample import DeviceSample

FROZEN_AFTER_S = 5.0
"""Seconds for which an energy counter may not change while the device draws power: NVML's moves every 0.1 s, others'
every second or two."""
FROZEN_AFTER_RENEWALS = 3
"""The same for a service that renews its values more slowly."""
MIN_ACTIVE_W = 5.0
"""Watts from which a counter must move; idle accelerators draw more."""


@dataclass
class CounterTotal:
    """The sum of a counter's increases. A counter that restarts (driver reload, device reset) loses what it counted
    between the last reading and the restart; a missing reading loses nothing, since the next one includes it."""

    total: float = 0.0
    last: float | None = None

    def add(self, value: float | None) -> float | None:
        """Add a reading; return the increase since the one before. None: missing, the first one, or after a restart."""
        last = self.last
        if value is None:
            return None
        self.last = value
        if last is None or value < last:
            return None
        self.total += value - last
        return value - last


@dataclass
class FrozenCounterCheck:
    """Finds an energy counter that does not change although the device draws power: a dead sensor."""

    _last: float | None = None
    _changed_at: float = 0.0

    def is_frozen(self, value: float | None, power_w: float | None, time_s: float, renewal_s: float = 0.0) -> bool:
        """Whether this reading is one of a counter that does not change.

        Args:
            time_s: of a monotonic clock.
            renewal_s: seconds between new values at the source.
        """
        if value is None or value != self._last or power_w is None or power_w < MIN_ACTIVE_W:
            self._last, self._changed_at = (self._last if value is None else value), time_s
            return False
        return time_s - self._changed_at >= max(FROZEN_AFTER_S, FROZEN_AFTER_RENEWALS * renewal_s)


@dataclass
class DeviceChecker:
    """Replaces what cannot be trusted in the samples of devices by None."""

    _checks: dict[str, FrozenCounterCheck] = field(default_factory=dict)

    def check(self, sample: DeviceSample, time_s: float, renewal_s: float = 0.0) -> DeviceSample:
        """The sample with missing values where readings cannot be trusted."""
        check = self._checks.setdefault(sample.id, FrozenCounterCheck())
        if check.is_frozen(sample.energy_joules, sample.power_w, time_s, renewal_s):
            sample = replace(sample, energy_joules=None)
        return sample
