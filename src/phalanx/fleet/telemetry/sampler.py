"""Sample a node: into the ring file, and rolled up into minutes. In a thread, once a second, while an agent runs."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

from phalanx.fleet.telemetry.counters import CounterTotal, DeviceChecker
from phalanx.fleet.telemetry.ring_file import RingWriter
from phalanx.fleet.telemetry.rollup import MinuteBuilder, merge_hosts
from phalanx.fleet.telemetry.sample import SAMPLE_INTERVAL_S, DeviceSample, NodeSample
from phalanx.fleet.telemetry.source import TelemetrySource
from phalanx.run.telemetry_minutes import NodeMinute

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
"""Seconds to wait for the last reading: a driver may never answer."""


class NodeSampler:
    """Takes samples of this node.

    Args:
        on_minute: called with each minute that is over, and at the end with the part of one.
        on_sample: called with each sample.
        clock: seconds of a monotonic clock; `wall_clock`: seconds since the epoch.
    """

    def __init__(
        self,
        sources: Sequence[TelemetrySource],
        node: str,
        ring: RingWriter | None = None,
        on_minute: Callable[[NodeMinute], None] = lambda minute: None,
        on_sample: Callable[[NodeSample], None] = lambda sample: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ):
        self._sources, self._ring, self._on_minute, self._on_sample = sources, ring, on_minute, on_sample
        self._clock, self._wall_clock = clock, wall_clock
        self._checker, self._minutes = DeviceChecker(), MinuteBuilder(node)
        self._energy: dict[str, CounterTotal] = {}

    def energy_joules(self, device_ids: Sequence[str]) -> float | None:
        """Joules of these devices since the first sample, by their counters; None if one of them has none."""
        totals = [self._energy.get(id) for id in device_ids]
        known = [each.total for each in totals if each is not None]
        return sum(known) if known and len(known) == len(totals) else None

    def read(self) -> NodeSample:
        """Take one sample now."""
        readings = [source.read() for source in self._sources]
        now = self._clock()
        devices: dict[str, DeviceSample] = {}
        for reading in readings:
            for device in reading.devices:
                if device.id not in devices:  # the first source that has it gives it, and alone is checked
                    devices[device.id] = self._checker.check(device, now, reading.renewal_s)
        host = merge_hosts(reading.host for reading in readings if reading.host is not None)
        sample = NodeSample(self._wall_clock(), host, tuple(devices.values()))
        for device in sample.devices:
            if device.energy_joules is not None:
                self._energy.setdefault(device.id, CounterTotal()).add(device.energy_joules)
        self._write_to_ring(sample)
        self._on_sample(sample)
        if (minute := self._minutes.add(sample)) is not None:
            self._on_minute(minute)
        return sample

    def close(self) -> None:
        """Pass on the part of the last minute, and close the ring file and the sources."""
        if (minute := self._minutes.take()) is not None:
            self._on_minute(minute)
        if self._ring is not None:
            self._ring.close()
        for source in self._sources:
            source.close()

    def _write_to_ring(self, sample: NodeSample) -> None:
        """Storage that fails ends the ring file, never the sampling."""
        if self._ring is None:
            return
        try:
            self._ring.write(sample)
        except OSError as error:
            logger.warning("telemetry: samples are no longer kept on this node: %s", error)
            self._ring.close()
            self._ring = None


class SamplingThread:
    """Takes a sample a second in a thread of its own until `stop`. The thread also opens the sources, by
    `make_sampler`, and closes them: a driver or storage that hangs never blocks the caller."""

    def __init__(self, make_sampler: Callable[[], NodeSampler], clock: Callable[[], float] = time.monotonic):
        self._make_sampler, self._clock = make_sampler, clock
        self._stop_requested = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling. A source that does not answer in time is left behind."""
        self._stop_requested.set()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("telemetry: a driver or storage did not answer for %g s", STOP_TIMEOUT_S)

    def _run(self) -> None:
        with contextlib.closing(self._make_sampler()) as sampler:
            due = self._clock()
            while True:
                sampler.read()
                due = max(due + SAMPLE_INTERVAL_S, self._clock())  # what a slow source missed is not made up for
                if self._stop_requested.wait(due - self._clock()):
                    return
