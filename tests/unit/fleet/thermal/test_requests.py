"""Requests of a set point: by Modbus to pymodbus' server with a simulated controller behind it, and on the bus."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from phalanx.app.thermal_requests import find_withdrawal, hold_request, make_session, open_request, set_withdrawal
from phalanx.errors import UsageError
from phalanx.fleet.telemetry.modbus import PymodbusClient
from phalanx.fleet.telemetry.modbus_map import ModbusEntry
from phalanx.fleet.telemetry.rack_points import HEARTBEAT_PREFIX, METADATA_ROOT, VALUE_ROOT
from phalanx.fleet.thermal.bms_requests import BmsRequestChannel, BmsRequests
from phalanx.fleet.thermal.local_controller import LocalController, SetPointRequest
from phalanx.fleet.thermal.modbus_requests import ModbusRequestChannel
from phalanx.fleet.thermal.plant_settings import CoolingPlant
from phalanx.fleet.thermal.request_session import RequestLimits, RequestSession
from settable_clock import SettableClock

pytest.importorskip("pymodbus", reason="pymodbus is not installed: pip install 'phalanx[fleet]'")
from modbus_server import ModbusDevice, run_modbus

HELD, ASKED, ENABLE, BEAT, ECHO, OPERATOR = 30, 40, 41, 42, 43, 44
COUNT = {"table": "holding", "type": "uint16", "scale": 1, "unit": "1"}
TENTHS_C = {"table": "holding", "type": "int16", "scale": 0.1, "unit": "C"}
LIMITS = RequestLimits(min_c=25.0, max_c=40.0, max_step_k=2.0, step_interval_s=3600.0)


class SimulatedCdu:
    """A CDU of which the controller reads its request registers when `tick` lets it. Faults: `echoes` nothing, or an
    operator is in charge."""

    def __init__(self, device: ModbusDevice):
        self.device, self.controller = device, LocalController(CoolingPlant(design_it="1 MW"))
        self.echoes, self.refusal = True, ""
        self.last_beat = 0
        device.registers[:] = [0] * len(device.registers)
        device.writes.clear()
        self.tick(0.0)

    def tick(self, now: float) -> None:
        registers, controller = self.device.registers, self.controller
        controller.is_operator_in_charge = registers[OPERATOR] == 1
        if registers[BEAT] != self.last_beat:
            self.last_beat = registers[BEAT]
            controller.beat(now)
        if registers[ENABLE]:
            controller.receive(SetPointRequest(registers[ASKED] / 10, 0.8))
        else:
            controller.drop()
        held, refusal = controller.step(now, 0.8e6)
        self.refusal = refusal or ""
        if refusal:
            registers[ENABLE] = 0  # dropped: it has to be asked for again
        registers[HELD] = round(held.supply_c * 10)
        registers[ECHO] = registers[BEAT] if self.echoes else 0


def make_entry(url: str) -> dict[str, Any]:
    return {
        "url": url,
        "device_id": 1,
        "points": {"set_point_c": {**TENTHS_C, "address": HELD}},
        "request": {
            "set_point": {**TENTHS_C, "address": ASKED},
            "enable": {**COUNT, "address": ENABLE},
            "heartbeat": {**COUNT, "address": BEAT},
            "echo": {**COUNT, "address": ECHO},
            "in_charge": {**COUNT, "address": OPERATOR},
        },
    }


@pytest.fixture(scope="module")
def device() -> Iterator[ModbusDevice]:
    with run_modbus(ModbusDevice()) as found:
        yield found


class Loop:
    """A session and a controller that take turns."""

    def __init__(self, device: ModbusDevice, target_c: float, **session: Any):
        self.clock, self.cdu = SettableClock(), SimulatedCdu(device)
        self.clock.now = 0.0
        entry = ModbusEntry(**make_entry(device.url))
        assert entry.request is not None
        self.channel = ModbusRequestChannel(
            PymodbusClient(entry), entry.request, entry.points["set_point_c"], self.clock
        )
        self.session = RequestSession(target_c, LIMITS, self.channel, self.clock, **session)

    def run(self, seconds: float) -> Any:
        end, status = self.clock.now + seconds, None
        while self.clock.now < end:
            status = self.session.step()
            self.cdu.tick(self.clock.now)
            if status.ended is not None:
                break
            self.clock.now += 10.0
        return status


MakeLoop = Callable[..., Loop]


@pytest.fixture
def make_loop(device: ModbusDevice) -> Iterator[MakeLoop]:
    made: list[Loop] = []

    def make(target_c: float, **session: Any) -> Loop:
        made.append(Loop(device, target_c, **session))
        return made[-1]

    yield make
    for each in made:
        each.channel.close()


@pytest.fixture
def loop(make_loop: MakeLoop) -> Loop:
    return make_loop(34.0)


def test_a_request_is_followed_and_confirmed_by_what_the_controller_holds(loop: Loop) -> None:
    status = loop.run(60.0)
    assert (status.requested_c, status.set_point_c, status.is_followed) == (34.0, 34.0, True)


def test_nothing_is_asked_before_the_controller_has_repeated_a_heartbeat(loop: Loop, device: ModbusDevice) -> None:
    loop.cdu.echoes = False
    status = loop.run(60.0)
    assert "no sign of life" in status.ended
    assert {address for address, _ in device.writes} == {BEAT, ENABLE}
    assert [words for address, words in device.writes if address == ENABLE] == [[0]]


def test_a_far_target_is_approached_by_steps() -> None:
    building = FakeBuilding()
    building.grant()
    session = RequestSession(37.0, LIMITS, building.channel, building.clock)
    asked = []
    for _ in range(8):
        building.grant()
        asked.append(session.step().requested_c)
        building.clock.now += 1800.0
    assert asked == [34.0, 34.0, 36.0, 36.0, 37.0, 37.0, 37.0, 37.0]


def test_the_controller_drops_the_request_when_our_heartbeat_stops(loop: Loop) -> None:
    loop.run(60.0)
    for second in range(10, 400, 10):
        loop.cdu.tick(loop.clock.now + second)
    assert loop.cdu.controller.refusals == {"no heartbeat": 1}
    assert loop.cdu.controller.supply_c == 32.0


def test_the_request_is_withdrawn_when_the_controller_stops_repeating(loop: Loop, device: ModbusDevice) -> None:
    loop.run(60.0)
    loop.cdu.echoes = False
    assert "no sign of life for 40 s" in loop.run(120.0).ended
    assert device.registers[ENABLE] == 0


def test_the_request_is_withdrawn_when_an_operator_takes_over(loop: Loop, device: ModbusDevice) -> None:
    loop.run(60.0)
    device.registers[OPERATOR] = 1
    assert loop.run(60.0).ended == "an operator has taken over"
    assert device.registers[ENABLE] == 0
    assert loop.cdu.controller.supply_c == 32.0


def test_the_request_is_withdrawn_when_our_operator_says_so(device: ModbusDevice, make_loop: MakeLoop) -> None:
    reasons: list[str | None] = [None] * 4
    loop = make_loop(34.0, find_withdrawal=lambda: reasons.pop(0) if reasons else "withdrawn by ann: visit")
    assert loop.run(600.0).ended == "withdrawn by ann: visit"
    assert device.registers[ENABLE] == 0


@pytest.mark.parametrize("target_c", [24.9, 40.1, float("nan")])
def test_a_target_outside_the_limits_writes_no_set_point(
    device: ModbusDevice, make_loop: MakeLoop, target_c: float
) -> None:
    loop = make_loop(target_c)
    assert "is not within 25 to 40 °C" in loop.run(10.0).ended
    assert ASKED not in {address for address, _ in device.writes}


def test_every_request_and_withdrawal_is_recorded(make_loop: MakeLoop) -> None:
    lines: list[dict[str, object]] = []
    loop = make_loop(34.0, record=lines.append)
    loop.run(60.0)
    loop.session.withdraw("its time is over")
    assert lines == [
        {"request_supply_c": 34.0, "held_c": 32.0, "target_c": 34.0},
        {"withdraw": "its time is over"},
    ]


@pytest.fixture
def nodes(device: ModbusDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHALANX_STATE_DIR", str(tmp_path / "state"))
    cdu = {"id": "cdu-1", "modbus": make_entry(device.url), "set_point": {"min_c": 25, "max_c": 40}}
    path = tmp_path / "nodes.yml"
    path.write_text(json.dumps({"nodes": [], "cdus": [cdu]}))
    return path


def run_cli(*words: str) -> Any:
    from phalanx.cli.thermal import app

    return CliRunner().invoke(app, list(words), standalone_mode=False)


def test_without_yes_the_exact_writes_are_printed_and_nothing_is_written(device: ModbusDevice, nodes: Path) -> None:
    SimulatedCdu(device)
    result = run_cli("request", str(nodes), "cdu-1", "--supply", "37")
    assert "holding 40 = 340  (set point 34 °C)" in result.output
    assert "dry run: nothing was written" in result.output
    assert (device.writes, result.return_value) == ([], 0)


def test_a_withdrawal_refuses_requests_until_it_ends(device: ModbusDevice, nodes: Path) -> None:
    SimulatedCdu(device)
    run_cli("withdraw", "--reason", "chiller service")
    result = run_cli("request", str(nodes), "cdu-1", "--supply", "33", "--yes")
    assert "nothing is requested: withdrawn by" in result.output
    assert "chiller service" in result.output
    assert (device.writes, result.return_value) == ([], 77)
    run_cli("withdraw", "--end")
    assert find_withdrawal() is None


def test_a_withdrawal_that_cannot_be_read_counts(nodes: Path) -> None:
    set_withdrawal("x").write_text("{")
    assert "cannot be read" in str(find_withdrawal())


def test_a_held_request_is_withdrawn_at_its_end_and_logged(device: ModbusDevice, nodes: Path) -> None:
    cdu, clock = SimulatedCdu(device), SettableClock()
    request = open_request(nodes, "cdu-1", 33.0)
    session = make_session(request, clock)

    def sleep(seconds: float) -> None:
        clock.now += seconds
        cdu.tick(clock.now - 1e6)

    clock.now = 1e6
    statuses = list(hold_request(session, 60.0, sleep, clock))
    request.channel.close()
    assert statuses[-1].requested_c == 33.0
    assert device.registers[ENABLE] == 0
    cdu.tick(clock.now)
    assert cdu.controller.supply_c == 32.0
    lines = [json.loads(line) for line in (nodes.parent / "state/thermal/audit.jsonl").read_text().splitlines()]
    assert [(line["cdu"], line.get("request_supply_c"), line.get("withdraw")) for line in lines] == [
        ("cdu-1", 33.0, None),
        ("cdu-1", None, "its time is over"),
    ]


def test_a_cdu_without_limits_or_of_another_name_is_refused(nodes: Path) -> None:
    with pytest.raises(UsageError, match=r"no CDU cdu-9 \(cdus has cdu-1\)"):
        open_request(nodes, "cdu-9", 33.0)
    found = json.loads(nodes.read_text())
    del found["cdus"][0]["set_point"]
    nodes.write_text(json.dumps(found))
    with pytest.raises(UsageError, match="without it nothing is requested"):
        open_request(nodes, "cdu-1", 33.0)


class FakeBus:
    def __init__(self) -> None:
        self.messages: list[tuple[str, dict[str, Any]]] = []

    def publish(self, topic: str, payload: bytes) -> None:
        self.messages.append((topic, json.loads(payload)))


class FakeBuilding:
    """Sends what a building does to an integration of the name `phalanx`."""

    def __init__(self) -> None:
        self.clock, self.bus = SettableClock(), FakeBus()
        self.clock.now = 1_000_000.0
        self.requests = BmsRequests("phalanx", self.bus, self.clock, self.clock)
        self.channel = BmsRequestChannel(self.requests, "cdu-1")

    def describe(self, key: str, **content: Any) -> None:
        self.requests.receive(METADATA_ROOT + key, json.dumps(content).encode())

    def send(self, key: str, value: float) -> None:
        content = {"value": value, "timestamp": 1000 * self.clock.now, "quality": 1}
        self.requests.receive(VALUE_ROOT + key, json.dumps(content).encode())

    def grant(self, integration: str = "phalanx") -> None:
        self.describe("CDU/LiquidTemperatureSpRequest/a", objectId="cdu-1", engUnit="C", integration=integration)
        self.describe("System/HeartbeatTimestampIntegration/b", objectId="phalanx", integration="phalanx")
        self.describe("System/HeartbeatEchoIntegration/d", objectId="BMS", integration="phalanx")
        self.describe(
            "CDU/LiquidTemperature/c",
            objectId="cdu-1",
            engUnit="C",
            isSetpoint=True,
            processArea=["Secondary", "Supply"],
        )
        self.send("CDU/LiquidTemperature/c", 32.0)
        self.beat()

    def beat(self) -> None:
        self.send(HEARTBEAT_PREFIX.removeprefix(VALUE_ROOT) + "bms", 1000 * self.clock.now)


def test_on_the_bus_a_request_goes_to_the_topic_that_metadata_grant() -> None:
    building = FakeBuilding()
    building.grant()
    session = RequestSession(33.0, LIMITS, building.channel, building.clock)
    assert session.step().requested_c == 33.0
    sent = {topic: (message["value"], message["quality"]) for topic, message in building.bus.messages}
    assert sent == {
        "BMS/v1/phalanx/Value/CDU/LiquidTemperatureSpRequest/a": (33.0, 1),
        "BMS/v1/phalanx/Value/System/HeartbeatTimestampIntegration/b": (1e9, 1),
        "BMS/v1/phalanx/Value/System/HeartbeatEchoIntegration/d": (1e9, 1),
    }
    session.withdraw("end")
    topic, message = building.bus.messages[-1]
    assert (topic.rsplit("/", 2)[1], message["value"], message["quality"]) == ("LiquidTemperatureSpRequest", None, 0)


def test_what_metadata_grant_to_another_integration_is_never_published() -> None:
    building = FakeBuilding()
    building.grant("other")
    status = RequestSession(33.0, LIMITS, building.channel, building.clock).step()
    assert "do not grant" in str(status.ended)
    assert building.bus.messages == []


def test_without_a_point_for_our_heartbeat_nothing_is_requested() -> None:
    building = FakeBuilding()
    building.grant()
    building.describe("System/HeartbeatTimestampIntegration/b")
    assert "a request could not lapse" in str(building.channel.read_state().grant_problem)


def test_a_building_that_falls_silent_ends_the_request() -> None:
    building = FakeBuilding()
    building.grant()
    session = RequestSession(33.0, LIMITS, building.channel, building.clock)
    session.step()
    building.clock.now += 29.0
    assert session.step().ended is None
    building.clock.now += 2.0
    assert "set point" in str(session.step().ended)  # late values are missing, that of the set point too


def test_a_building_that_does_not_repeat_our_heartbeat_any_more_ends_the_request() -> None:
    building = FakeBuilding()
    building.grant()
    building.describe("System/HeartbeatEchoBms/e", objectId="phalanx")
    session = RequestSession(33.0, LIMITS, building.channel, building.clock)
    assert session.step().requested_c is None  # it has not been heard yet
    building.send("System/HeartbeatEchoBms/e", 1e9)
    assert session.step().requested_c == 33.0
    for _ in range(4):
        building.clock.now += 10.0
        building.beat()
    assert "no sign of life for 40 s" in str(session.step().ended)
