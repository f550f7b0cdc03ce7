"""Services of the nodes file: metrics endpoints and management controllers of nodes, and the building's bus of racks.
Each is opened when it first answers, and stays open."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from phalanx.fleet.latest_reading import LatestReading, reading_from_sample
from phalanx.fleet.nodes_file import NodesFile, NodesFileEntry
from phalanx.fleet.telemetry.counters import DeviceChecker
from phalanx.fleet.telemetry.modbus import ModbusOptions, open_modbus
from phalanx.fleet.telemetry.mqtt import MqttOptions, open_mqtt
from phalanx.fleet.telemetry.prometheus import PrometheusOptions, open_prometheus
from phalanx.fleet.telemetry.redfish import RedfishOptions, open_redfish
from phalanx.fleet.telemetry.redfish_cdu import RedfishCduOptions, open_redfish_cdu
from phalanx.fleet.telemetry.rollup import merge_hosts
from phalanx.fleet.telemetry.sample import SAMPLE_INTERVAL_S, NodeSample, RackSample
from phalanx.fleet.telemetry.source import SourceReading, SourceUnavailableError, TelemetrySource

MAX_CONCURRENT_READS = 32
REOPEN_WAIT_S = 0.2
"""Seconds that a reading waits for a service that did not answer before."""


@dataclass(frozen=True)
class ServiceOpeners:
    """How each kind of service is opened."""

    prometheus: Callable[[PrometheusOptions], TelemetrySource] = open_prometheus
    redfish: Callable[[RedfishOptions], TelemetrySource] = open_redfish
    mqtt: Callable[[MqttOptions], TelemetrySource] = open_mqtt
    redfish_cdu: Callable[[RedfishCduOptions], TelemetrySource] = open_redfish_cdu
    modbus: Callable[[ModbusOptions], TelemetrySource] = open_modbus


class _Service:
    """A source that is opened with the first read that finds it. The first read waits for it; a later one only for a
    moment, so that a service that is down delays no other."""

    def __init__(self, open_source: Callable[[], TelemetrySource], period_s: float):
        self._open_source, self.period_s = open_source, period_s
        self._source: TelemetrySource | None = None
        self._attempt: Future[TelemetrySource] | None = None
        self._num_attempts = 0
        self.problem: str | None = None

    def read(self) -> SourceReading:
        """Read it now; nothing where it cannot be opened, with the reason in `problem`."""
        if self._source is None and not self._open():
            return SourceReading()
        assert self._source is not None
        return self._source.read()

    def close(self) -> None:
        """Let go of it."""
        if self._source is not None:
            self._source.close()

    def _open(self) -> bool:
        if self._attempt is None:
            self._attempt = _start_opening(self._open_source)
            self._num_attempts += 1
        try:
            self._source = self._attempt.result(None if self._num_attempts == 1 else REOPEN_WAIT_S)
            self.problem = None
        except TimeoutError:
            return False  # it is still being opened; the problem is that of the attempt before
        except SourceUnavailableError as error:
            self.problem, self._attempt = str(error), None
        return self._source is not None


def _start_opening(open_source: Callable[[], TelemetrySource]) -> "Future[TelemetrySource]":
    """Open a source in a thread that ends with the process: a service may not answer for a long time."""
    future: Future[TelemetrySource] = Future()

    def run() -> None:
        try:
            future.set_result(open_source())
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            future.set_exception(error)

    threading.Thread(target=run, name="telemetry-open", daemon=True).start()
    return future


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
        self._liquid = _make_liquid_services(file, openers)

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
        """Return the racks and CDUs, and why some could not be read."""
        if not self._liquid:
            return (), []
        with ThreadPoolExecutor(min(MAX_CONCURRENT_READS, len(self._liquid))) as pool:
            readings = list(pool.map(_Service.read, self._liquid))
        racks = tuple(rack for reading in readings for rack in reading.racks)
        return racks, [service.problem for service in self._liquid if service.problem is not None]

    def close(self) -> None:
        """Close all services."""
        for service in [*(each for services in self._services.values() for each in services), *self._liquid]:
            service.close()

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


def _make_liquid_services(file: NodesFile, openers: ServiceOpeners) -> list[_Service]:
    """The bus, and the CDUs that are not on it."""
    services = []
    if file.mqtt is not None:
        bus = MqttOptions(**file.mqtt.model_dump())
        services.append(_Service(lambda: openers.mqtt(bus), SAMPLE_INTERVAL_S))
    for cdu in file.cdus:
        if cdu.redfish is not None:
            controller = RedfishCduOptions(id=cdu.id, **cdu.redfish.model_dump())
            services.append(_Service(partial(openers.redfish_cdu, controller), controller.interval_s))
        elif cdu.modbus is not None:
            device = ModbusOptions(id=cdu.id, entry=cdu.modbus)
            services.append(_Service(partial(openers.modbus, device), cdu.modbus.interval_s))
    return services
