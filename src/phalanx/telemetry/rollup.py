"""Roll the samples of a node up into minutes: least, mean and most of each value, the increase of each counter. Find
counters that no longer change. Pure: readings and times in."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from phalanx.run.telemetry_minutes import NodeEnergy, NodeMinute, Rollups, ValueRollup
from phalanx.telemetry.sample import SAMPLE_INTERVAL_S, DeviceSample, HostSample, NodeSample

ROLLUP_S = 60
HOST_COLUMNS = tuple(each.name for each in fields(HostSample))
DEVICE_COLUMNS = tuple(each.name for each in fields(DeviceSample) if each.name not in ("id", "name"))
DEVICE_POWER_COLUMNS = ("power_mean_w", "power_instant_w")
FROZEN_AFTER_S = 5.0
"""Seconds for which an energy counter may not change under power: NVML's moves every 0.1 s, others' every 1 to 2 s."""
FROZEN_AFTER_RENEWALS = 3
"""The same for a service that renews its values more slowly."""
MIN_ACTIVE_W = 5.0
"""Watts from which a counter must move; idle accelerators draw more."""
NOT_AVERAGED = {"slow_reasons", "cpu_power_is_estimate", "xid"}
"""Columns of which a mean means nothing."""


def is_counter(column: str) -> bool:
    """Whether a sample's field counts, so that only its differences mean something."""
    return column.endswith(("_total", "_joules"))


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
class DeviceChecker:
    """Finds devices of which the energy counter does not change although they draw power: a dead sensor."""

    _counts: dict[str, tuple[float | None, float]] = field(default_factory=dict)
    """The last count of each device, and since when it is that."""

    def is_frozen(self, sample: DeviceSample, time_s: float, renewal_s: float = 0.0) -> bool:
        """Whether this reading is one of a counter that does not change. `time_s`: of a monotonic clock; `renewal_s`:
        seconds between new values at the source."""
        value, power_w = sample.energy_joules, sample.power_w
        last, changed_at = self._counts.get(sample.id, (None, 0.0))
        if value is None or value != last or power_w is None or power_w < MIN_ACTIVE_W:
            self._counts[sample.id] = (last if value is None else value), time_s
            return False
        return time_s - changed_at >= max(FROZEN_AFTER_S, FROZEN_AFTER_RENEWALS * renewal_s)

    def check(self, sample: DeviceSample, time_s: float, renewal_s: float = 0.0) -> DeviceSample:
        """The sample without a count that cannot be trusted."""
        return replace(sample, energy_joules=None) if self.is_frozen(sample, time_s, renewal_s) else sample


@dataclass
class _RollupBuilder:
    """One device's or the host's part of the minute. Counters continue from minute to minute."""

    columns: tuple[str, ...]
    values: dict[str, list[float]] = field(default_factory=dict)
    counters: dict[str, CounterTotal] = field(default_factory=dict)
    increases: dict[str, float] = field(default_factory=dict)
    xids: list[int] = field(default_factory=list)

    def add(self, sample: HostSample | DeviceSample) -> None:
        for column in self.columns:
            value = getattr(sample, column)
            if value is None or column in NOT_AVERAGED:
                continue
            if not is_counter(column):
                self.values.setdefault(column, []).append(value)
            elif (increase := self.counters.setdefault(column, CounterTotal()).add(value)) is not None:
                self.increases[column] = self.increases.get(column, 0.0) + increase
                if column == "xids_total" and increase and isinstance(sample, DeviceSample) and sample.xid:
                    self.xids.append(int(sample.xid))

    def take(self) -> Rollups:
        values = {
            name: ValueRollup(min(each), sum(each) / len(each), max(each), len(each))
            for name, each in self.values.items()
        }
        found = Rollups(values, self.increases, tuple(self.xids))
        self.values, self.increases, self.xids = {}, {}, []
        return found


class MinuteBuilder:
    """Adds samples of a node, and returns each minute when its last sample is in."""

    def __init__(self, node: str):
        self._node = node
        self._host = _RollupBuilder(HOST_COLUMNS)
        self._devices: dict[str, _RollupBuilder] = {}
        self._minute: int | None = None
        self._num_samples = 0
        self._is_estimate = False

    def add(self, sample: NodeSample) -> NodeMinute | None:
        """Add a sample; return the minute before if this one begins another, also by a clock that is set back."""
        minute, done = int(sample.time // ROLLUP_S), None
        if self._minute is not None and minute != self._minute:
            done = self.take()
        self._minute = minute
        self._num_samples += 1
        self._is_estimate = sample.host.cpu_power_is_estimate
        self._host.add(sample.host)
        for device in sample.devices:
            self._devices.setdefault(device.id, _RollupBuilder(DEVICE_COLUMNS)).add(device)
        return done

    def take(self) -> NodeMinute | None:
        """The minute so far; None without a sample."""
        if self._minute is None or not self._num_samples:
            return None
        found = NodeMinute(
            time=float(self._minute * ROLLUP_S),
            duration_s=float(ROLLUP_S),
            num_samples=self._num_samples,
            node=self._node,
            host=self._host.take(),
            devices={id: builder.take() for id, builder in self._devices.items()},
            cpu_power_is_estimate=self._is_estimate,
        )
        self._num_samples = 0
        return found


def add_minute_energy(before: NodeEnergy, minute: NodeMinute, device_ids: Container[str] = ()) -> NodeEnergy:
    """The energy of a run on this node with this minute's. A counter's increase counts, else the mean power over the
    seconds that were read. `device_ids`: the run's accelerators; all, if none of these is in the minute."""
    seconds = minute.num_samples * SAMPLE_INTERVAL_S
    chosen = [device for id, device in minute.devices.items() if id in device_ids] or minute.devices.values()
    devices = [_find_joules(device, "energy_joules", DEVICE_POWER_COLUMNS, seconds) for device in chosen]
    known = [joules for joules in devices if joules is not None]
    cpu_j = _find_joules(minute.host, "cpu_energy_joules", ("cpu_power_w",), seconds)
    return NodeEnergy(
        device_j=before.device_j + sum(known),
        num_devices=max(before.num_devices, len(devices)),
        cpu_j=before.cpu_j + (cpu_j or 0.0),
        measured_s=before.measured_s + seconds,
        missing_device_s=before.missing_device_s + seconds * (len(devices) - len(known)),
    )


def _find_joules(rollups: Rollups, counter: str, power_columns: tuple[str, ...], seconds: float) -> float | None:
    if counter in rollups.increases:
        return rollups.increases[counter]
    found = next((rollups.values[column] for column in power_columns if column in rollups.values), None)
    return None if found is None else found.mean * seconds


def merge_hosts(parts: Iterable[HostSample]) -> HostSample:
    """One host of what several sources read of it; the first one that has a value gives it."""
    known = list(parts)
    merged: dict[str, Any] = {
        column: next((value for part in known if (value := getattr(part, column)) is not None), None)
        for column in HOST_COLUMNS
    }
    estimates = [part.cpu_power_is_estimate for part in known if part.cpu_power_w is not None]
    return HostSample(**{**merged, "cpu_power_is_estimate": any(estimates[:1])})
