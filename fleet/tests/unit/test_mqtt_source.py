"""Racks of a building's bus: units, what is missing, faults. The stand-in is `helpers/fake_bms.py`."""

from pathlib import Path
from typing import Any

import pytest

from fake_bms import FakeBms, FakePoint, make_metadata, make_value
from phalanx.errors import UsageError
from phalanx.telemetry.sample import SourceUnavailableError
from phalanx_fleet.telemetry import rack_points
from phalanx_fleet.telemetry.mqtt import MqttOptions, MqttSource, open_mqtt
from phalanx_fleet.telemetry.rack_points import (
    CDU_METADATA_PREFIX,
    CDU_VALUE_PREFIX,
    METADATA_PREFIX,
    VALUE_PREFIX,
)
from phalanx_fleet.telemetry.service_reading import RackSample


def open_fake(bms: FakeBms, **options: Any) -> MqttSource:
    options = {"url": "mqtts://bus", **options}
    return MqttSource(MqttOptions(**options), bms, lambda: bms.now, lambda: bms.now)


def read_one(bms: FakeBms, time_s: float = 12.0) -> RackSample:
    source = open_fake(bms)
    bms.run_until(time_s)
    (rack,) = source.read().racks
    return rack


def test_readings_are_in_base_units() -> None:
    values = {
        "RackLiquidSupplyTemperature": 32.5,
        "RackLiquidReturnTemperature": 42.0,
        "RackLiquidFlow": 180.0,
        "RackLiquidDifferentialPressure": 95.0,
        "RackControlValvePosition": 60.0,
        "RackPower": 121.5,
        "RackLeakDetect": 0.0,
        "RackLeakSensorFault": 1.0,
    }
    points = [FakePoint(type, lambda t, value=value: value) for type, value in values.items()]  # type: ignore[misc]
    assert read_one(FakeBms(points), 1.0) == RackSample(
        id="rack-1",
        name="Pod1 rack-1",
        supply_temperature_c=32.5,
        return_temperature_c=42.0,
        flow_l_per_min=180.0,
        differential_pressure_pa=95_000.0,
        valve_position=0.6,
        power_w=121_500.0,
        has_leak=False,
        has_leak_sensor_fault=True,
        age_s=0.0,
    )


@pytest.mark.parametrize(
    "fault",
    [
        {"quality": 0},
        {"quality": 192},
        {"value": lambda t: None},
        {"value": lambda t: float("nan")},
        {"value": lambda t: 32767.0},
        {"value": lambda t: -9999.0},
        {"is_silent": True},
        {"delay_s": 301.0},
    ],
)
def test_null_bad_quality_codes_silence_and_late_values_are_missing(fault: dict[str, Any]) -> None:
    point = FakePoint("RackLiquidSupplyTemperature", **{"value": lambda t: 32.5, **fault})
    rack = read_one(FakeBms([point]))
    assert (rack.supply_temperature_c, rack.age_s) == (None, None)


@pytest.mark.parametrize(
    "payload",
    [b"", b"[]", b"{", b'{"value": 30}', b'{"value": "30", "timestamp": 1000012000, "quality": 1}', b"9" * 70_000],
)
def test_a_value_that_cannot_be_read_is_missing_and_the_next_one_is_there(payload: bytes) -> None:
    point = FakePoint("RackPower", lambda t: 100.0)
    bms = FakeBms([point])
    source = open_fake(bms)
    bms.run_until(12)
    bms.publish(VALUE_PREFIX + point.key, payload)
    assert source.read().racks[0].power_w is None
    bms.publish(VALUE_PREFIX + point.key, make_value(101.0, bms.now))
    assert source.read().racks[0].power_w == 101_000.0


def test_a_fault_never_leaves_the_last_value_and_silence_for_three_intervals_only() -> None:
    faulty = FakePoint("RackPower", lambda t: 100.0 if t < 20 else None)
    silent = FakePoint("RackLiquidFlow", lambda t: 0.0)
    bms = FakeBms([faulty, silent])
    source = open_fake(bms)
    bms.run_until(1)
    silent.is_silent = True
    bms.run_until(19)
    assert source.read().racks[0].power_w == 100_000.0
    bms.run_until(20)
    assert source.read().racks[0].power_w is None
    bms.run_until(301)
    assert (source.read().racks[0].flow_l_per_min, source.read().racks[0].age_s) == (0.0, 300.0)
    bms.run_until(302)
    assert source.read().racks[0].flow_l_per_min is None


def test_a_point_that_does_not_change_is_sent_again_and_stays() -> None:
    assert read_one(FakeBms([FakePoint("RackPower", lambda t: 100.0)]), 1000).power_w == 100_000.0


def test_without_heartbeat_all_values_are_missing() -> None:
    bms = FakeBms([FakePoint("RackPower", lambda t: 100.0)])
    source = open_fake(bms)
    bms.run_until(15)
    bms.is_down = True
    bms.run_until(40)
    assert (source.read().racks[0].power_w, source.problems) == (100_000.0, [])
    bms.run_until(41)
    assert source.read().racks[0].power_w is None
    assert "sends no heartbeat any more" in source.problems[0]
    bms.is_down = False
    bms.run_until(50)
    assert (source.read().racks[0].power_w, source.problems) == (100_000.0, [])


def test_a_heartbeat_that_repeats_its_time_is_none() -> None:
    assert read_one(FakeBms([FakePoint("RackPower")], frozen_since=20.0), 51).power_w is None


def test_a_system_that_never_sent_a_heartbeat_is_a_problem_and_its_values_count() -> None:
    bms = FakeBms([FakePoint("RackPower")], has_heartbeat=False)
    source = open_fake(bms)
    bms.run_until(31)
    assert source.read().racks[0].power_w == 1000.0
    assert "no heartbeat (HeartbeatTimestampBms)" in source.problems[0]


def test_a_message_that_is_delivered_once_more_does_not_replace_a_newer_one() -> None:
    bms = FakeBms([FakePoint("RackPower", lambda t: t)])
    source = open_fake(bms)
    bms.run_until(50)
    bms.publish(VALUE_PREFIX + bms.points[0].key, make_value(7.0, bms.now - 43))
    assert source.read().racks[0].power_w == 50_000.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [((0, 0), False), ((0, 1), True), ((1, None), True), ((0, None), None), ((0, 0.5), None)],
)
def test_of_several_leak_sensors_any_may_find_one(values: tuple[float | None, ...], expected: bool | None) -> None:
    for order in (values, values[::-1]):
        points = [
            FakePoint("RackLeakDetect", lambda t, value=value: value, tag=f"rack-1/leak{index}")  # type: ignore[misc]
            for index, value in enumerate(order)
        ]
        assert read_one(FakeBms(points)).has_leak is expected


def test_of_two_points_of_one_measurement_none_is_taken() -> None:
    assert (
        read_one(FakeBms([FakePoint("RackPower", tag="feed-a"), FakePoint("RackPower", tag="feed-b")])).power_w is None
    )


def test_racks_are_told_by_their_location() -> None:
    points = [FakePoint("RackPower", tag="a"), FakePoint("RackPower", lambda t: 2.0, rack="rack-2", tag="b")]
    source = open_fake(bms := FakeBms(points))
    bms.run_until(1)
    assert [(rack.id, rack.power_w) for rack in source.read().racks] == [("rack-1", 1000.0), ("rack-2", 2000.0)]


def test_a_point_in_another_unit_is_a_problem_and_not_used() -> None:
    bms = FakeBms([FakePoint("RackPower", unit="W"), FakePoint("RackLiquidFlow")])
    rack = read_one(bms)
    assert (rack.power_w, rack.flow_l_per_min) == (None, 1.0)
    assert "expected the unit kW, found W" in open_fake(bms).problems[0]


def test_of_many_points_that_are_not_used_some_are_named() -> None:
    bms = FakeBms([FakePoint("RackPower", unit="W", tag=f"tag{index:02}\x1b[2J") for index in range(15)])
    problems = open_fake(bms).problems
    assert len(problems) == 11
    assert problems[-1] == "mqtts://bus: and 5 more points are not used"
    assert "\x1b" not in "".join(problems)


def test_values_without_metadata_belong_to_no_rack() -> None:
    bms = FakeBms([])
    source = open_fake(bms)
    bms.points.append(FakePoint("RackPower"))
    bms.run_until(1)
    assert source.read().racks == ()
    assert "1 points have values and no metadata" in source.problems[0]
    bms.publish(METADATA_PREFIX + bms.points[0].key, make_metadata(bms.points[0]))
    assert source.read().racks[0].power_w == 1000.0


def test_the_number_of_points_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rack_points, "MAX_POINTS", 3)
    source = open_fake(FakeBms([FakePoint("RackPower", rack=str(index), tag=str(index)) for index in range(9)]))
    assert len(source.read().racks) == 3


def test_a_point_whose_metadata_are_removed_is_forgotten_and_a_bus_without_racks_a_problem() -> None:
    bms = FakeBms([FakePoint("RackPower")])
    source = open_fake(bms)
    bms.run_until(1)
    bms.publish(METADATA_PREFIX + bms.points[0].key, b"")
    assert (source.read().racks, source.problems) == ((), [])
    bms.run_until(31)
    assert "no rack has metadata: is this user allowed to read BMS/v1/PUB/Metadata/Rack/#" in source.problems[0]


class RefusingClient:
    """A client whose subscriptions a broker refuses, as those that check permissions then."""

    def __init__(self, *arguments: Any, **options: Any):
        self.options = options

    async def __aenter__(self) -> "RefusingClient":
        return self

    async def __aexit__(self, *error: Any) -> None:
        pass

    async def subscribe(self, topic: str, qos: int) -> tuple[int, ...]:
        return (128,)


def test_a_refused_subscription_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("aiomqtt"), "Client", RefusingClient)
    with pytest.raises(SourceUnavailableError, match=r"refuses the topics BMS/v1/PUB/Metadata/Rack/# to this user"):
        open_mqtt(MqttOptions(url="mqtt://bus"), {})


def test_closing_leaves_the_bus() -> None:
    bms = FakeBms([])
    source = open_fake(bms)
    assert bms.is_subscribed
    source.close()
    assert not bms.is_subscribed


@pytest.mark.parametrize(
    ("options", "environment", "text"),
    [
        ({"url": "bus"}, {}, "expected an address such as mqtts://"),
        ({"url": "https://bus"}, {}, "expected an address such as mqtts://"),
        ({"url": "mqtts://bus:port"}, {}, "expected an address such as mqtts://"),
        ({"url": "mqtts://bus", "ca_file": Path("/none")}, {}, "mqtt: ca_file: there is no file /none"),
        ({"url": "mqtts://reader:secret@bus"}, {}, "do not belong into an address"),
        (
            {"url": "mqtt://bus"},
            {"PHALANX_MQTT_USER": "reader", "PHALANX_MQTT_PASSWORD": "secret"},
            "not sent without TLS",
        ),
    ],
)
def test_wrong_addresses_and_credentials_are_refused(
    options: dict[str, Any], environment: dict[str, str], text: str
) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        open_mqtt(MqttOptions(**options), environment)
    assert "secret" not in str(caught.value)


CDU_PLACES = {"objectType": "CDU", "objectId": "cdu-1", "objectName": "CDU 1"}


def test_the_secondary_side_of_a_cdu_is_read_and_its_other_points_are_not() -> None:
    bms = FakeBms([])
    source = open_fake(bms)
    points = [
        ("LiquidTemperature/a", ["Secondary", "Supply"], "C", False, 32.5),
        ("LiquidTemperature/b", ["Secondary", "Supply"], "C", True, 32.0),
        ("LiquidTemperature/c", ["secondary", "return"], "C", False, 42.0),
        ("LiquidTemperature/d", ["Primary", "Inlet"], "C", False, 20.0),
        ("LiquidFlow/e", ["Secondary"], "LPM", False, 180.0),
        ("LiquidDifferentialPressure/f", ["Secondary"], "kPa", False, 95.0),
        ("LeakDetect/g", None, None, False, 1.0),
    ]
    for key, area, unit, is_set_point, value in points:
        metadata = {**CDU_PLACES, "processArea": area, "engUnit": unit, "isSetpoint": is_set_point}
        bms.publish(CDU_METADATA_PREFIX + key, {name: each for name, each in metadata.items() if each is not None})
        bms.publish(CDU_VALUE_PREFIX + key, make_value(value, bms.now))
    assert source.read().racks == (
        RackSample(
            id="cdu-1",
            name="CDU 1",
            equipment="CDU",
            supply_temperature_c=32.5,
            set_point_c=32.0,
            return_temperature_c=42.0,
            flow_l_per_min=180.0,
            differential_pressure_pa=95_000.0,
            has_leak=True,
            age_s=0.0,
        ),
    )
    assert source.problems == []
