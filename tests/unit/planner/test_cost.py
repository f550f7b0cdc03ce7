"""Steps, device-hours and money, by hand."""

import pytest

from phalanx.cluster.spec import Prices
from phalanx.planner.cost import estimate_run_cost, run_seconds
from phalanx.planner.energy import RunEnergy


def test_a_budget_takes_whole_steps() -> None:
    assert run_seconds(1001, 100, 2.0) == 22.0
    assert estimate_run_cost(1001, 100, 2.0, devices=1).steps == 11


def test_time_that_is_not_productive_is_added() -> None:
    assert run_seconds(1000, 100, 2.0, goodput=0.5) == 40.0


def test_seconds_and_device_hours_follow_from_the_step() -> None:
    found = estimate_run_cost(1e9, 1e6, 86.4, devices=16)
    assert found.wall_s == pytest.approx(86_400)
    assert found.device_hours == pytest.approx(16 * 24)


def test_rent_and_energy_have_their_own_prices() -> None:
    prices = Prices(device_hour=2.5, kwh=0.2)
    found = estimate_run_cost(1000, 100, 360.0, devices=8, prices=prices, energy=RunEnergy(5.0, 8.0, 10.0, 8000.0))
    assert found.rent_cost == pytest.approx(8 * 2.5)
    assert found.energy_cost == pytest.approx(2.0)


def test_what_has_no_price_costs_nobody_knows_what() -> None:
    found = estimate_run_cost(1000, 100, 1.0, devices=1)
    assert (found.rent_cost, found.energy_cost) == (None, None)


@pytest.mark.parametrize("changes", [{"num_units": 0}, {"batch": 0}, {"step_seconds": -1.0}, {"goodput": 1.5}], ids=str)
def test_numbers_that_cannot_be_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        run_seconds(**({"num_units": 10, "batch": 1, "step_seconds": 1.0} | changes))
