"""A stand-in for a building management system on an MQTT bus: points of racks that follow functions of time, with
delay and faults. It publishes as NVIDIA's DSX Exchange says: metadata first, values on change and
every 100 s, a heartbeat every 10 s."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx_fleet.telemetry.rack_points import HEARTBEAT_PREFIX, METADATA_PREFIX, VALUE_PREFIX

UNITS = {
    "RackLiquidSupplyTemperature": "C",
    "RackLiquidReturnTemperature": "C",
    "RackLiquidFlow": "LPM",
    "RackLiquidDifferentialPressure": "kPa",
    "RackControlValvePosition": "%",
    "RackPower": "kW",
}


@dataclass
class FakePoint:
    """One point of a rack. `value(t)` is what it measures; `delay_s` how old a message is when it is sent.

    Faults: `quality` other than 1, `value` that returns None, `is_silent` (nothing is sent).
    """

    type: str
    value: Callable[[float], float | None] = lambda t: 1.0
    rack: str = "rack-1"
    tag: str = "row-1/rack-1/a"
    delay_s: float = 0.0
    quality: int = 1
    is_silent: bool = False
    unit: str | None = None
    sent: tuple[float, float | None, int] | None = None
    """Time, value and quality of the newest message."""

    @property
    def key(self) -> str:
        return f"{self.type}/{self.tag}"


@dataclass
class FakeBms:
    """All points; `run_until` lets time pass. Nothing is sent while `is_down`; the heartbeat repeats its time from
    `frozen_since` on. It is a Subscriber, too: what is published is received at once."""

    points: list[FakePoint]
    now: float = 1_000_000.0
    is_down: bool = False
    has_heartbeat: bool = True
    frozen_since: float = float("inf")
    is_subscribed: bool = False
    on_message: Callable[[str, bytes], None] = lambda topic, payload: None

    def start(self, topic_filters: Sequence[str], on_message: Callable[[str, bytes], None]) -> None:
        self.on_message, self.is_subscribed = on_message, True
        for point in self.points:
            self.publish(METADATA_PREFIX + point.key, make_metadata(point))

    def stop(self) -> None:
        self.is_subscribed = False

    def run_until(self, time_s: float) -> None:
        """Send what is due, second by second, until `time_s` seconds after the start."""
        while self.now < 1_000_000 + time_s:
            self.now += 1
            if self.is_down:
                continue
            if self.has_heartbeat and self.now % 10 == 0:
                beat = 1000 * min(self.now, 1_000_000 + self.frozen_since)
                self.publish(HEARTBEAT_PREFIX + "bms", make_value(beat, self.now))
            for point in self.points:
                self._send_if_due(point)

    def publish(self, topic: str, content: Any) -> None:
        payload = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.on_message(topic, payload)

    def _send_if_due(self, point: FakePoint) -> None:
        measured_at = self.now - point.delay_s
        value = point.value(measured_at - 1_000_000)
        is_same = point.sent is not None and point.sent[1:] == (value, point.quality)
        if point.is_silent or (is_same and point.sent is not None and self.now - point.sent[0] < 100):
            return
        point.sent = (self.now, value, point.quality)
        self.publish(VALUE_PREFIX + point.key, make_value(value, measured_at, point.quality))


def make_metadata(point: FakePoint) -> dict[str, Any]:
    unit = point.unit or UNITS.get(point.type)
    meaning = {"engUnit": unit} if unit else {"stateText": [{"value": 0, "text": "No"}, {"value": 1, "text": "Yes"}]}
    places = {"rackLocationId": point.rack, "rackLocationName": f"Pod1 {point.rack}"}
    return {"objectType": "Rack", "pointType": point.type, **places, **meaning}


def make_value(value: float | None, time_s: float, quality: int = 1) -> dict[str, Any]:
    return {"value": value, "timestamp": round(1000 * time_s), "quality": quality}
