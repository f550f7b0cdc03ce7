"""Requests to a simulated plant: the local controller verifies, drops and keeps itself safe."""

import numpy as np
import pytest

from phalanx.fleet.thermal.closed_loop import LoopOutages, run_closed_loop
from phalanx.fleet.thermal.local_controller import LocalController, SetPointRequest
from phalanx.fleet.thermal.plant_settings import CoolingPlant

PLANT = CoolingPlant(design_it="1 MW")
HOURS = np.arange(24 * 14)
WET_C = 14 + 8 * np.sin(HOURS / 24 * 2 * np.pi)
IT_W = np.full(len(HOURS), 0.8e6)


def make_controller(request: SetPointRequest | None = None) -> LocalController:
    controller = LocalController(PLANT)
    if request is not None:
        controller.receive(request)
        controller.beat(0.0)
    return controller


def test_a_request_within_limits_is_followed() -> None:
    assert make_controller(SetPointRequest(34, 0.7)).step(0.0, 0.8e6) == (SetPointRequest(34, 0.7), None)


def test_without_a_request_the_plant_has_its_own_set_point_and_the_flow_of_the_load() -> None:
    assert make_controller().step(0.0, 0.9e6) == (SetPointRequest(32, 0.9), "no request")


def test_a_request_is_dropped_when_the_heartbeat_stops_and_does_not_come_back_with_it() -> None:
    controller = make_controller(SetPointRequest(30, 0.7))
    assert controller.step(300.0, 0.8e6)[0].supply_c == 30
    held, refusal = controller.step(301.0, 0.8e6)
    assert (held.flow_share, refusal) == (0.8, "the last heartbeat is 301 s old, more than 300 s")
    controller.beat(302.0)
    assert controller.step(302.0, 0.8e6)[1] == "no request"


def test_an_operator_takes_over_at_any_time() -> None:
    controller = make_controller(SetPointRequest(30, 0.7))
    controller.is_operator_in_charge = True
    assert controller.step(1.0, 0.8e6) == (SetPointRequest(32, 0.8), "an operator has taken over")


def test_many_small_requests_rise_no_faster_than_one() -> None:
    controller = make_controller()
    for second in range(0, 3600, 60):
        controller.receive(SetPointRequest(min(45.0, controller.supply_c + 1.5), 0.8))
        controller.beat(second)
        controller.step(second, 0.8e6)
    assert controller.supply_c <= 34
    assert controller.refusals["step too large"] > 0


def test_a_flow_that_racks_cannot_bear_is_raised_by_the_controller() -> None:
    held, _ = make_controller(SetPointRequest(32, 0.4)).step(0.0, 1e6)
    assert held.flow_share == pytest.approx(PLANT.rack_range_k / PLANT.max_rack_rise_k)


def test_the_loop_saves_energy_without_throttling_though_it_knows_no_later_hour() -> None:
    loop = run_closed_loop(PLANT, IT_W, WET_C, WET_C)
    assert loop.advice.saved_share > 0.2
    assert not loop.advice.advised.is_throttled.any()
    assert (loop.num_requests, loop.num_local_hours, loop.refusals) == (len(HOURS) - 1, 1, {})


def test_in_outages_the_plant_returns_to_its_own_set_point() -> None:
    outages = LoopOutages(frozenset(range(100, 130)), frozenset(range(200, 210)))
    loop = run_closed_loop(PLANT, IT_W, WET_C, WET_C, outages)
    assert loop.num_local_hours == 1 + 30 + 10
    assert loop.advice.supply_c[[125, 209]].tolist() == [32, 32]
    assert loop.refusals == {"no heartbeat": 1, "an operator has taken over": 10}
    assert np.all(np.diff(loop.advice.supply_c) <= 2)
