"""Read a coolant distribution unit (CDU) from its Redfish resources: ThermalEquipment, CDUs. Nothing is written: a set
point over Redfish has no heartbeat, so it would outlive what asked for it.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence

from phalanx_fleet.telemetry.redfish import (
    SERVICE_ROOT,
    ControllerOptions,
    ControllerSource,
    Resource,
    SushyClient,
    count_failed_rotors,
    get_link,
    get_optional,
    get_resource,
    list_member_paths,
    list_members,
    list_names,
    read_enabled_number,
    read_power,
    read_state,
)
from phalanx_fleet.telemetry.service_reading import (
    PollingThread,
    RackSample,
    ServiceError,
    ServiceReading,
    StartPollingFn,
    check_liquid_value,
    take_all,
)

CONNECTOR_NUMBERS = {
    "supply_temperature_c": ("SupplyTemperatureCelsius", "Reading", 1.0),
    "return_temperature_c": ("ReturnTemperatureCelsius", "Reading", 1.0),
    "set_point_c": ("SupplyTemperatureControlCelsius", "SetPoint", 1.0),
    "differential_pressure_pa": ("DeltaPressurekPa", "Reading", 1000.0),
}
"""Of a coolant connector: the value, its property and key, and the factor to the base unit."""
LEAK_STATES = {"OK": False, "Warning": True, "Critical": True}


class RedfishCduOptions(ControllerOptions):
    """How a CDU's controller is read."""

    cdu: str = ""
    """Id of the CDU at its controller; needed where it has several."""


class CduReader:
    """Reads the secondary side of one CDU, which the racks are on: all its connectors, pumps and leak detectors."""

    def __init__(self, client: SushyClient, id: str, cdu_id: str = ""):
        self._client, self._id = client, id
        self._path = _find_cdu(client, cdu_id)

    def read_service(self) -> ServiceReading:
        """Read all values, as those of a rack."""
        return ServiceReading(racks=(self.read(),))

    def read(self) -> RackSample:
        """Read all values. A value that is refused, null, absent or a code is None."""
        cdu = self._client.get(self._path)
        connectors = list_members(self._client, cdu, "SecondaryCoolantConnectors")
        pumps = list_members(self._client, cdu, "Pumps")
        power = get_resource(get_optional(self._client, get_link(cdu, "EnvironmentMetrics")), "PowerWatts")
        leak, fault = self._read_leak(cdu)
        numbers = {column: _read_common(connectors, column) for column in CONNECTOR_NUMBERS}
        return RackSample(
            id=self._id,
            name=str(cdu.get("Name", "")),
            equipment="CDU",
            flow_l_per_min=_sum_flows(connectors),
            power_w=check_liquid_value("power_w", read_power(power, "Reading")),
            has_leak=leak,
            has_leak_sensor_fault=fault,
            failed_pumps=count_failed_rotors((pump, get_resource(pump, "PumpSpeedPercent")) for pump in pumps),
            **numbers,  # type: ignore[arg-type]  # columns of numbers alone
        )

    def _read_leak(self, cdu: Resource) -> tuple[bool | None, bool | None]:
        """Whether a detector finds a leak, and whether one does not work; None of a CDU without detectors."""
        detection = get_optional(self._client, get_link(cdu, "LeakDetection"))
        detectors = list_members(self._client, detection, "LeakDetectors")
        detectors = [each for each in detectors if read_state(each) != "Absent"]
        if not detectors:
            return None, None
        states = [
            LEAK_STATES.get(str(each.get("DetectorState"))) if read_state(each) == "Enabled" else None
            for each in detectors
        ]
        is_faulty = None in states
        return (True if True in states else None if is_faulty else False), is_faulty


class RedfishCduSource(ControllerSource):
    """The liquid of one CDU; `id`: as samples have it. Other arguments, and errors, as of PolledSource."""

    problems: Sequence[str] = ()

    def __init__(
        self,
        id: str,
        options: RedfishCduOptions,
        client: SushyClient,
        clock: Callable[[], float] = time.monotonic,
        start_polling: StartPollingFn = PollingThread,
    ):
        empty = ServiceReading(racks=(RackSample(id=id, equipment="CDU"),))
        super().__init__(options, client, lambda c: CduReader(c, id, options.cdu), empty, clock, start_polling)


def open_redfish_cdu(
    id: str, options: RedfishCduOptions, environment: Mapping[str, str] = os.environ
) -> RedfishCduSource:
    """Open the CDU that `options` names. Errors as of `open_redfish`."""
    return RedfishCduSource(id, options, SushyClient.open(options, environment))


def _find_cdu(client: SushyClient, cdu_id: str) -> str:
    equipment = get_optional(client, get_link(client.get(SERVICE_ROOT), "ThermalEquipment"))
    paths = list_member_paths(get_optional(client, get_link(equipment, "CDUs")))
    if cdu_id:
        for path in paths:
            if path.rstrip("/").rsplit("/", 1)[-1] == cdu_id:
                return path
        raise ServiceError(f"has no CDU {cdu_id}; it has {list_names(paths)}")
    if len(paths) != 1:
        wanted = f"set cdu to one of {list_names(paths)}" if paths else "it serves no ThermalEquipment with CDUs"
        raise ServiceError(f"has {len(paths)} CDUs; {wanted}")
    return paths[0]


def _read_common(connectors: Sequence[Resource], column: str) -> float | None:
    """The worst one of all connectors: the warmest, with the least pressure. None where one of them has none."""
    key, number, factor = CONNECTOR_NUMBERS[column]
    values = _read_parts(connectors, key, number)
    worst = min if column == "differential_pressure_pa" else max
    return check_liquid_value(column, worst(values) * factor) if values else None


def _sum_flows(connectors: Sequence[Resource]) -> float | None:
    values = _read_parts(connectors, "FlowLitersPerMinute", "Reading")
    return check_liquid_value("flow_l_per_min", sum(values)) if values else None


def _read_parts(connectors: Sequence[Resource], key: str, number: str) -> list[float]:
    """A number of all connectors; none where one of them has none."""
    return take_all(
        read_enabled_number(get_resource(each, key), number) if read_state(each) == "Enabled" else None
        for each in connectors
    )
