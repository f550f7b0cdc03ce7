"""Services of the nodes file: metrics endpoints and management controllers of nodes, and the building's bus of racks.
Each is opened when it first answers, and stays open."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from phalanx.fleet.latest_reading import LatestReading, reading_from_sample
from phalanx.fleet.nodes_file import NodesFile, NodesFileEntry
from phalanx.fleet.telemetry.counters import DeviceChecker
from phalanx.fleet.telemetry.mqtt import MqttOptions, open_mqtt
from phalanx.fleet.telemetry.prometheus import PrometheusOptions, open_prometheus
from phalanx.fleet.telemetry.redfish import RedfishOptions, open_redfish
from phalanx.fleet.telemetry.rollup import merge_hosts
from phalanx.fleet.telemetry.sample import SAMPLE_INTERVAL_S, NodeSample, RackSample
from phalanx.fleet.telemetry.source import SourceReading, SourceUnavailableError, TelemetrySource

MAX_CONCURRENT_READS = 32


@dataclass(frozen=True)
class ServiceOpeners:
    """How each kind of service is opened."""

    prometheus: Callable[[PrometheusOptions], TelemetrySource] = open_prometheus
    redfish: Callable[[RedfishOptions], TelemetrySource] = open_redfish
    mqtt: Callable[[MqttOptions], TelemetrySource] = open_mqtt


class _Service:
    """A source that is opened with the first read that finds it."""

    def __init__(self, open_source: Callable[[], TelemetrySource], period_s: float):
        self._open_source, self.period_s = open_source, period_s
        self._source: TelemetrySource | None = None
        self.problem: str | None = None

    def read(self) -> SourceReading:
        """Read it now; nothing where it cannot be opened, with the reason in `problem`."""
        try:
            self._source = self._source or self._open_source()
            self.problem = None
        except SourceUnavailableError as error:
            self.problem = str(error)
            return SourceReading()
        return self._source.read()

    def close(self) -> None:
        """Let go of it."""
        if self._source is not None:
            self._source.close()


class NodeServices:
    """Readings of nodes and racks from the services of a nodes file.

    Args:
        now: Returns seconds since the epoch; `clock`: of a monotonic clock.
    """

    def __init__(
        self,
        file: NodesFile,
        openers: ServiceOpeners | None = None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ):
        openers = openers or ServiceOpeners()
        self._now, self._clock = now, clock
        self._services = {entry.name: _make_services(entry, openers) for entry in file.nodes}
        self._checkers = {entry.name: DeviceChecker() for entry in file.nodes}
        options = None if file.mqtt is None else MqttOptions(**file.mqtt.model_dump())
        self._racks = None if options is None else _Service(lambda: openers.mqtt(options), SAMPLE_INTERVAL_S)

    def read_nodes(self) -> tuple[Mapping[str, LatestReading], list[str]]:
        """Return the reading of each node that has a service, and what could not be read, in words."""
        names = [name for name, services in self._services.items() if services]
        if not names:
            return {}, []
        with ThreadPoolExecutor(min(MAX_CONCURRENT_READS, len(names))) as pool:
            readings = dict(zip(names, pool.map(self._read_node, names), strict=True))
        problems = [
            f"{name}: {service.problem}" for name in names for service in self._services[name] if service.problem
        ]
        return {name: reading for name, reading in readings.items() if reading is not None}, problems

    def read_racks(self) -> tuple[Sequence[RackSample], list[str]]:
        """Return the racks on the bus, and why they could not be read."""
        if self._racks is None:
            return (), []
        racks = self._racks.read().racks
        return racks, [] if self._racks.problem is None else [self._racks.problem]

    def close(self) -> None:
        """Close all services."""
        for service in [each for services in self._services.values() for each in services]:
            service.close()
        if self._racks is not None:
            self._racks.close()

    def _read_node(self, name: str) -> LatestReading | None:
        services = self._services[name]
        found = [(service, service.read()) for service in services]
        used = [(service, reading) for service, reading in found if reading.devices or reading.host is not None]
        if not used:
            return None
        checker, clock = self._checkers[name], self._clock()
        devices = tuple(
            checker.check(device, clock, reading.renewal_s) for _, reading in used for device in reading.devices
        )
        host = merge_hosts(reading.host for _, reading in used if reading.host is not None)
        reading = reading_from_sample(NodeSample(self._now(), host, devices), max(each.period_s for each, _ in used))
        age_s = max(reading.host_age_s for _, reading in used)
        return replace(reading, time=reading.time - age_s)


def _make_services(entry: NodesFileEntry, openers: ServiceOpeners) -> list[_Service]:
    services = []
    if entry.prometheus is not None:
        endpoint = PrometheusOptions(url=entry.prometheus)
        services.append(_Service(lambda: openers.prometheus(endpoint), endpoint.renewal_s))
    if entry.redfish is not None:
        controller = RedfishOptions(**entry.redfish.model_dump())
        services.append(_Service(lambda: openers.redfish(controller), controller.interval_s))
    return services
