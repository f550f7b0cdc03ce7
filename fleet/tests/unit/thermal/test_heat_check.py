"""Each fault of cooling is found and named, and a healthy device has none."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fake_heat import MODEL, find_hours_from, make_hours
from phalanx_fleet.thermal.device_series import DAY_S, DeviceSeries
from phalanx_fleet.thermal.heat_check import HeatCause, check_heat

DAYS = 42


def find_causes(*series: DeviceSeries) -> dict[str, HeatCause]:
    return {f"{each.node} {each.device}": each.cause for each in check_heat(series, MODEL).findings}


def make_throttling() -> DeviceSeries:
    """Fouled, below an inlet that is warm every other day: pinned at its limit."""
    inlet = np.repeat(np.tile([0.0, 10.0], DAYS // 2), 24)
    return make_hours(DAYS, extra_r_k_per_w=0.08, inlet_rise_k=inlet, limit_c=84.0)


@pytest.mark.parametrize("seed", range(5))
def test_healthy_devices_have_no_finding(seed: int) -> None:
    drift = np.linspace(-3, 4, DAYS * 24)
    assert find_causes(make_hours(DAYS, seed), make_hours(DAYS, seed, device="1", inlet_rise_k=drift)) == {}


def test_a_device_that_throttles_is_found_without_a_data_sheet() -> None:
    series = make_throttling()
    (finding,) = check_heat([series], MODEL).findings
    assert finding.cause is HeatCause.THROTTLING
    assert finding.loses_speed
    assert finding.text.startswith("is pinned at 84 °C")


def test_a_margin_of_zero_is_throttling_and_a_margin_rules_it_out() -> None:
    series = make_hours(DAYS)
    busy = series.power_w > 300
    hot = replace(series, margin_k=np.where(busy, 0.0, 30.0))
    assert find_causes(hot) == {"n1 0": HeatCause.THROTTLING}
    pinned = make_throttling()
    free = replace(pinned, margin_k=np.full(len(pinned.time_s), 8.0))
    assert HeatCause.THROTTLING not in find_causes(free).values()


def test_a_throttling_device_that_has_been_at_rest_since_is_found() -> None:
    series = make_throttling()
    rest = series.time_s > 25 * DAY_S
    series = replace(
        series,
        power_w=np.where(rest, 60.0, series.power_w),
        temperature_c=np.where(rest, 38.0, series.temperature_c),
    )
    (finding,) = check_heat([series], MODEL).findings
    assert finding.cause is HeatCause.THROTTLING
    assert not finding.loses_speed
    assert "it has had no load since, for 17 days" in finding.text


@pytest.mark.parametrize("is_repaired", [False, True])
def test_fouling_of_the_weeks_before_is_found_until_a_load_shows_that_it_is_repaired(is_repaired: bool) -> None:
    fouled = make_throttling()
    newest = fouled.time_s > (DAYS - 8) * DAY_S
    clean = make_hours(DAYS)
    light = np.minimum(clean.power_w, 220.0)
    now = clean if is_repaired else replace(clean, power_w=light, temperature_c=28.0 + 0.18 * light)
    series = replace(
        fouled,
        power_w=np.where(newest, now.power_w, fouled.power_w),
        temperature_c=np.where(newest, now.temperature_c, fouled.temperature_c),
    )
    findings = check_heat([series], MODEL).findings
    assert [each.cause for each in findings] == ([] if is_repaired else [HeatCause.FOULING])


def test_a_few_hours_of_load_in_the_newest_week_do_not_hide_a_fault_of_the_week_before() -> None:
    series = make_hours(DAYS, extra_r_k_per_w=find_hours_from(DAYS, DAYS - 10) * 0.05)
    rest = series.time_s > (DAYS - 6) * DAY_S
    few = np.flatnonzero(~rest & (series.time_s > (DAYS - 7) * DAY_S) & (series.power_w > 150))[3:]
    rest[few] = True
    series = replace(
        series,
        power_w=np.where(rest, 30.0, series.power_w),
        temperature_c=np.where(rest, 32.0, series.temperature_c),
    )
    assert find_causes(series) == {"n1 0": HeatCause.LOST_COOLING}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"extra_r_k_per_w": find_hours_from(DAYS, 38) * 0.05}, HeatCause.LOST_COOLING),  # a rise within a day
        ({"extra_r_k_per_w": np.linspace(0, 0.05, DAYS * 24)}, HeatCause.FOULING),
        ({"inlet_rise_k": find_hours_from(DAYS, 30) * 11}, HeatCause.WARM_INLET),
        # also at rest, and within its newest 7 days the slope is still near that of the kind
        *(({"extra_r_k_per_w": find_hours_from(DAYS, day) * 0.09}, HeatCause.LOST_COOLING) for day in (39.5, 40, 40.5)),
    ],
)
def test_a_change_of_resistance_or_inlet_has_its_cause(change: dict[str, Any], cause: HeatCause) -> None:
    assert find_causes(make_hours(DAYS, **change)) == {"n1 0": cause}


def test_one_hot_device_of_a_node_has_a_dry_plate() -> None:
    dry = find_hours_from(DAYS, 38) * 0.05
    others = [make_hours(DAYS, seed, device=str(seed)) for seed in (1, 2, 3)]
    assert find_causes(make_hours(DAYS, extra_r_k_per_w=dry), *others) == {"n1 0": HeatCause.DRY_PLATE}


def test_a_measured_inlet_decides() -> None:
    rise = find_hours_from(DAYS, 38) * 12
    series = make_hours(DAYS, inlet_rise_k=rise)
    busy = series.select(series.power_w > 300)  # no slope without samples at rest
    measured = replace(busy, inlet_c=22 + find_hours_from(DAYS, 38)[series.power_w > 300] * 12)
    assert find_causes(measured) == {"n1 0": HeatCause.WARM_INLET}


def test_a_fan_that_reports_its_failure_is_found_before_it_is_hot() -> None:
    series = make_hours(DAYS)
    fans = np.zeros(len(series.time_s))
    fans[-2:] = 1
    assert find_causes(replace(series, failed_fans=fans)) == {"n1 0": HeatCause.FAILED_FAN}
    fans[-1] = 0  # replaced
    assert find_causes(replace(series, failed_fans=fans)) == {}


def test_a_kind_that_the_model_does_not_have_is_a_problem() -> None:
    check = check_heat([replace(make_hours(DAYS), kind="TPU")], MODEL)
    assert check.problems == ["n1 0: the model has no kind 'TPU' (it has GPU)"]
    assert not check.devices
