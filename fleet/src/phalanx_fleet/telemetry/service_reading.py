"""What services outside a node give: readings of the node and of its rack, with their age."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from phalanx.telemetry.sample import SourceReading, TelemetrySource

LIQUID_LIMITS: dict[str, tuple[float, float]] = {
    "supply_temperature_c": (-40.0, 150.0),
    "return_temperature_c": (-40.0, 150.0),
    "set_point_c": (-40.0, 150.0),
    "flow_l_per_min": (0.0, 30_000.0),
    "differential_pressure_pa": (-1e6, 1e7),
    "valve_position": (0.0, 1.0),
    "power_w": (0.0, 1e7),
    "failed_pumps": (0.0, 100.0),
    "has_leak": (0.0, 1.0),
    "has_leak_sensor_fault": (0.0, 1.0),
}
STATE_COLUMNS = ("has_leak", "has_leak_sensor_fault")
"""Of which 0 is no and 1 is yes; anything else is no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RackSample:
    """The liquid and power of a rack or of a coolant distribution unit (CDU), by the building management system, by
    Modbus or by Redfish. Of a CDU: its secondary side, which the racks are on."""

    id: str
    """Of a rack its location id, which building and cluster share; of a CDU the building's object id."""
    name: str = ""
    equipment: Literal["rack", "CDU"] = "rack"
    supply_temperature_c: float | None = None
    return_temperature_c: float | None = None
    flow_l_per_min: float | None = None
    differential_pressure_pa: float | None = None
    valve_position: float | None = None
    """0 closed, 1 open."""
    power_w: float | None = None
    has_leak: bool | None = None
    has_leak_sensor_fault: bool | None = None
    set_point_c: float | None = None
    """What the controller of a CDU holds its supply at."""
    failed_pumps: float | None = None
    """Pumps of a CDU that do not turn, or that it reports as failed."""
    age_s: float | None = None
    """Seconds since the oldest of these values was measured; None without any."""
    ages_s: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Of single values, where they are not all of one age."""


@dataclass(frozen=True, slots=True)
class ServiceReading(SourceReading):
    """What a service reads at one time: devices, parts of the host, racks."""

    racks: tuple[RackSample, ...] = ()
    host_age_s: float = 0.0
    """Seconds since the values of the host were measured: a service that answers slowly is asked in the background."""
    renewal_s: float = 0.0
    """Seconds between new values of devices where the service renews them more slowly than it is read; else 0."""


class ServiceSource(TelemetrySource, Protocol):
    """Reads a service."""

    def read(self) -> ServiceReading:
        """Read all values now. A value that cannot be read is None; the source itself never raises for that."""
        ...


def check_liquid_value(column: str, value: float | None) -> float | None:
    """Return the value; None where no sensor of this kind gives it."""
    low, high = LIQUID_LIMITS[column]
    if value is None or not math.isfinite(value) or not low <= value <= high:
        return None
    return None if column in STATE_COLUMNS and value not in (0.0, 1.0) else value


def read_number(value: object) -> float | None:
    """A number in the JSON of a service, which may be anything; None for all but a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
