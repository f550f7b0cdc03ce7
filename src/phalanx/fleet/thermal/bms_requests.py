"""Requests on a building's bus, in the form of NVIDIA's DSX Exchange: the building's metadata grant each of them.

A point with metadata that name our integration is ours to write, on `BMS/v1/{integration}/Value/...` with the rest of
its topic. Nothing else is published, and nothing is retained: a request ends with our heartbeat.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from phalanx.fleet.telemetry.json_values import read_number
from phalanx.fleet.telemetry.rack_points import (
    CDU_METADATA_PREFIX,
    CDU_VALUE_PREFIX,
    HEARTBEAT_PREFIX,
    METADATA_PREFIX,
    METADATA_ROOT,
    VALUE_ROOT,
    RackPoints,
)
from phalanx.fleet.thermal.request_session import ControllerState
from phalanx.safe_files import parse_json

SET_POINT_TYPE = "CDU/LiquidTemperatureSpRequest"
ISOLATION_TYPES = ("Rack/RackLiquidIsolationRequest", "Rack/RackElectricalIsolationRequest")
TIMESTAMP_TYPE, ECHO_TYPE = "System/HeartbeatTimestampIntegration", "System/HeartbeatEchoIntegration"
BMS_ECHO_TYPE = "System/HeartbeatEchoBms"
REQUEST_TYPES = (SET_POINT_TYPE, *ISOLATION_TYPES, TIMESTAMP_TYPE, ECHO_TYPE, BMS_ECHO_TYPE)
REQUEST_TOPIC_FILTERS = (
    f"{CDU_METADATA_PREFIX}#",
    f"{METADATA_PREFIX}#",
    f"{METADATA_ROOT}System/#",
    f"{VALUE_ROOT}System/#",
    f"{CDU_VALUE_PREFIX}#",
)
Publish = Callable[[str, bytes], None]


class Bus(Protocol):
    """Publishes a message, and waits until the broker has it. Raises OSError where it does not take it."""

    def publish(self, topic: str, payload: bytes) -> None:
        """Publish without retaining."""
        ...


@dataclass(frozen=True)
class GrantedPoint:
    """A point that metadata let us write. `object_id`: of the rack, CDU or system."""

    point_type: str
    object_id: str
    unit: str | None
    topic: str


@dataclass
class BmsRequests:
    """What the building grants to `integration`, and our heartbeat. `receive` may be called by another thread."""

    integration: str
    bus: Bus
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    _granted: dict[str, GrantedPoint] = field(default_factory=dict)
    _echo_keys: set[str] = field(default_factory=set)
    _sent_at: dict[float, float] = field(default_factory=dict)
    """When a heartbeat was sent, by its time on the bus."""
    _echoed_at: float | None = None
    _bms_beat: tuple[float, float] | None = None
    """The newest time of the building, and when it came."""
    _held: dict[str, float] = field(default_factory=dict)
    """What is published again with each heartbeat, by topic."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _points: RackPoints = field(init=False)

    def __post_init__(self) -> None:
        self._points = RackPoints(self.clock())

    def receive(self, topic: str, payload: bytes) -> None:
        """Take in a message."""
        self._points.receive(topic, payload, self.clock())
        with self._lock:
            if topic.startswith(METADATA_ROOT):
                self._receive_metadata(topic.removeprefix(METADATA_ROOT), payload)
            elif topic.startswith(HEARTBEAT_PREFIX):
                beat = _parse_good_value(payload)
                if beat is not None and (self._bms_beat is None or beat != self._bms_beat[0]):
                    self._bms_beat = beat, self.clock()
            elif topic.startswith(VALUE_ROOT) and topic.removeprefix(VALUE_ROOT) in self._echo_keys:
                echo = _parse_good_value(payload)
                if echo in self._sent_at:
                    self._echoed_at = self._sent_at[echo]

    def find_grant(self, point_type: str, object_id: str) -> GrantedPoint | None:
        """Return the point of an object that may be written; None where metadata do not grant it."""
        with self._lock:
            found = self._granted.values()
            return next((each for each in found if (each.point_type, each.object_id) == (point_type, object_id)), None)

    def find_set_point(self, cdu_id: str) -> float | None:
        """Return what a CDU is held at; None if that is not known."""
        racks = self._points.read(self.wall_clock(), self.clock())
        return next((each.set_point_c for each in racks if (each.id, each.equipment) == (cdu_id, "CDU")), None)

    def find_heartbeat_age(self) -> float | None:
        """Return seconds since the building's heartbeat, or since ours that it last repeated if it repeats them; None
        before the first."""
        with self._lock:
            now = self.clock()
            bms_s = None if self._bms_beat is None else now - self._bms_beat[1]
            if not self._echo_keys or bms_s is None:
                return bms_s
            return None if self._echoed_at is None else max(bms_s, now - self._echoed_at)

    def beat(self) -> None:
        """Publish our heartbeat and what is held, and repeat the building's heartbeat."""
        with self._lock:
            now_ms = float(round(1000 * self.wall_clock()))
            now = self.clock()
            self._sent_at = {**{beat: at for beat, at in self._sent_at.items() if now - at < 300}, now_ms: now}
            beats = [each for each in self._granted.values() if each.point_type in (TIMESTAMP_TYPE, ECHO_TYPE)]
            bms_beat = None if self._bms_beat is None else self._bms_beat[0]
            held = dict(self._held)
        for topic, asked in held.items():
            self.publish(topic, asked)
        for point in beats:
            value = now_ms if point.point_type == TIMESTAMP_TYPE else bms_beat
            if value is not None:
                self.publish(point.topic, value)

    def has_heartbeat(self) -> bool:
        """Whether the building takes our heartbeat: without it no request could lapse."""
        with self._lock:
            return any(each.point_type == TIMESTAMP_TYPE for each in self._granted.values())

    def hold(self, topic: str, value: float) -> None:
        """Publish a value now, and again with each heartbeat: a building may miss a message."""
        with self._lock:
            self._held[topic] = value
        self.publish(topic, value)

    def publish(self, topic: str, value: float | None) -> None:
        """Publish a value; None withdraws it."""
        self.bus.publish(topic, format_value(value, self.wall_clock()))

    def _receive_metadata(self, key: str, payload: bytes) -> None:
        point_type = "/".join(key.split("/")[:2])
        if point_type not in REQUEST_TYPES:
            return
        content = _parse_object(payload)
        self._granted.pop(key, None)
        self._echo_keys.discard(key)
        id_key = "rackLocationId" if key.startswith("Rack/") else "objectId"
        object_id, unit = content.get(id_key), content.get("engUnit")
        if point_type == BMS_ECHO_TYPE:
            if object_id == self.integration:
                self._echo_keys.add(key)
        elif content.get("integration") == self.integration and isinstance(object_id, str) and object_id:
            topic = f"BMS/v1/{self.integration}/Value/{key}"
            self._granted[key] = GrantedPoint(point_type, object_id, unit if isinstance(unit, str) else None, topic)


class BmsRequestChannel:
    """Requests of one CDU's set point on the bus. `stop` leaves the bus."""

    def __init__(self, requests: BmsRequests, cdu_id: str, stop: Callable[[], None] = lambda: None):
        self._requests, self._cdu_id, self._stop = requests, cdu_id, stop

    def read_state(self) -> ControllerState:
        """Return what the building says of this CDU."""
        requests, grant = self._requests, self._find_grant()
        problem = None
        if grant is None:
            problem = (
                f"the building's metadata do not grant {SET_POINT_TYPE} of {self._cdu_id} to the integration "
                f"{requests.integration}"
            )
        elif grant.unit != "C":
            problem = f"the building expects the unit {grant.unit}, not C"
        elif not requests.has_heartbeat():
            problem = f"the building takes no heartbeat ({TIMESTAMP_TYPE}), so a request could not lapse"
        return ControllerState(problem, requests.find_set_point(self._cdu_id), requests.find_heartbeat_age())

    def describe_writes(self, supply_c: float) -> list[str]:
        """Return the topic and the message of a request."""
        grant = self._find_grant()
        topic = f"BMS/v1/{self._requests.integration}/Value/{SET_POINT_TYPE}/..." if grant is None else grant.topic
        payload = format_value(supply_c, self._requests.wall_clock()).decode()
        return [f"{topic} {payload}", f"BMS/v1/{self._requests.integration}/Value/{TIMESTAMP_TYPE}/... each 10 s"]

    def beat(self) -> None:
        """Publish our heartbeat."""
        self._requests.beat()

    def request(self, supply_c: float) -> None:
        """Publish the request."""
        self._publish(supply_c)

    def withdraw(self) -> None:
        """Publish that there is no request."""
        self._publish(None)

    def close(self) -> None:
        """Leave the bus."""
        self._stop()

    def _publish(self, value: float | None) -> None:
        grant = self._find_grant()
        if grant is not None:
            self._requests.publish(grant.topic, value)

    def _find_grant(self) -> GrantedPoint | None:
        return self._requests.find_grant(SET_POINT_TYPE, self._cdu_id)


def format_value(value: float | None, wall_time_s: float) -> bytes:
    """Return the message of a value: of good quality, unless there is none."""
    content = {"value": value, "timestamp": round(1000 * wall_time_s), "quality": 0 if value is None else 1}
    return json.dumps(content).encode()


def _parse_good_value(payload: bytes) -> float | None:
    content = _parse_object(payload)
    return read_number(content.get("value")) if content.get("quality") == 1 else None


def _parse_object(payload: bytes) -> dict[str, object]:
    try:
        content = parse_json(payload.decode())
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
