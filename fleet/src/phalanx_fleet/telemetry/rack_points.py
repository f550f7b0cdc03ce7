"""Turn the messages of a building management system (BMS) into samples of racks and CDUs.

Topics and messages are those of NVIDIA's DSX Exchange:
`BMS/v1/PUB/{Value|Metadata}/{Rack|CDU}/{point type}/{tag path}`. Metadata, which the broker retains, say which rack or
CDU a point belongs to and its unit. A value comes on change and at least every 100 s, as {value: number or null,
timestamp: ms since the epoch, quality: 1 good}. A heartbeat comes every 10 s.

The types of racks say what a point is. A CDU has many points of one type; `processArea` says which loop and side it is,
and `isSetpoint` that the controller holds it.
"""

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx.safe_files import parse_json
from phalanx.std_streams import escape_control_chars
from phalanx_fleet.telemetry.service_reading import RackSample, check_liquid_value, read_number

METADATA_ROOT, VALUE_ROOT = "BMS/v1/PUB/Metadata/", "BMS/v1/PUB/Value/"
METADATA_PREFIX, VALUE_PREFIX = f"{METADATA_ROOT}Rack/", f"{VALUE_ROOT}Rack/"
CDU_METADATA_PREFIX, CDU_VALUE_PREFIX = f"{METADATA_ROOT}CDU/", f"{VALUE_ROOT}CDU/"
HEARTBEAT_PREFIX = "BMS/v1/PUB/Value/System/HeartbeatTimestampBms/"
TOPIC_FILTERS = tuple(
    f"{prefix}#" for prefix in (METADATA_PREFIX, CDU_METADATA_PREFIX, HEARTBEAT_PREFIX, VALUE_PREFIX, CDU_VALUE_PREFIX)
)
REPUBLISH_INTERVAL_S = 100.0
LATE_AFTER_INTERVALS = 3
HEARTBEAT_LIMIT_S = LATE_AFTER_INTERVALS * 10.0
MAX_POINTS = 200_000
MAX_REFUSED_SHOWN = 10
MAX_MESSAGE_BYTES = 64 << 10
GOOD_QUALITY = 1
BINARY_STATES = {0.0: False, 1.0: True}


@dataclass(frozen=True, slots=True)
class RackPoint:
    """A type of point: the field of a sample that it gives, its unit on the bus, the factor to ours."""

    column: str
    unit: str | None
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class _PlacedPoint:
    rack_id: str
    rack_name: str
    equipment: Literal["rack", "CDU"]
    kind: RackPoint


@dataclass(frozen=True, slots=True)
class _ReceivedValue:
    value: float | None
    measured_at: float
    """Seconds since the epoch, by the sender's clock."""
    received_at: float
    """By our monotonic clock."""

    def age_s(self, wall_time: float, time_s: float) -> float:
        """The larger one of two ages: a broker may keep a value, and the sender's clock may be wrong."""
        return max(wall_time - self.measured_at, time_s - self.received_at)


@dataclass
class RackPoints:
    """The newest values of all racks. `receive` and `read` may be called by different threads; their `time_s` is of a
    monotonic clock."""

    opened_at: float
    republish_interval_s: float = REPUBLISH_INTERVAL_S
    _points: dict[str, _PlacedPoint] = field(default_factory=dict)
    _values: dict[str, _ReceivedValue] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)
    """Points that are not used, and why."""
    _heartbeats: dict[str, float] = field(default_factory=dict)
    _heartbeat_at: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def receive(self, topic: str, payload: bytes, time_s: float) -> None:
        with self._lock:
            if topic.startswith(HEARTBEAT_PREFIX):
                self._receive_heartbeat(topic, payload, time_s)
            elif topic.startswith((METADATA_PREFIX, CDU_METADATA_PREFIX)):
                self._receive_metadata(topic.removeprefix(METADATA_ROOT), payload)
            elif topic.startswith((VALUE_PREFIX, CDU_VALUE_PREFIX)):
                self._receive_value(topic.removeprefix(VALUE_ROOT), payload, time_s)

    def read(self, wall_time: float, time_s: float) -> tuple[RackSample, ...]:
        """A sample of each rack and CDU of which there are metadata. A value that is null, of bad quality, out of
        range, late, or of a system without heartbeat is None."""
        with self._lock:
            racks: dict[tuple[str, str], RackSample] = {}
            columns: dict[tuple[str, str], set[str]] = {}
            for key, point in self._points.items():
                id = point.equipment, point.rack_id
                empty = RackSample(id=point.rack_id, name=point.rack_name, equipment=point.equipment)
                is_first = point.kind.column not in columns.setdefault(id, set())
                columns[id].add(point.kind.column)
                value, age_s = self._find_value(key, point.kind, wall_time, time_s)
                racks[id] = _add_value(racks.get(id, empty), point.kind, value, age_s, is_first)
            return tuple(racks.values())

    def find_problems(self, time_s: float) -> list[str]:
        """What is not used or missing, and why, in words."""
        with self._lock:
            found, is_late = sorted(self._refused.values()), time_s - self.opened_at > HEARTBEAT_LIMIT_S
            if len(found) > MAX_REFUSED_SHOWN:
                found[MAX_REFUSED_SHOWN:] = [f"and {len(found) - MAX_REFUSED_SHOWN} more points are not used"]
            if not self._points and is_late:
                found.append(f"no rack has metadata: is this user allowed to read {METADATA_PREFIX}# ?")
            if self._is_silent(time_s):
                found.append("the building management system sends no heartbeat any more: its values are missing")
            elif self._heartbeat_at is None and is_late:
                found.append("no heartbeat (HeartbeatTimestampBms): that the system works is not known")
            # a CDU has values that are not read, of which metadata would say so
            num_unplaced = len([key for key in self._values if key.startswith("Rack/") and key not in self._points])
            if num_unplaced:
                found.append(f"{num_unplaced} points have values and no metadata, so their racks are not known")
            return found

    def _is_silent(self, time_s: float) -> bool:
        return self._heartbeat_at is not None and time_s - self._heartbeat_at > HEARTBEAT_LIMIT_S

    def _find_value(
        self, key: str, kind: RackPoint, wall_time: float, time_s: float
    ) -> tuple[float | None, float | None]:
        received = self._values.get(key)
        if received is None or received.value is None or self._is_silent(time_s):
            return None, None
        age_s = received.age_s(wall_time, time_s)
        value = check_liquid_value(kind.column, received.value * kind.factor)  # outside of its range is a code
        if value is None or age_s > LATE_AFTER_INTERVALS * self.republish_interval_s:
            return None, None
        return value, max(0.0, age_s)

    def _receive_heartbeat(self, topic: str, payload: bytes, time_s: float) -> None:
        """A heartbeat that repeats its time is one of a gateway without its system."""
        value, _ = _parse_value(payload)
        if value is not None and value != self._heartbeats.get(topic) and _has_space(self._heartbeats, topic):
            self._heartbeats[topic], self._heartbeat_at = value, time_s

    def _receive_metadata(self, key: str, payload: bytes) -> None:
        """`key`: such as Rack/RackPower/site1/row3/power."""
        self._points.pop(key, None)
        self._refused.pop(key, None)
        object_type, point_type = key.split("/")[:2]
        content, name = _parse_object(payload), escape_control_chars(key)
        is_rack = object_type == "Rack"
        kind = RACK_POINTS.get(point_type) if is_rack else find_cdu_point(point_type, content)
        id_key, name_key = ("rackLocationId", "rackLocationName") if is_rack else ("objectId", "objectName")
        rack_id = content.get(id_key)
        if not payload:  # which removes a message that the broker kept
            self._values.pop(key, None)
        elif kind is None or len(self._points) + len(self._refused) >= MAX_POINTS:
            return
        elif not isinstance(rack_id, str) or not rack_id:
            self._refused[key] = f"{name}: its metadata have no {id_key}"
        elif content.get("engUnit") != kind.unit:
            self._refused[key] = f"{name}: expected the unit {kind.unit}, found {content.get('engUnit')}"
        else:
            place = str(content.get(name_key, ""))
            self._points[key] = _PlacedPoint(rack_id, place, "rack" if is_rack else "CDU", kind)

    def _receive_value(self, key: str, payload: bytes, time_s: float) -> None:
        point_type = key.split("/")[1]
        if point_type not in (*RACK_POINTS, *CDU_TYPES) or not _has_space(self._values, key):
            return
        value, measured_at = _parse_value(payload)
        last = self._values.get(key)
        is_repeated = last is not None and measured_at is not None and measured_at < last.measured_at
        if is_repeated and last is not None and time_s - last.received_at < self.republish_interval_s:
            return  # delivered once more, after a newer one
        self._values[key] = _ReceivedValue(value, -math.inf if measured_at is None else measured_at, time_s)


def _has_space(known: Mapping[str, object], key: str) -> bool:
    return key in known or len(known) < MAX_POINTS


def _add_value(
    rack: RackSample, kind: RackPoint, value: float | None, age_s: float | None, is_first: bool
) -> RackSample:
    """The rack with one more value. Of several points of one measurement none is known to be the rack's."""
    found: float | bool | None = value if is_first else None
    if kind.unit is None:
        state = None if value is None else BINARY_STATES.get(value)
        found = state if is_first else _join_states(getattr(rack, kind.column), state)
    oldest_s = max((age for age in (rack.age_s, age_s) if age is not None), default=None)
    known = [age for age in (rack.ages_s.get(kind.column), age_s) if age is not None]
    ages_s = {**rack.ages_s, kind.column: min(known)} if known else rack.ages_s
    return replace(rack, **{kind.column: found, "age_s": oldest_s, "ages_s": ages_s})  # type: ignore[arg-type]


def _join_states(one: bool | None, other: bool | None) -> bool | None:
    """Whether one of two sensors finds something: None where one finds nothing and the other one has no value."""
    if one or other:
        return True
    return None if one is None or other is None else False


def _parse_value(payload: bytes) -> tuple[float | None, float | None]:
    """The number of a message, None unless its quality is good, and its time in seconds since the epoch."""
    content = _parse_object(payload)
    value, time_ms = read_number(content.get("value")), read_number(content.get("timestamp"))
    if time_ms is None:
        return None, None
    return value if content.get("quality") == GOOD_QUALITY else None, time_ms / 1000


def _parse_object(payload: bytes) -> dict[str, object]:
    if len(payload) > MAX_MESSAGE_BYTES:
        return {}
    try:
        content = parse_json(payload.decode())
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


SUPPLY_POINT, RETURN_POINT = RackPoint("supply_temperature_c", "C"), RackPoint("return_temperature_c", "C")
FLOW_POINT, PRESSURE_POINT = RackPoint("flow_l_per_min", "LPM"), RackPoint("differential_pressure_pa", "kPa", 1e3)
LEAK_POINT, SET_POINT = RackPoint("has_leak", None), RackPoint("set_point_c", "C")
RACK_POINTS = {
    "RackLiquidSupplyTemperature": SUPPLY_POINT,
    "RackLiquidReturnTemperature": RETURN_POINT,
    "RackLiquidFlow": FLOW_POINT,
    "RackLiquidDifferentialPressure": PRESSURE_POINT,
    "RackControlValvePosition": RackPoint("valve_position", "%", 0.01),
    "RackPower": RackPoint("power_w", "kW", 1e3),
    "RackLeakDetect": LEAK_POINT,
    "RackLeakSensorFault": RackPoint("has_leak_sensor_fault", None),
}
CDU_POINTS = {
    ("LiquidTemperature", "supply"): SUPPLY_POINT,
    ("LiquidTemperature", "return"): RETURN_POINT,
    ("LiquidFlow", ""): FLOW_POINT,
    ("LiquidDifferentialPressure", ""): PRESSURE_POINT,
}
"""By type, and the side of the secondary loop."""
CDU_TYPES = ("LeakDetect", *(point_type for point_type, _ in CDU_POINTS))


def find_cdu_point(point_type: str, metadata: Mapping[str, object]) -> RackPoint | None:
    """Return what a point of a CDU gives; None for one that is not read, such as those of its primary side."""
    if point_type == "LeakDetect":
        return LEAK_POINT
    areas = metadata.get("processArea")
    sides = {str(each).lower() for each in areas} if isinstance(areas, list) else set()
    if "secondary" not in sides:
        return None
    known = ("supply", "return") if point_type == "LiquidTemperature" else ()
    side = next((each for each in known if each in sides), "")
    if metadata.get("isSetpoint") is True:
        return SET_POINT if side == "supply" else None
    return CDU_POINTS.get((point_type, side))
