"""Sample a node once a second in a thread, while an agent runs: into the ring file, and rolled up into minutes."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from phalanx.fleet.telemetry.counters import CounterTotal, DeviceChecker
from phalanx.fleet.telemetry.ring_file import RingWriter
from phalanx.fleet.telemetry.rollup import MinuteBuilder, merge_hosts
from phalanx.fleet.telemetry.sample import DeviceSample, NodeSample
from phalanx.fleet.telemetry.source import TelemetrySource
from phalanx.run.telemetry_minutes import NodeMinute

logger = logging.getLogger(__name__)

SAMPLE_INTERVAL_S = 1.0
STOP_TIMEOUT_S = 5.0
"""Seconds to wait for the last reading: a driver may never answer."""


class NodeSampler:
    """Samples of this node. `read` takes one; `start` takes one a second in a thread of its own.

    Args:
        on_minute: called in the thread with each minute that is over, and at the end with the part of one.
        clock: seconds of a monotonic clock; `wall_clock`: seconds since the epoch.
    """

    def __init__(
        self,
        sources: Sequence[TelemetrySource],
        node: str,
        ring: RingWriter | None = None,
        on_minute: Callable[[NodeMinute], None] = lambda minute: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ):
        self._sources, self._ring, self._on_minute = sources, ring, on_minute
        self._clock, self._wall_clock = clock, wall_clock
        self._checker, self._minutes = DeviceChecker(), MinuteBuilder(node)
        self._energy: dict[str, CounterTotal] = {}
        self._stop_requested = threading.Event()
        self._thread: threading.Thread | None = None
        self.latest: NodeSample | None = None
        """The newest sample; its time says how old it is."""

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
        for device in (each for reading in readings for each in reading.devices):
            devices.setdefault(device.id, self._checker.check(device, now))
        host = merge_hosts(reading.host for reading in readings if reading.host is not None)
        return self._add(NodeSample(self._wall_clock(), host, tuple(devices.values())))

    def start(self) -> None:
        """Sample once a second until `stop`."""
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling, and pass on the part of the last minute. A source that does not answer is left behind."""
        self._stop_requested.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
            if self._thread.is_alive():
                logger.warning("telemetry: a source did not answer for %g s", STOP_TIMEOUT_S)
                return
        if (minute := self._minutes.take()) is not None:
            self._on_minute(minute)
        if self._ring is not None:
            self._ring.close()
        for source in self._sources:
            source.close()

    def _run(self) -> None:
        due = self._clock()
        while not self._stop_requested.wait(max(0.0, due - self._clock())):
            self.read()
            # what a slow source missed is not made up for
            due = max(due + SAMPLE_INTERVAL_S, self._clock())

    def _add(self, sample: NodeSample) -> NodeSample:
        for device in sample.devices:
            if device.energy_joules is not None:
                self._energy.setdefault(device.id, CounterTotal()).add(device.energy_joules)
        self._write_to_ring(sample)
        if (minute := self._minutes.add(sample)) is not None:
            self._on_minute(minute)
        self.latest = sample
        return sample

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
