"""Points of racks and CDUs on a building's bus that are read: which field of a sample each is, its unit and its range.

The types of racks say what they are. A CDU has many points of one type; `processArea` says which loop and side it is,
and `isSetpoint` that the controller holds it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

LEAK_COLUMN = "has_leak"


@dataclass(frozen=True, slots=True)
class RackPoint:
    """A type of point: the field of a sample that it gives, its unit on the bus, the factor to ours, its range."""

    column: str
    unit: str | None
    factor: float = 1.0
    low: float = 0.0
    high: float = math.inf
    """A value outside of its range, in the bus's unit, is a code and no measurement."""


RACK_POINTS = {
    "RackLiquidSupplyTemperature": RackPoint("supply_temperature_c", "C", 1.0, -40.0, 150.0),
    "RackLiquidReturnTemperature": RackPoint("return_temperature_c", "C", 1.0, -40.0, 150.0),
    "RackLiquidFlow": RackPoint("flow_l_per_min", "LPM", 1.0, 0.0, 30_000.0),
    "RackLiquidDifferentialPressure": RackPoint("differential_pressure_pa", "kPa", 1e3, -1000.0, 10_000.0),
    "RackControlValvePosition": RackPoint("valve_position", "%", 0.01, 0.0, 100.0),
    "RackPower": RackPoint("power_w", "kW", 1e3, 0.0, 10_000.0),
    "RackLeakDetect": RackPoint(LEAK_COLUMN, None, high=1.0),
    "RackLeakSensorFault": RackPoint("has_leak_sensor_fault", None, high=1.0),
}
CDU_SET_POINT = RackPoint("set_point_c", "C", 1.0, -40.0, 150.0)
CDU_TYPES = ("LiquidTemperature", "LiquidFlow", "LiquidDifferentialPressure", "LeakDetect")


def find_rack_point(point_type: str) -> RackPoint | None:
    """Return what a point of a rack gives; None for one that is not read."""
    return RACK_POINTS.get(point_type)


def find_cdu_point(point_type: str, metadata: Mapping[str, object]) -> RackPoint | None:
    """Return what a point of a CDU gives; None for one that is not read, such as those of its primary side."""
    areas = metadata.get("processArea")
    sides = {str(each).lower() for each in areas} if isinstance(areas, list) else set()
    is_set_point = metadata.get("isSetpoint") is True
    if point_type == "LeakDetect":
        return RackPoint(LEAK_COLUMN, None, high=1.0)
    if "secondary" not in sides:
        return None
    if point_type == "LiquidTemperature" and "supply" in sides:
        return CDU_SET_POINT if is_set_point else RackPoint("supply_temperature_c", "C", 1.0, -40.0, 150.0)
    if is_set_point:
        return None
    if point_type == "LiquidTemperature" and "return" in sides:
        return RackPoint("return_temperature_c", "C", 1.0, -40.0, 150.0)
    if point_type == "LiquidFlow":
        return RackPoint("flow_l_per_min", "LPM", 1.0, 0.0, 30_000.0)
    if point_type == "LiquidDifferentialPressure":
        return RackPoint("differential_pressure_pa", "kPa", 1e3, -1000.0, 10_000.0)
    return None
