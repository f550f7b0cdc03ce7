"""CDUs by Modbus, against pymodbus' server in this process: types, word order, scales, units, and what is missing."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import RecipeError, UsageError
from phalanx.telemetry.sample import SourceUnavailableError
from phalanx_fleet.nodes_file import NodeServices, load_nodes_file
from phalanx_fleet.telemetry.modbus import ModbusEntry, ModbusSource, PymodbusClient, open_modbus
from phalanx_fleet.telemetry.service_reading import RackSample
from settable_clock import SettableClock

pytest.importorskip("pymodbus", reason="pymodbus is not installed: pip install 'phalanx[fleet]'")
from manual_polling import ManualPolling
from modbus_server import ModbusDevice, run_modbus

TENTHS_C = {"table": "holding", "type": "int16", "scale": 0.1, "unit": "C"}


@pytest.fixture(scope="module")
def server() -> Iterator[ModbusDevice]:
    with run_modbus(ModbusDevice()) as device:
        yield device


@pytest.fixture
def device(server: ModbusDevice) -> ModbusDevice:
    server.registers[:] = [0] * len(server.registers)
    server.refused.clear()
    return server


def read(device: ModbusDevice, points: dict[str, Any], **entry: Any) -> RackSample:
    source = open_modbus("cdu-1", make_entry(device, points, **entry))
    try:
        return source.read().racks[0]
    finally:
        source.close()


def make_entry(device: ModbusDevice, points: dict[str, Any], **entry: Any) -> ModbusEntry:
    return ModbusEntry(url=device.url, device_id=1, points=points, **entry)


def test_a_scaled_register_is_read_in_celsius(device: ModbusDevice) -> None:
    device.put(10, [325])
    device.put(11, [0x10000 - 15])
    sample = read(
        device,
        {"supply_temperature_c": {**TENTHS_C, "address": 10}, "return_temperature_c": {**TENTHS_C, "address": 11}},
    )
    assert (sample.supply_temperature_c, sample.return_temperature_c) == pytest.approx((32.5, -1.5))
    assert (sample.id, sample.equipment) == ("cdu-1", "CDU")
    assert sample.age_s is not None
    assert 0 <= sample.age_s < 5


@pytest.mark.parametrize(
    ("unit", "column", "number", "expected"),
    [
        ("F", "supply_temperature_c", 90.5, 32.5),
        ("K", "supply_temperature_c", 305.65, 32.5),
        ("m3/h", "flow_l_per_min", 10.8, 180.0),
        ("gpm", "flow_l_per_min", 50.0, 189.2705892),
        ("bar", "differential_pressure_pa", 0.95, 95_000.0),
        ("kW", "power_w", 121.5, 121_500.0),
        ("%", "valve_position", 60.0, 0.6),
    ],
)
@pytest.mark.parametrize("word_order", ["big", "little"])
def test_floats_are_read_in_both_word_orders_and_in_base_units(
    device: ModbusDevice, unit: str, column: str, number: float, expected: float, word_order: str
) -> None:
    words = list(struct.unpack(">2H", struct.pack(">f", number)))
    device.put(20, words if word_order == "big" else words[::-1])
    point = {"table": "input", "address": 20, "type": "float32", "word_order": word_order, "scale": 1, "unit": unit}
    assert getattr(read(device, {column: point}), column) == pytest.approx(expected, rel=1e-6, abs=1e-4)


@pytest.mark.parametrize(("count", "expected"), [(0, False), (1, True), (2, None)])
def test_a_leak_is_yes_or_no_and_nothing_else(device: ModbusDevice, count: int, expected: bool | None) -> None:
    device.put(5, [count])
    point = {"table": "holding", "address": 5, "type": "uint16", "scale": 1, "unit": "1"}
    assert read(device, {"has_leak": point}).has_leak is expected


@pytest.mark.parametrize("words", [[0x7FFF], [2000]])
def test_a_code_and_a_value_that_no_sensor_gives_are_missing(device: ModbusDevice, words: list[int]) -> None:
    device.put(10, words)
    points = {"supply_temperature_c": {**TENTHS_C, "address": 10, "missing": [0x7FFF]}}
    assert read(device, points).supply_temperature_c is None


def test_a_float_that_is_no_number_is_missing(device: ModbusDevice) -> None:
    device.put(20, list(struct.unpack(">2H", struct.pack(">f", float("nan")))))
    point = {"table": "holding", "address": 20, "type": "float32", "word_order": "big", "scale": 1, "unit": "L/min"}
    assert read(device, {"flow_l_per_min": point}).flow_l_per_min is None


def test_a_refused_register_is_missing_and_named_and_the_others_are_read(device: ModbusDevice) -> None:
    device.put(10, [325])
    device.refused.add(11)
    points = {"supply_temperature_c": {**TENTHS_C, "address": 10}, "return_temperature_c": {**TENTHS_C, "address": 11}}
    source = open_modbus("cdu-1", make_entry(device, points))
    try:
        sample = source.read().racks[0]
        assert (sample.supply_temperature_c, sample.return_temperature_c) == (32.5, None)
        assert source.problems == [f"{device.url}: return_temperature_c: refuses holding 11 (Modbus exception 2)"]
    finally:
        source.close()


def test_late_values_and_those_of_a_stopped_controller_are_missing(device: ModbusDevice) -> None:
    device.put(10, [325])
    alive = {"table": "holding", "address": 0, "type": "uint16", "scale": 1, "unit": "1"}
    entry = make_entry(device, {"supply_temperature_c": {**TENTHS_C, "address": 10}}, alive=alive)
    clock, polling = SettableClock(), ManualPolling()
    source = ModbusSource("cdu-1", entry, PymodbusClient(entry), clock, polling.start)
    for second in range(1, 5):
        device.put(0, [second])
        clock.now += 5.0
        polling.poll()
        assert source.read().racks[0].supply_temperature_c == 32.5
    clock.now += 14.9
    assert source.read().racks[0].age_s == pytest.approx(14.9)
    clock.now += 0.2
    assert source.read().racks[0] == RackSample(id="cdu-1", equipment="CDU")  # late
    polling.poll()  # it answers, but its counter stands
    assert source.read().racks[0].supply_temperature_c is None
    assert source.problems == [f"{device.url}: the counter of the controller stands: its values are missing"]
    source.close()


def test_a_device_that_stops_answering_is_missing_and_is_found_again() -> None:
    device, clock, polling = ModbusDevice(), SettableClock(), ManualPolling()
    device.put(10, [325])
    with run_modbus(device):
        entry = make_entry(device, {"supply_temperature_c": {**TENTHS_C, "address": 10}}, timeout_s=0.5)
        source = ModbusSource("cdu-1", entry, PymodbusClient(entry), clock, polling.start)
    polling.poll()
    assert source.read().racks[0].supply_temperature_c is None
    with run_modbus(device):
        polling.poll()
        assert source.read().racks[0].supply_temperature_c == 32.5
    source.close()


def test_no_device_is_unavailable() -> None:
    with pytest.raises(SourceUnavailableError, match="cannot be reached"):
        open_modbus("cdu-1", make_entry(ModbusDevice(port=1), {"supply_temperature_c": {**TENTHS_C, "address": 10}}))


def test_an_address_without_modbus_is_refused() -> None:
    with pytest.raises(UsageError, match="expected an address such as modbus://cdu1:502, found 'cdu1'"):
        open_modbus("a", ModbusEntry(url="cdu1", device_id=1, points={}))


@pytest.mark.parametrize(
    ("point", "text"),
    [
        ("{table: holding, address: 1}", "expected type, scale, unit"),
        ("{table: holding, address: 1, type: float32, scale: 1, unit: C}", "expected word_order: big, or little"),
        ("{table: holding, address: 1, type: int16, scale: 0.1, unit: kPa}", "unit kPa: expected one of C, F, K"),
        ("{table: coil, address: 1}", "a coil is one bit; expected a register"),
        ("{table: holding, address: 70000, type: int16, scale: 0.1, unit: C}", "from 0 to 65,535"),
        ("{table: holding, address: 1, type: int16, scale: 0.1, unit: C, adress: 2}", "adress"),
    ],
)
def test_a_map_that_leaves_something_to_a_guess_is_refused(tmp_path: Path, point: str, text: str) -> None:
    file = tmp_path / "nodes.yml"
    file.write_text(
        "nodes: []\ncdus:\n  - id: cdu-1\n    modbus:\n      url: modbus://cdu1\n      device_id: 1\n"
        f"      points:\n        supply_temperature_c: {point}\n"
    )
    with pytest.raises(RecipeError, match=f"nodes.yml:[0-9]+.*{text}"):
        load_nodes_file(file)


def test_a_cdu_of_the_nodes_file_is_read_with_the_racks(device: ModbusDevice, tmp_path: Path) -> None:
    device.put(10, [325])
    file = tmp_path / "nodes.yml"
    file.write_text(
        f"nodes: []\ncdus:\n  - id: cdu-1\n    racks: [rack-05]\n    modbus:\n      url: {device.url}\n"
        "      device_id: 1\n      points:\n"
        "        supply_temperature_c: {table: holding, address: 10, type: int16, scale: 0.1, unit: C}\n"
    )
    services = NodeServices(load_nodes_file(file))
    racks, problems = services.read_racks()
    services.close()
    assert ([(rack.id, rack.supply_temperature_c) for rack in racks], problems) == ([("cdu-1", 32.5)], [])
