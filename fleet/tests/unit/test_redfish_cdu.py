"""CDUs by Redfish: what is read, of several connectors, and what is missing."""

from typing import Any

import pytest

from cdu_mockup import CDU, link, make_cdu
from manual_polling import ManualPolling
from phalanx.telemetry.sample import SourceUnavailableError
from phalanx_fleet.telemetry.redfish_cdu import RedfishCduOptions, RedfishCduSource
from phalanx_fleet.telemetry.service_reading import RackSample, RefusalError, ServiceError
from settable_clock import SettableClock

SERVED = RackSample(
    id="cdu-1",
    name="CDU row 3",
    equipment="CDU",
    supply_temperature_c=32.5,
    return_temperature_c=42.0,
    flow_l_per_min=180.0,
    differential_pressure_pa=95_000.0,
    power_w=3400.0,
    has_leak=False,
    has_leak_sensor_fault=False,
    set_point_c=32.0,
    failed_pumps=0.0,
    age_s=0.0,
)


class FakeController:
    """Serves resources; `is_down`: it does not answer."""

    def __init__(self, resources: dict[str, dict[str, Any]]):
        self.resources, self.is_down = resources, False

    def get(self, path: str) -> dict[str, Any]:
        if self.is_down:
            raise ServiceError("connection refused")
        if path not in self.resources:
            raise RefusalError(f"answers with status 404 to {path}")
        return self.resources[path]

    def close(self) -> None:
        self.is_down = True


def open_source(controller: FakeController, clock: SettableClock | None = None, cdu: str = "") -> RedfishCduSource:
    options = RedfishCduOptions(url="https://cdu1", cdu=cdu)
    return RedfishCduSource("cdu-1", options, controller, clock or SettableClock(), ManualPolling().start)


def read(resources: dict[str, dict[str, Any]]) -> RackSample:
    return open_source(FakeController(resources)).read().racks[0]


def test_all_values_are_read_in_base_units() -> None:
    assert read(make_cdu()) == SERVED


def test_of_several_connectors_flows_are_added_and_the_worst_of_the_rest_counts() -> None:
    sample = read(make_cdu(num_connectors=3))
    assert (sample.flow_l_per_min, sample.supply_temperature_c, sample.differential_pressure_pa) == (540, 34.5, 93_000)


def test_a_connector_without_a_flow_leaves_the_cdu_without_one() -> None:
    resources = make_cdu(num_connectors=2)
    resources[f"{CDU}/SecondaryCoolantConnectors/1"]["FlowLitersPerMinute"] = {"Reading": None}
    assert read(resources).flow_l_per_min is None


@pytest.mark.parametrize(
    ("detector", "expected"),
    [
        ({"DetectorState": "Critical", "Status": {"State": "Enabled"}}, (True, False)),
        ({"DetectorState": "Warning"}, (True, False)),
        ({"DetectorState": "OK", "Status": {"State": "UnavailableOffline"}}, (None, True)),
        ({"DetectorState": None}, (None, True)),
        ({"DetectorState": "OK", "Status": {"State": "Absent"}}, (False, False)),
    ],
)
def test_one_detector_with_a_leak_is_enough_and_one_that_fails_is_no_all_clear(
    detector: dict[str, Any], expected: tuple[bool | None, bool]
) -> None:
    resources = make_cdu()
    resources[f"{CDU}/LeakDetection/LeakDetectors/Floor"] = detector
    sample = read(resources)
    assert (sample.has_leak, sample.has_leak_sensor_fault) == expected


@pytest.mark.parametrize("fault", [{"PumpSpeedPercent": {"Reading": 0.0}}, {"Status": {"Health": "Critical"}}])
def test_a_pump_that_does_not_turn_or_is_critical_has_failed(fault: dict[str, Any]) -> None:
    resources = make_cdu()
    resources[f"{CDU}/Pumps/2"] |= fault
    assert read(resources).failed_pumps == 1.0


def test_late_values_and_those_of_a_silent_controller_are_missing() -> None:
    clock, controller = SettableClock(), FakeController(make_cdu())
    source = open_source(controller, clock)
    clock.now += 30.0
    assert source.read().racks[0].age_s == 30.0
    clock.now += 0.1
    assert source.read().racks == (RackSample(id="cdu-1", equipment="CDU"),)


def test_one_of_several_cdus_is_chosen_by_its_id() -> None:
    resources = make_cdu()
    resources["/redfish/v1/ThermalEquipment/CDUs"]["Members"].append(link("/redfish/v1/ThermalEquipment/CDUs/2"))
    with pytest.raises(SourceUnavailableError, match="has 2 CDUs; set cdu to one of 1, 2"):
        open_source(FakeController(resources))
    assert open_source(FakeController(resources), cdu="1").read().racks[0].supply_temperature_c == 32.5


def test_a_controller_without_cdus_is_said() -> None:
    with pytest.raises(SourceUnavailableError, match="has 0 CDUs; it serves no ThermalEquipment with CDUs"):
        open_source(FakeController({"/redfish/v1/": {"Id": "RootService"}}))
