"""What management controllers, buildings and exporters may answer: samples come of it or a refusal, no other error."""

import contextlib
import json
from typing import Any

import pytest

from fake_bmc import FakeBmc
from fake_bms import FakePoint, make_metadata, make_value
from fake_exporter import FakeExporter
from fake_nvml import FakeGpu, FakeNvml
from mutations import hand, mutated, strange
from phalanx.telemetry.sample import SourceUnavailableError
from phalanx_fleet.telemetry.prometheus import PrometheusSource
from phalanx_fleet.telemetry.rack_points import HEARTBEAT_PREFIX, METADATA_PREFIX, VALUE_PREFIX, RackPoints
from phalanx_fleet.telemetry.redfish import ChassisReader
from phalanx_fleet.telemetry.service_reading import ServiceError
from settable_clock import SettableClock

TRIED = 300


class StrangeBmc:
    """A controller whose resources each have something else in one place."""

    def __init__(self, is_modern: bool, name: str):
        self.bmc, self.rng = FakeBmc(SettableClock(), is_modern), hand(name)

    def get(self, path: str) -> dict[str, Any]:
        found = strange(self.bmc.get(path), self.rng) if self.rng.random() < 0.5 else self.bmc.get(path)
        return found if isinstance(found, dict) else {}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("is_modern", [True, False])
def test_resources_of_any_form_are_read(is_modern: bool) -> None:
    num_read, bmc = 0, StrangeBmc(is_modern, f"redfish {is_modern}")
    for _ in range(TRIED):
        with contextlib.suppress(ServiceError):
            num_read += ChassisReader(bmc).read().node_power_w == 800.0
    assert 0 < num_read < TRIED


def test_messages_of_any_form_are_received() -> None:
    rng, points, point = hand("bms"), RackPoints(0.0), FakePoint("RackPower")
    values = set()
    messages = {
        METADATA_PREFIX + point.key: make_metadata(point),
        HEARTBEAT_PREFIX + "bms": make_value(1000.0, 1.0),
        VALUE_PREFIX + point.key: make_value(5.0, 1.0),
    }
    for _ in range(TRIED):
        for topic, message in messages.items():
            points.receive(topic, json.dumps(message if rng.random() < 0.5 else strange(message, rng)).encode(), 0.0)
            points.receive(topic, mutated(json.dumps(message).encode(), rng), 0.0) if rng.random() < 0.3 else None
        assert len(points.find_problems(100.0)) < 20
        values |= {rack.power_w for rack in points.read(1.0, 0.0)}
    assert {None, 5000.0} <= values


def test_pages_of_any_form_are_read() -> None:
    rng = hand("prometheus")
    page = FakeExporter(FakeNvml(FakeGpu())).fetch("").encode()
    num_read = 0
    for _ in range(TRIED):
        text = mutated(page, rng).decode(errors="replace")
        with contextlib.suppress(SourceUnavailableError):
            num_read += len(PrometheusSource("http://n1", SettableClock(), lambda url, text=text: text).read().devices)
    assert num_read > 0
