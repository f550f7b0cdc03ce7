"""The nodes file: which nodes a fleet has where no backend lists them, and the services that their readings come from:
metrics endpoints and management controllers of nodes, and the building's bus of racks. Each is opened when it first
answers, and stays open."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from phalanx.cluster.spec import StrictModel
from phalanx.errors import RecipeError
from phalanx.recipe.field_types import NUMBER_NOT_BOOL
from phalanx.recipe.validation_errors import join_problems, read_user_mapping, validate_value
from phalanx.recipe.yaml_loader import location_of_key
from phalanx.telemetry.rollup import DeviceChecker, merge_hosts
from phalanx.telemetry.sample import SAMPLE_INTERVAL_S, HostSample, NodeSample, SourceUnavailableError
from phalanx_fleet.fleet_node import LatestReading, reading_from_sample
from phalanx_fleet.telemetry.modbus import ModbusEntry, open_modbus
from phalanx_fleet.telemetry.mqtt import MqttOptions, open_mqtt
from phalanx_fleet.telemetry.prometheus import RENEWAL_S, PrometheusSource
from phalanx_fleet.telemetry.redfish import RedfishOptions, open_redfish
from phalanx_fleet.telemetry.redfish_cdu import RedfishCduOptions, open_redfish_cdu
from phalanx_fleet.telemetry.service_reading import RackSample, ServiceReading, ServiceSource, start_call

FIRST_READ_TIMEOUT_S = 10.0
"""With the opening of a connection and a login."""
READ_TIMEOUT_S = 2.5
RETRY_TIMEOUT_S = 0.2
"""For a service that did not answer in time before."""
logger = logging.getLogger(__name__)


class CduEntry(StrictModel):
    """A coolant distribution unit. Without `redfish` and `modbus` it is read from the bus, by its object id."""

    id: str
    """The building's object id; any name where there is no bus."""
    racks: tuple[str, ...] = ()
    """Location ids of the racks that it supplies."""
    redfish: RedfishCduOptions | None = None
    modbus: ModbusEntry | None = None

    @model_validator(mode="after")
    def check_sources(self) -> "CduEntry":
        if self.redfish is not None and self.modbus is not None:
            raise ValueError("found redfish and modbus, expected one of them")
        return self


class NodesFileEntry(StrictModel):
    """A node, and what can be asked about it."""

    name: str
    """Name of the node, as the backend has it."""
    rack: str | None = None
    """Location id of its rack, as the building has it: a leak or a lost flow there is this node's."""
    prometheus: str | None = None
    """URL of a metrics endpoint with the accelerators of this node, such as http://n1:9400/metrics of dcgm-exporter."""
    redfish: RedfishOptions | None = None
    """The management controller of this node."""


class CoolingResponseSettings(StrictModel):
    """Limits of what is usual."""

    min_flow_share: Annotated[float, Field(gt=0, lt=1), NUMBER_NOT_BOOL] = 0.2
    """Of its usual flow, below which a rack or CDU has lost it."""


class NodesFile(StrictModel):
    """A fleet."""

    nodes: list[NodesFileEntry]
    """Nodes, in the order in which they are shown."""
    mqtt: MqttOptions | None = None
    """The bus with the racks."""
    cdus: tuple[CduEntry, ...] = ()
    """Coolant distribution units."""
    cooling_response: CoolingResponseSettings = CoolingResponseSettings()
    """What `phalanx thermal guard` knows of the nodes."""


def load_nodes_file(path: Path) -> NodesFile:
    """Load the nodes file at `path`. Raises RecipeError with a line for each problem: file, line, key, the value found
    and the value expected."""
    value, locations = read_user_mapping(path, "`nodes:` with a list")
    found = validate_value(value, locations, NodesFile)
    ids = {"nodes": ("name", [each.name for each in found.nodes]), "cdus": ("id", [each.id for each in found.cdus])}
    if problems := [
        f"{location_of_key(locations, (key, index, column))}: {key}.{index}.{column}: {name} appears twice"
        for key, (column, names) in ids.items()
        for index, name in enumerate(names)
        if name in names[:index]
    ]:
        raise join_problems(problems)
    if (
        bus_cdu := next((each.id for each in found.cdus if not (each.redfish or each.modbus)), None)
    ) and not found.mqtt:
        raise RecipeError(
            f"{location_of_key(locations, ('cdus',))}: cdus: {bus_cdu} has neither modbus nor redfish, and there is no "
            "mqtt to read it from"
        )
    return found


def find_racks_of_nodes(file: NodesFile) -> dict[str, str]:
    """Return the rack of each node that has one."""
    return {node.name: node.rack for node in file.nodes if node.rack is not None}


class _Service:
    """A source that is opened with the first read that finds it. Each read has a thread of its own, which ends with the
    process, and a deadline: a service that answers slowly, in drips or never delays no other. While a read has not
    ended no other one begins."""

    def __init__(self, url: str, open_source: Callable[[], ServiceSource], period_s: float):
        self._url, self._open_source, self.period_s = url, open_source, period_s
        self._source: ServiceSource | None = None
        self._reading: Future[ServiceReading] | None = None
        self._wait_s = FIRST_READ_TIMEOUT_S
        self.problem: str | None = None

    def start(self) -> None:
        """Begin to read, unless it is being read."""
        if self._reading is None:
            self._reading = start_call(self._open_and_read, "telemetry-read")

    def take(self, began: float) -> ServiceReading:
        """Return what is read within the time from `began` on; nothing where that is not, with the reason in
        `problem`."""
        assert self._reading is not None
        try:
            reading = self._reading.result(max(0.0, began + self._wait_s - time.monotonic()))
        except FutureTimeoutError:
            self.problem = self.problem or f"{self._url}: does not answer within {self._wait_s:g} s"
            self._wait_s = RETRY_TIMEOUT_S
            return ServiceReading()
        except Exception as error:
            logger.debug("telemetry: %s", self._url, exc_info=error)
            is_known = isinstance(error, SourceUnavailableError)
            self.problem = str(error) if is_known else f"{self._url}: unreadable: {type(error).__name__}: {error}"[:300]
            self._reading = None
            return ServiceReading()
        self._reading, self._wait_s, self.problem = None, READ_TIMEOUT_S, None
        if not _has_values(reading) and self._source is not None:
            self.problem = "; ".join(self._source.problems) or None
        return reading

    def close(self) -> None:
        if self._source is not None:
            self._source.close()

    def _open_and_read(self) -> ServiceReading:
        if self._source is None:
            self._source = self._open_source()
        return self._source.read()


def _has_values(reading: ServiceReading) -> bool:
    has_racks = any(rack.age_s is not None or rack.power_w is not None for rack in reading.racks)
    return bool(reading.devices) or reading.host not in (None, HostSample()) or has_racks


def _read_all(services: Sequence[_Service]) -> list[ServiceReading]:
    """Return the reading of each; all have the same time."""
    for service in services:
        service.start()
    began = time.monotonic()
    return [service.take(began) for service in services]


class NodeServices:
    """Readings of nodes and racks from the services of a nodes file.

    Args:
        now: Returns seconds since the epoch; `clock`: of a monotonic clock.
    """

    def __init__(
        self,
        file: NodesFile,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._now, self._clock = now, clock
        self._services = {entry.name: _make_services(entry) for entry in file.nodes}
        self._checkers = {entry.name: DeviceChecker() for entry in file.nodes}
        self._liquid = _make_liquid_services(file)

    def read_nodes(self) -> tuple[Mapping[str, LatestReading], list[str]]:
        """Return the reading of each node that has a service, and what could not be read, in words."""
        pairs = [(name, service) for name, services in self._services.items() for service in services]
        found: dict[str, list[tuple[_Service, ServiceReading]]] = {}
        for (name, service), reading in zip(pairs, _read_all([each for _, each in pairs]), strict=True):
            found.setdefault(name, []).append((service, reading))
        readings = {name: self._merge_node(name, each) for name, each in found.items()}
        problems = [f"{name}: {service.problem}" for name, service in pairs if service.problem]
        return {name: reading for name, reading in readings.items() if reading is not None}, problems

    def read_racks(self) -> tuple[Sequence[RackSample], list[str]]:
        """Return the racks and CDUs, and why some could not be read."""
        racks = tuple(rack for reading in _read_all(self._liquid) for rack in reading.racks)
        return racks, [service.problem for service in self._liquid if service.problem is not None]

    def close(self) -> None:
        for service in [*(each for services in self._services.values() for each in services), *self._liquid]:
            service.close()

    def _merge_node(self, name: str, found: Sequence[tuple[_Service, ServiceReading]]) -> LatestReading | None:
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


def _make_services(entry: NodesFileEntry) -> list[_Service]:
    services = []
    if entry.prometheus is not None:
        services.append(_Service(entry.prometheus, partial(PrometheusSource, entry.prometheus), RENEWAL_S))
    if entry.redfish is not None:
        open_controller = partial(open_redfish, entry.redfish)
        services.append(_Service(entry.redfish.url, open_controller, entry.redfish.interval_s))
    return services


def _make_liquid_services(file: NodesFile) -> list[_Service]:
    """The bus, and the CDUs that are not on it."""
    services = []
    if file.mqtt is not None:
        services.append(_Service(file.mqtt.url, partial(open_mqtt, file.mqtt), SAMPLE_INTERVAL_S))
    for cdu in file.cdus:
        if cdu.redfish is not None:
            open_cdu = partial(open_redfish_cdu, cdu.id, cdu.redfish)
            services.append(_Service(cdu.redfish.url, open_cdu, cdu.redfish.interval_s))
        elif cdu.modbus is not None:
            open_device = partial(open_modbus, cdu.id, cdu.modbus)
            services.append(_Service(cdu.modbus.url, open_device, cdu.modbus.interval_s))
    return services
