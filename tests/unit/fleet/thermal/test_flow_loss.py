"""Loss of coolant: seconds, and the order of what follows."""

import math

import pytest

from phalanx.fleet.thermal.flow_loss import CoolingAction, CoolingFault, HeatCapacity, plan_response

DEVICE = HeatCapacity(heat_j_per_k=450.0, power_w=1000.0, temperature_c=60.0, limit_c=90.0)
ORDER = [CoolingAction.REPORT, CoolingAction.STOP_SCHEDULING, CoolingAction.SAVE_CHECKPOINT, CoolingAction.POWER_OFF]


@pytest.mark.parametrize(("heat_j_per_k", "seconds"), [(300.0, 9.0), (600.0, 18.0)])
def test_without_flow_a_device_has_9_to_18_seconds(heat_j_per_k: float, seconds: float) -> None:
    device = HeatCapacity(heat_j_per_k, 1000.0, 60.0, 90.0)
    assert device.find_seconds(90.0) == pytest.approx(seconds)
    assert device.find_temperature(seconds) == pytest.approx(90.0)


def test_flow_that_remains_gives_time() -> None:
    assert DEVICE.find_seconds(90.0, 0.3) > DEVICE.find_seconds(90.0)
    assert DEVICE.find_seconds(90.0, 0.8) == math.inf
    assert DEVICE.find_temperature(DEVICE.find_seconds(90.0, 0.3), 0.3) == pytest.approx(90.0)


def test_a_short_save_comes_before_power_off() -> None:
    events = plan_response(CoolingFault.NO_FLOW, DEVICE, save_s=5.0)
    assert [each.action for each in events] == ORDER
    assert [each.time_s for each in events] == sorted(each.time_s for each in events)
    assert events[-1].time_s == pytest.approx(7.0)
    assert events[-1].temperature_c < 90.0


@pytest.mark.parametrize("save_s", [None, 30.0])
def test_without_time_to_save_power_goes_off_at_once(save_s: float | None) -> None:
    events = plan_response(CoolingFault.NO_FLOW, DEVICE, save_s)
    assert [each.action for each in events] == [ORDER[0], ORDER[1], ORDER[3]]
    assert events[-1].time_s == pytest.approx(2.0)


def test_a_leak_asks_the_building_for_isolation_and_never_isolates() -> None:
    actions = [each.action for each in plan_response(CoolingFault.LEAK, DEVICE, save_s=5.0, flow_share=1.0)]
    assert actions == [*ORDER[:2], CoolingAction.REQUEST_ISOLATION, *ORDER[2:]]


def test_no_margin_leaves_no_time_to_save() -> None:
    events = plan_response(CoolingFault.NO_MARGIN, DEVICE, save_s=5.0)
    assert CoolingAction.SAVE_CHECKPOINT not in [each.action for each in events]
    assert events[-1].time_s <= 2.0
