"""Thermal constants of kinds are found again in series that were made with them."""

from dataclasses import replace

import numpy as np
import pytest

from fake_heat import MAX_POWER_W, R_K_PER_W, T0_C, make_hours
from phalanx.errors import DataError
from phalanx.fleet.thermal.device_series import DAY_S, DeviceSeries, average_steady
from phalanx.fleet.thermal.fit import fit_thermal_model
from phalanx.fleet.thermal.steady_fit import fit_steady, follow_inlet
from phalanx.fleet.thermal.step_fit import fit_steps, predict_rise


def make_steps(seed: int = 0, rise_k: float = 0.0) -> DeviceSeries:
    """A device with two poles (.03 K/W in 2 s, .015 K/W in 14 s), of which a sample is taken every 5 seconds."""
    rng = np.random.default_rng(seed)
    power = np.repeat(rng.choice([150.0, 400.0, 700.0], 80), 10)
    fast = slow = power[0]
    temperature = []
    for each in power:
        fast += (each - fast) * (1 - np.exp(-5 / 2))
        slow += (each - slow) * (1 - np.exp(-5 / 14))
        temperature.append(35 + rise_k + 0.03 * fast + 0.015 * slow)
    missing = np.full(len(power), np.nan)
    time = np.arange(len(power)) * 5.0
    return DeviceSeries("n1", str(seed), "GPU", time, power, np.array(temperature), missing, missing, missing)


def test_fit_finds_the_constants_of_a_kind() -> None:
    found = fit_steady([make_hours(seed=1), make_hours(seed=2, device="1")])
    assert found.r_k_per_w == pytest.approx(R_K_PER_W, rel=0.01)
    assert found.t0_c == pytest.approx(T0_C, abs=0.3)
    assert found.max_power_w == pytest.approx(MAX_POWER_W, rel=0.02)
    assert found.rmse_k < 1.2


def test_a_season_of_the_inlet_is_no_resistance() -> None:
    season = 8 * np.sin(np.arange(168 * 24) / (168 * 24) * np.pi)
    assert fit_steady([make_hours(168, inlet_rise_k=season)]).r_k_per_w == pytest.approx(R_K_PER_W, rel=0.05)


def test_hours_in_which_a_device_throttles_do_not_count() -> None:
    # the inlet floats, so that the power on the plateau does
    days = 60
    inlet = np.repeat(np.tile([0.0, 12.0], days // 2), 24)
    series = make_hours(days, extra_r_k_per_w=0.1, inlet_rise_k=inlet, limit_c=84.0)
    assert fit_steady([series]).r_k_per_w == pytest.approx(R_K_PER_W + 0.1, rel=0.08)


def test_one_device_that_fouls_does_not_change_its_kind() -> None:
    healthy = [make_hours(seed=seed, device=str(seed)) for seed in range(4)]
    found = fit_steady([*healthy, make_hours(seed=9, device="9", extra_r_k_per_w=0.1)])
    assert found.r_k_per_w == pytest.approx(R_K_PER_W, rel=0.02)


def test_a_device_at_rest_says_nothing_of_its_resistance() -> None:
    series = make_hours()
    idle = series.select(series.power_w < 100)
    with pytest.raises(DataError, match="power varies by less than 10 W"):
        fit_steady([idle])


def test_the_inlet_is_followed_from_the_days_before() -> None:
    rise = np.linspace(0, 10, 84 * 24)
    series = make_hours(84, inlet_rise_k=rise)
    errors = (series.temperature_c - follow_inlet(series, T0_C, R_K_PER_W) - R_K_PER_W * series.power_w)[48:]
    assert abs(errors.mean()) < 0.6  # half of what it rises in 7 days
    assert np.sqrt(np.mean(errors**2)) < 1.5


def test_minutes_are_averaged_to_hours_where_there_are_days() -> None:
    hours = make_hours(10)
    time = np.arange(10 * 24 * 60) * 60.0
    wide = {
        name: np.repeat(getattr(hours, name), 60)
        for name in ("power_w", "temperature_c", "inlet_c", "margin_k", "failed_fans")
    }
    found = average_steady(replace(hours, time_s=time, **wide))
    assert found.power_w == pytest.approx(hours.power_w)
    assert len(average_steady(replace(found.select(found.time_s < DAY_S))).time_s) == 24


def test_steps_find_both_poles() -> None:
    found = fit_steps([make_steps(0), make_steps(1, rise_k=5.0)])
    assert (found.tau_fast_s, found.tau_slow_s) == (2.0, 14.0)
    assert (found.r_fast_k_per_w, found.r_slow_k_per_w) == pytest.approx((0.03, 0.015), rel=0.01)
    series = make_steps(2)
    assert predict_rise(series, found) + 35 == pytest.approx(series.temperature_c, abs=0.1)


def test_a_kind_that_cannot_be_fitted_is_named() -> None:
    series = make_hours()
    idle = replace(series.select(series.power_w < 100), kind="idle GPU")
    model, problems = fit_thermal_model([series, idle])
    assert list(model.kinds) == ["GPU"]
    assert problems[0].startswith("idle GPU: power varies by less than")
