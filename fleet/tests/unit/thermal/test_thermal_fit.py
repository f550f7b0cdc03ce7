"""Thermal constants of kinds are found again in series that were made with them."""

from dataclasses import replace

import numpy as np
import pytest

from fake_heat import MAX_POWER_W, R_K_PER_W, T0_C, make_hours
from phalanx.errors import DataError
from phalanx_fleet.thermal.device_series import DAY_S, DeviceSeries, average_steady
from phalanx_fleet.thermal.fit import fit_steady, fit_thermal_model
from phalanx_fleet.thermal.heat_check import HeatCause, check_heat, find_t0


def test_fit_finds_the_constants_of_a_kind() -> None:
    found = fit_steady([make_hours(seed=1), make_hours(seed=2, device="1")])
    assert found.r_k_per_w == pytest.approx(R_K_PER_W, rel=0.01)
    assert found.t0_c == pytest.approx(T0_C, abs=0.3)
    assert found.max_power_w == pytest.approx(MAX_POWER_W, rel=0.02)
    assert found.rmse_k < 1.2


def test_degrees_fahrenheit_are_refused() -> None:
    series = make_hours()
    with pytest.raises(DataError, match=r"without power a device would have 82 °C; expected core temperatures in °C"):
        fit_steady([replace(series, temperature_c=1.8 * series.temperature_c + 32)])


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


def test_a_kind_that_cannot_be_fitted_is_named() -> None:
    series = make_hours()
    idle = replace(series.select(series.power_w < 100), kind="idle GPU")
    model, problems = fit_thermal_model([series, idle])
    assert list(model.kinds) == ["GPU"]
    assert problems[0].startswith("idle GPU: power varies by less than")


def make_seasonal(seed: int, has_inlet: bool, days: int = 168) -> DeviceSeries:
    """A device whose inlet falls by 8 K over half a year, and is measured with an error of 0.5 K."""
    fall = -8.0 * np.arange(days * 24) / (days * 24)
    series = make_hours(days, seed=seed, device=str(seed), inlet_rise_k=fall)
    inlet = series.temperature_c - R_K_PER_W * series.power_w - 4.0  # other parts of the node add 4 K
    noise = np.random.default_rng(seed).normal(0, 0.5, len(inlet))
    return replace(series, inlet_c=inlet + noise if has_inlet else series.inlet_c)


def test_a_measured_inlet_gives_a_t0_that_holds_in_another_season() -> None:
    early = [make_seasonal(seed, True) for seed in (1, 2)]
    model, _ = fit_thermal_model([each.select(each.time_s < 84 * DAY_S) for each in early])
    kind = model.kinds["GPU"]
    assert kind.t0_over_inlet_k == pytest.approx(4.0, abs=0.1)
    assert kind.r_k_per_w == pytest.approx(R_K_PER_W, rel=0.01)
    late = early[0].select(early[0].time_s >= 140 * DAY_S)
    errors = late.temperature_c - find_t0(late, kind) - kind.r_k_per_w * late.power_w
    assert abs(float(np.mean(errors))) < 0.2
    fixed = late.temperature_c - kind.t0_c - kind.r_k_per_w * late.power_w
    assert float(np.mean(fixed)) < -4.0


def test_without_the_inlet_of_every_device_t0_stays_absolute() -> None:
    model, _ = fit_thermal_model([make_seasonal(1, True), make_seasonal(2, False)])
    assert model.kinds["GPU"].t0_over_inlet_k is None


def test_a_sample_without_an_inlet_has_the_t0_of_its_kind() -> None:
    series = make_seasonal(1, True)
    model, _ = fit_thermal_model([series])
    kind = model.kinds["GPU"]
    broken = replace(series, inlet_c=np.full(len(series.time_s), np.nan))
    assert set(find_t0(broken, kind)) == {kind.t0_c}


def test_a_check_by_the_inlet_finds_no_fault_in_a_season_and_names_a_warm_inlet() -> None:
    series = make_seasonal(1, True)
    model, _ = fit_thermal_model([series.select(series.time_s < 84 * DAY_S)])
    assert check_heat([series], model).findings == []
    warm = series.time_s >= series.time_s[-1] - 7 * DAY_S
    rise = np.where(warm, 10.0, 0.0)
    hot = replace(series, temperature_c=series.temperature_c + rise, inlet_c=series.inlet_c + rise)
    assert [each.cause for each in check_heat([hot], model).findings] == [HeatCause.WARM_INLET]
