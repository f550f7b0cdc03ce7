"""The site of a simulation: a plant with weather, prices and carbon by hour, aligned on UTC, in balance."""

import re
from pathlib import Path

import numpy as np
import pytest

from phalanx.errors import DataError, PhalanxError, UsageError
from phalanx.recipe.yaml_loader import parse_yaml
from phalanx_fleet.fleet_file import FleetFile
from phalanx_fleet.power_tree import NodePower, build_power_tree
from phalanx_fleet.simulate.figures import compare_variants
from phalanx_fleet.simulate.page import render_simulation_html
from phalanx_fleet.simulate.power_model import find_cap_speed, slow_down
from phalanx_fleet.simulate.site_series import PRICE_COLUMNS, align_hours, read_hourly_column
from phalanx_fleet.simulate.variants import simulate_variants
from phalanx_fleet.site_settings import HourlyFile

FLEET = """
sites: {s: {budget: 60 kW}}
feeds: {f: {site: s}}
rows: {w: {feed: f}}
racks: {"r[1-2]": {row: w, node_type: h100, nodes: 2}}
node_types: {h100: {node: dgx-h100}}
simulate:
  days: 3
  seeds: 1
  jobs: {a: {count: 1, devices: {16: 1}, median_h: 1000, activity: 1}, b: {per_day: 20, devices: {8: 1}}}
  failures: {gpu: {per_1000_node_days: 60, repair_h: 5}}
  site: {plant: {design_it: 45 kW}, weather: hours.csv}
"""
POWER = NodePower(8, 700, 75, 4600, 2300)
HOURS = 80


def write_hours(path: Path) -> None:
    dry_bulb_c = [24 + 8 * np.sin(hour / 4) for hour in range(HOURS)]
    rows = [
        f"2023-07-{1 + hour // 24:02d}T{hour % 24:02d}:00,{dry_c:.2f},{min(20, dry_c):.2f},{hour},{10 * hour}"
        for hour, dry_c in enumerate(dry_bulb_c)
    ]
    head = "time,dry_bulb_c,wet_bulb_c,price_per_mwh,carbon_g_per_kwh"
    path.write_text("\n".join([head, *rows]))


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    write_hours(tmp_path / "hours.csv")
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    return path


def test_the_plant_is_in_balance_at_every_hour_and_its_pue_is_energy_over_energy(fleet: Path) -> None:
    (variant,) = simulate_variants(fleet, [], None, 2)
    for result in variant.results:
        assert result.site.balance_error <= 1e-9
    site, hours = variant.results[0].site, variant.results[0].hours
    assert hours is not None
    assert len(hours.it_w) == 72
    assert site.pue == pytest.approx((hours.site_w * hours.duration_h).sum() / (hours.it_w * hours.duration_h).sum())
    assert 1.02 < site.pue < 1.2
    assert site.wue_l_per_kwh == pytest.approx(site.water_l / (hours.it_w.sum() / 1000))
    assert variant.results[1].hours is None


def test_a_last_part_of_an_hour_counts_by_its_length(fleet: Path) -> None:
    (variant,) = simulate_variants(fleet, ["days=0.3"], None, 1)[1:]
    hours = variant.results[0].hours
    assert hours is not None
    assert hours.duration_h.tolist() == pytest.approx([1] * 7 + [0.2])
    assert variant.results[0].site.balance_error <= 1e-9


def test_warmer_water_needs_less_cooling_and_brings_cores_nearer_to_their_limit(fleet: Path) -> None:
    base, warm, hot = simulate_variants(fleet, ["site.plant.supply_c=35", "site.plant.supply_c=45"], None, 1)
    assert warm.results[0].site.cooling_energy_kwh < base.results[0].site.cooling_energy_kwh
    assert warm.results[0].site.core_max_c == pytest.approx(base.results[0].site.core_max_c + 3, abs=0.2)
    assert base.results[0].site.throttled_hours == 0
    assert hot.results[0].site.throttled_hours > 0


def test_throttling_delays_jobs_and_lowers_power_in_its_hours(fleet: Path) -> None:
    base, hot = simulate_variants(
        fleet, ["site.plant.supply_c=48 site.plant.max_supply_c=50 jobs.b.activity=1"], None, 3
    )
    for cool, warm in zip(base.results, hot.results, strict=True):
        assert warm.completion_mean_s > 1.05 * cool.completion_mean_s
        assert warm.shares["productive"] < cool.shares["productive"]
        assert warm.ettr < cool.ettr
        assert sum(warm.shares.values()) == pytest.approx(1, abs=1e-9)
        assert warm.shares["throttled"] > 0.05
        assert cool.shares["throttled"] == 0
        assert warm.it_mean_w < 0.95 * cool.it_mean_w


def test_jobs_are_slower_only_in_hours_with_throttling(fleet: Path) -> None:
    what = "site.plant.trim_chiller=false site.plant.heat_rejection=dry_cooler site.plant.supply_c=30"
    _, variant = simulate_variants(
        fleet, [f"{what} site.plant.dry_approach_k=14 days=2 failures={{}} jobs.b.activity=1"], None, 1
    )
    result = variant.results[0]
    assert result.hours is not None
    is_hot = result.hours.allowed_power < 1
    assert 4 < np.count_nonzero(is_hot) < 44
    allowed_w = result.hours.allowed_power * POWER.device_max_w
    speeds = np.minimum((allowed_w - POWER.device_idle_w) / (POWER.device_max_w - POWER.device_idle_w), 1) ** 0.4
    lost = float(((1 - speeds) * result.hours.busy_devices).sum()) / (48 * result.hours.num_devices)
    assert result.shares["throttled"] == pytest.approx(lost, rel=0.2)
    assert result.site.throttled_hours == np.count_nonzero(is_hot)


def test_accelerators_draw_what_their_coolant_allows(fleet: Path) -> None:
    """One job on all nodes: the energy of each hour follows from the power that is allowed."""
    what = (
        "site.plant.supply_c=48 site.plant.max_supply_c=50 site.plant.leakage_per_k=0 "
        "failures={} jobs.b.per_day=0 jobs.a.devices='{32: 1}'"
    )
    _, variant = simulate_variants(fleet, [f"{what} jobs.a.checkpoint.restart_s=0"], None, 1)
    hours = variant.results[0].hours
    assert hours is not None
    node_w = 8 * hours.allowed_power * POWER.device_max_w + POWER.rest_max_w
    assert hours.it_w[5:70] == pytest.approx(4 * node_w[5:70], rel=2e-3)


def test_a_power_cap_keeps_hot_devices_from_throttling(fleet: Path) -> None:
    _, hot, capped = simulate_variants(
        fleet, ["site.plant.supply_c=45", "site.plant.supply_c=45 power_cap=0.7"], None, 1
    )
    assert hot.results[0].site.throttled_device_hours > 0
    assert capped.results[0].site.throttled_device_hours == 0
    assert capped.results[0].cap_speed < 1


def test_more_power_than_the_plant_is_built_for_is_said(fleet: Path) -> None:
    base, small = simulate_variants(fleet, ["site.plant.design_it='20 kW'"], None, 1)
    assert base.results[0].site.hours_above_design == 0
    assert small.results[0].site.hours_above_design > 60
    (problem,) = compare_variants([base, small]).problems
    assert "the plant is built for 20 kW" in problem


def test_without_a_chiller_hours_above_the_supply_limit_are_counted(fleet: Path) -> None:
    what = "site.plant.trim_chiller=false site.plant.supply_c=24 site.supply_limit_c=26"
    _, variant = simulate_variants(fleet, [what], None, 1)
    site, hours = variant.results[0].site, variant.results[0].hours
    assert hours is not None
    assert site.hours_above_supply == np.count_nonzero(hours.supply_c > 26.05) > 0


def test_hourly_price_and_carbon_are_multiplied_hour_by_hour(fleet: Path) -> None:
    what = "site.price_per_kwh=hours.csv site.carbon_g_per_kwh=hours.csv site.start=2023-07-01T05"
    _, variant = simulate_variants(fleet, [what], None, 1)
    hours = variant.results[0].hours
    assert hours is not None
    assert hours.price_per_kwh[:2] == pytest.approx([5e-3, 6e-3])
    assert variant.results[0].site.energy_cost == pytest.approx((hours.site_kwh * np.arange(5, 77) / 1000).sum())
    assert variant.results[0].site.carbon_kg == pytest.approx((hours.site_kwh * np.arange(5, 77) / 100).sum())


def test_devices_by_hour_are_busy_idle_or_down(fleet: Path) -> None:
    (variant,) = simulate_variants(fleet, [], None, 1)
    result, hours = variant.results[0], variant.results[0].hours
    assert hours is not None
    busy = hours.busy_devices.sum() / (72 * hours.num_devices)
    used = sum(result.shares[state] for state in ("productive", "blocked", "wasted", "unavailable"))
    assert busy == pytest.approx(used, abs=1e-9)
    assert hours.down_devices.sum() / (72 * hours.num_devices) == pytest.approx(result.shares["repair"], abs=1e-9)
    assert np.all(hours.waiting_jobs > -1e-9)


def test_racks_that_are_added_by_their_key_exceed_the_budget_until_capped(fleet: Path) -> None:
    more = "racks.r[3-4]='{row: w, node_type: h100, nodes: 1}'"
    base, over, capped = simulate_variants(fleet, [more, f"{more} power_cap=0.9"], None, 1)
    assert (base.num_nodes, over.num_nodes) == (4, 6)
    assert [each.level.label for each in over.exceeded] == ["site s"]
    assert capped.exceeded == []  # 6 x (8 x 630 + 4600) W
    assert compare_variants([base, over]).problems[0].startswith("racks.r[3-4]")


def test_nodes_of_another_kind_stand_idle_while_a_trace_is_replayed(fleet: Path, tmp_path: Path) -> None:
    fleet.write_text(
        FLEET.replace("racks: {", "racks: {r9: {row: w, node_type: a100, nodes: 1}, ").replace(
            "node_types: {", "node_types: {a100: {node: dgx-a100}, "
        )
    )
    (tmp_path / "jobs.csv").write_text("submit_s,gpus,duration_s\n0,8,20000\n10,8,500\n")
    (variant,) = simulate_variants(fleet, [], tmp_path / "jobs.csv", 1)
    hours = variant.results[0].hours
    assert hours is not None
    assert hours.num_devices == 40
    assert hours.duration_h.sum() * 3600 == pytest.approx(variant.results[0].makespan_s)


def test_a_stated_speed_curve_replaces_the_law() -> None:
    assert find_cap_speed(POWER, 1.0, 0.8) == slow_down(POWER, 1.0, 0.8)
    curve = {0.6: 0.8, 0.8: 0.96, 1.0: 1.0}
    assert find_cap_speed(POWER, 1.0, 0.7, curve) == pytest.approx(0.88)
    below = slow_down(POWER, 1.0, 0.3) / slow_down(POWER, 1.0, 0.6)
    assert find_cap_speed(POWER, 1.0, 0.3, curve) == pytest.approx(0.8 * below)
    assert find_cap_speed(POWER, 1.0, 0.6, {0.6: 0.8}) == pytest.approx(0.8)
    assert find_cap_speed(POWER, 1.0, 0.8, {0.6: 0.8}) == pytest.approx(0.9)


def test_a_year_is_repeated_in_whole_days_and_a_month_is_not() -> None:
    year = align_hours(Path("y"), [str(3600.0 * hour) for hour in range(8760)], np.arange(8760.0)[None])
    assert year.select(8759, 2)[0].tolist() == [8759, 0]
    month = align_hours(Path("m"), [str(3600.0 * hour) for hour in range(720)], np.arange(720.0)[None])
    with pytest.raises(DataError, match="has 720 hours from 1970-01-01T00:00Z on; the simulation needs 24"):
        month.select(700, 24)


@pytest.mark.parametrize(("days", "repeated"), [(366, 366), (540, 365), (900, 730)])
def test_years_are_repeated_so_that_the_season_stays(days: int, repeated: int) -> None:
    hours = np.arange(24.0 * days)
    series = align_hours(Path("y"), [str(3600 * hour) for hour in hours], hours[None])
    day = 24 * days
    assert series.select(day - 1, 2)[0].tolist() == [day - 1, (24 * days) % (24 * repeated)]
    assert series.select(-24, 1)[0].tolist() == [24 * (repeated - 1)]


def test_a_missing_hour_has_the_value_before_and_offsets_are_followed(tmp_path: Path) -> None:
    times = [f"2023-01-01T{hour:02d}:00+02:00" for hour in range(24) if hour != 5]
    series = align_hours(Path("x"), times, np.arange(23.0)[None])
    assert series.num_filled == 1
    assert series.columns[0, 4:7].tolist() == [4, 4, 5]
    assert series.first_hour % 24 == 22
    assert align_hours(Path("x"), ["2023-01-01T05Z"], np.zeros((1, 1))).first_hour % 24 == 5


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("2023-10-29T01:00,1\n2023-10-29T02:00,1\n2023-10-29T02:00,2", "02:00Z is there twice. Local time with day"),
        ("2023-10-29T01:30,1", "expected whole hours of UTC"),
        ("yesterday,1", "expected an ISO 8601 time"),
        ("2023-10-29T01:00,cheap", "h.csv:2: price_per_kwh 'cheap': expected a number"),
        ("2023-10-29T01:00,1\n2023-11-29T01:00,1", "hours are missing"),
        ("", "no hour with a value"),
        ("1782864000000,1\n1782867600000,1", "time '1782864000000': expected a time from 1970 on, .* not milliseconds"),
        ("0001-01-01T00:00+14:00,1", "expected a time from 1970 on"),
    ],
)
def test_a_wrong_hourly_file_is_refused(tmp_path: Path, rows: str, message: str) -> None:
    (tmp_path / "h.csv").write_text(f"time,price_per_kwh\n{rows}\n")
    with pytest.raises(DataError, match=message):
        read_hourly_column(HourlyFile(file="h.csv"), tmp_path, {"price_per_kwh": 1.0})


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("site.pue=1.1", "pue: is computed by the plant"),
        ("site.weather=null", "plant needs weather"),
        ("site.plant=null", "no plant; add"),
        ("site.weather=nowhere.csv", "simulate.site.weather: .*nowhere.csv: no such file; expected a CSV file"),
        ("site.price_per_kwh='{file: hours.csv, columns: {time: when}}'", "no column when, found time, dry"),
        ("site.start=summer", "start: found summer, expected a time"),
        ("days=30", "has 80 hours"),
        ("spares=0.1 spares=0.2", "simulate.spares is there twice; variants of one setting are a --what each"),
        ("site.price_per_kwh=-1", "found -1"),
        (
            "'site.plant.design_it=1 W'",
            "the plant is built for 1 W, and nodes draw up to .* W; expected the most power",
        ),
        (
            "'site.plant={design_it: 600 kW, heat_rejection: dry_cooler, pump_efficiency: 0.001, static_head_share: 1, "
            "rack_range_k: 0.01, core_limit_c: 40}'",
            "simulate.site: the energy of the site is off by .* of it in an hour, so no figure is given",
        ),
    ],
)
def test_a_site_that_cannot_be_simulated_is_refused(fleet: Path, what: str, message: str) -> None:
    with pytest.raises(PhalanxError, match=message):
        simulate_variants(fleet, [what], None, 1)


def test_a_plant_that_is_in_cooling_is_changed_there(fleet: Path) -> None:
    text = fleet.read_text().replace("plant: {design_it: 45 kW}, ", "")
    fleet.write_text(text + "cooling: {design_it: 45 kW}\n")
    with pytest.raises(PhalanxError, match=r"the plant of this fleet is in `cooling`; expected cooling.supply_c=35"):
        simulate_variants(fleet, ["site.plant.supply_c=35"], None, 1)
    variants = ["cooling.supply_c=35", "'site.plant={design_it: 45 kW, supply_c: 35}'"]
    by_key, whole = simulate_variants(fleet, variants, None, 1)[1:]
    assert by_key.results == whole.results


def test_an_unknown_column_of_a_price_names_what_is_expected(fleet: Path, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("time,price\n2023-01-01,1\n")
    with pytest.raises(UsageError, match="no column price_per_kwh or price_per_mwh, found time, price"):
        simulate_variants(fleet, ["site.price_per_kwh=p.csv"], None, 1)


@pytest.mark.parametrize(
    ("header", "columns", "message"),
    [
        ("time,price_per_kwh,price_per_mwh", {}, "has price_per_kwh and price_per_mwh; remove one, or choose one by"),
        ("time,price_per_kwh,price_per_kwh", {}, "has the column price_per_kwh twice"),
        ("time,price_per_kwh,x", {"price_per_mwh": "cost"}, "no column cost, found time"),
        (
            "time,price_per_kwh,x",
            {"price": "x"},
            "columns: price: no such value; expected one of time, site, price_per",
        ),
        ("time;price_per_kwh;x", {}, "divided by ';'; expected commas"),
        ("time,price_per_kwh", {}, "h.csv:2: 3 values, expected 2 as in the header; numbers have points, not commas"),
        ("time,price_per_kwh,x,y", {}, "h.csv:2: 3 values, expected 4 as in the header"),
    ],
)
def test_columns_of_which_another_may_be_meant_are_refused(
    tmp_path: Path, header: str, columns: dict[str, str], message: str
) -> None:
    (tmp_path / "h.csv").write_text(f"{header}\n2023-01-01,1,2\n")
    with pytest.raises(PhalanxError, match=message):
        read_hourly_column(HourlyFile(file="h.csv", columns=columns), tmp_path, PRICE_COLUMNS)


def test_one_of_two_prices_is_chosen_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "h.csv").write_text("\ufefftime, price_per_kwh,price_per_mwh,\r\n 2023-01-01,1,50,\r\n")
    entry = HourlyFile(file="h.csv", columns={"price_per_mwh": "price_per_mwh"})
    assert read_hourly_column(entry, tmp_path, PRICE_COLUMNS).columns.tolist() == [[0.05]]


def test_the_steps_of_the_guide_make_a_fleet_file() -> None:
    page = (Path(__file__).parents[3] / "fleet/docs/how-to/model-your-fleet.md").read_text()
    value: dict[str, object] = {}
    for number, block in enumerate(re.findall(r"```yml\n(.*?)```", page, re.DOTALL)):
        step, _ = parse_yaml(block, f"step {number + 1}")
        simulate = {**value.get("simulate", {}), **step.pop("simulate", {})}  # type: ignore[dict-item]
        value |= {**step, **({"simulate": simulate} if simulate else {})}
        fleet = FleetFile.model_validate(value)
        build_power_tree(fleet, {})
    assert number == 4
    assert fleet.simulate is not None
    assert fleet.simulate.site.plant is not None


def test_the_page_has_time_lines_differences_and_the_comparison(fleet: Path) -> None:
    page = render_simulation_html(simulate_variants(fleet, ["site.plant.supply_c=35"], None, 2))
    for title in ("Accelerators", "Power of the site, kW", "PUE", "Supply temperature, °C", "Jobs that wait"):
        assert f"<h3>{title}</h3>" in page
    assert "<h3>Price" not in page  # a constant has no time line
    assert page.index("<h2>Differences</h2>") < page.index("<h2>Comparison</h2>")
    assert "Day 0 is 2023-07-01T00:00Z" in page
