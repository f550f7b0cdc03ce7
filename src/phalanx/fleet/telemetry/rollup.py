"""Roll the samples of a node up into minutes: least, mean and most of each value, the increase of each counter."""

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from phalanx.fleet.telemetry.counters import CounterTotal
from phalanx.fleet.telemetry.ring_file import DEVICE_COLUMNS, HOST_COLUMNS
from phalanx.fleet.telemetry.sample import SAMPLE_INTERVAL_S, DeviceSample, HostSample, NodeSample
from phalanx.run.telemetry_minutes import NodeEnergy, NodeMinute, Rollups, ValueRollup

ROLLUP_S = 60
DEVICE_POWER_COLUMNS = ("power_mean_w", "power_instant_w")
NOT_AVERAGED = {"slow_reasons", "cpu_power_is_estimate", "xid"}
"""Columns of which a mean means nothing."""


def is_counter(column: str) -> bool:
    """Whether a sample's field counts, so that only its differences mean something."""
    return column.endswith(("_total", "_joules"))


@dataclass
class _ValueSums:
    low: float = math.inf
    high: float = -math.inf
    sum: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.low, self.high = min(self.low, value), max(self.high, value)
        self.sum, self.count = self.sum + value, self.count + 1


@dataclass
class _RollupBuilder:
    """One device's or the host's part of the minute. Counters continue from minute to minute."""

    columns: tuple[str, ...]
    sums: dict[str, _ValueSums] = field(default_factory=dict)
    counters: dict[str, CounterTotal] = field(default_factory=dict)
    increases: dict[str, float] = field(default_factory=dict)
    xids: list[int] = field(default_factory=list)

    def add(self, sample: HostSample | DeviceSample) -> None:
        for column in self.columns:
            value = getattr(sample, column)
            if value is None or column in NOT_AVERAGED:
                continue
            if not is_counter(column):
                self.sums.setdefault(column, _ValueSums()).add(value)
            elif (increase := self.counters.setdefault(column, CounterTotal()).add(value)) is not None:
                self.increases[column] = self.increases.get(column, 0.0) + increase
                if column == "xids_total" and increase and isinstance(sample, DeviceSample) and sample.xid:
                    self.xids.append(int(sample.xid))

    def take(self) -> Rollups:
        values = {
            name: ValueRollup(sums.low, sums.sum / sums.count, sums.high, sums.count)
            for name, sums in self.sums.items()
        }
        found = Rollups(values, self.increases, tuple(self.xids))
        self.sums, self.increases, self.xids = {}, {}, []
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
        """Add a sample; return the minute before if this one begins another. A clock that is set back begins another,
        too."""
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
    merged: dict[str, float | None] = dict.fromkeys(HOST_COLUMNS)
    is_estimate = False
    for part in parts:
        if merged["cpu_power_w"] is None and part.cpu_power_w is not None:
            is_estimate = part.cpu_power_is_estimate
        for column in HOST_COLUMNS:
            if merged[column] is None:
                merged[column] = getattr(part, column)
    merged.pop("cpu_power_is_estimate")
    return HostSample(**merged, cpu_power_is_estimate=is_estimate)
