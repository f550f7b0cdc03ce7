"""Days, device-hours, money and the share of the peak rate, by hand."""

import pytest

from phalanx.cluster.description import Prices
from phalanx.plan.budget import budget, mfu, run_seconds, transformer_flops
from phalanx.plan.energy import Energy


def test_a_budget_takes_whole_steps() -> None:
    assert run_seconds(1001, 100, 2.0) == 22.0
    assert budget(1001, 100, 2.0, devices=1).steps == 11


def test_time_that_is_not_productive_is_added() -> None:
    assert run_seconds(1000, 100, 2.0, goodput=0.5) == 40.0


def test_days_and_device_hours_follow_from_the_step() -> None:
    found = budget(1e9, 1e6, 86.4, devices=16)
    assert found.days == pytest.approx(1.0)
    assert found.device_hours == pytest.approx(16 * 24)


def test_rent_and_energy_have_their_own_prices() -> None:
    prices = Prices(device_hour=2.5, kwh=0.2)
    found = budget(1000, 100, 360.0, devices=8, prices=prices, energy=Energy(5.0, 8.0, 10.0, 8000.0))
    assert found.rent == pytest.approx(8 * 2.5)
    assert found.energy == pytest.approx(2.0)


def test_what_has_no_price_costs_nobody_knows_what() -> None:
    found = budget(1000, 100, 1.0, devices=1)
    assert (found.rent, found.energy) == (None, None)


@pytest.mark.parametrize("changes", [{"units": 0}, {"batch": 0}, {"step_seconds": -1.0}, {"goodput": 1.5}], ids=str)
def test_numbers_that_cannot_be_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        run_seconds(**({"units": 10, "batch": 1, "step_seconds": 1.0} | changes))


def test_mfu_is_the_share_of_what_all_devices_could_do() -> None:
    assert mfu(4e15, 2.0, 10, {"bf16": 400.0}, "bf16") == pytest.approx(0.5)


def test_mfu_needs_a_peak_rate() -> None:
    with pytest.raises(ValueError, match="no peak rate for fp8; known: bf16"):
        mfu(1.0, 1.0, 1, {"bf16": 400.0}, "fp8")


def test_a_transformers_flops_are_palms_formula() -> None:
    # GPT-3's 175B, 96 layers of 12288, sequence 2048: attention adds 2.8 %
    assert transformer_flops(174.6e9, 96, 12288, 2048, 1) == pytest.approx(1.0766e12, rel=1e-3)
    half = transformer_flops(0, 96, 12288, 2048, 1, causal=True)
    assert half == transformer_flops(0, 96, 12288, 2048, 1) / 2
