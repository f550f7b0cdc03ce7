"""The cooling plant: each part by its law, and energy in balance."""

import numpy as np
import pytest
from pydantic import ValidationError

from phalanx.errors import DataError, UsageError
from phalanx_fleet.simulate.site_series import read_weather
from phalanx_fleet.thermal.cooling_tower import (
    WATER_J_PER_KG_K,
    find_air_share,
    find_approach,
    find_saturated_enthalpy,
    find_wet_bulb,
)
from phalanx_fleet.thermal.plant import PlantControls, PlantHours, simulate_plant
from phalanx_fleet.thermal.plant_settings import CoolingPlant

HOURS = 48
WET_C = 14 + 9 * np.sin(np.arange(HOURS) / 24 * 2 * np.pi)
DRY_C = WET_C + 6


def run(plant: CoolingPlant, share: float = 0.8, supply_c: float | None = None, flow: float = 1.0) -> PlantHours:
    it_w = np.full(HOURS, share * plant.design_it)
    return simulate_plant(
        plant, it_w, DRY_C, WET_C, PlantControls(plant.supply_c if supply_c is None else supply_c, flow)
    )


@pytest.mark.parametrize("kind", ["tower", "dry_cooler"])
@pytest.mark.parametrize("chiller", [True, False])
@pytest.mark.parametrize("supply_c", [16.0, 24.0, 40.0])
def test_energy_is_in_balance_at_every_hour(kind: str, chiller: bool, supply_c: float) -> None:
    plant = CoolingPlant(design_it="2 MW", heat_rejection=kind, trim_chiller=chiller)
    hours = run(plant, supply_c=supply_c)
    assert hours.balance_error.max() <= 1e-9
    assert hours.pue > 1
    # all electric power leaves through the water, but for the fans that blow it away
    assert hours.rejected_w + hours.fans_w == pytest.approx(hours.site_w, rel=1e-12)


def test_the_cdu_has_its_approach_at_design_and_less_at_part_load() -> None:
    plant = CoolingPlant(design_it="1 MW", leakage_per_k=0.0)
    full, part = run(plant, 1.0), run(plant, 0.5)
    pump_share = plant.pump_power_w("rack", np.array([1.0]))[0] / (plant.design_it * plant.liquid_share)
    assert full.rack_supply_c - full.supply_c == pytest.approx(4.0 * (1 + pump_share), abs=0.3)
    assert np.all(part.rack_supply_c - part.supply_c < 2.2)
    assert full.rack_return_c - full.rack_supply_c == pytest.approx(10.0, abs=0.2)


def test_a_tower_has_its_design_approach_and_air_and_water_exchange_the_same_heat() -> None:
    plant = CoolingPlant(design_it="1 MW")
    heat, range_k = np.array([plant.tower_heat_j_per_kg]), np.array([10.0])
    found = find_approach(heat, range_k, np.array([24.0]), plant.tower_calibration)
    assert found == pytest.approx([4.0], abs=1e-9)
    colder_day = find_approach(heat, range_k, np.array([10.0]), plant.tower_calibration)
    assert colder_day > found  # cold air holds less water
    air = find_air_share(heat * 0.6, range_k, np.array([24.0]), np.array([4.0]), plant.tower_calibration, 0.2)
    assert 0.3 < air[0] < 0.7
    again = find_approach(heat * 0.6, range_k, np.array([24.0]), plant.tower_calibration, air)
    assert again == pytest.approx([4.0], abs=0.02)


def test_no_water_is_colder_than_the_wet_bulb_and_no_air_hotter_than_the_water() -> None:
    rng = np.random.default_rng(0)
    heat, range_k, wet = rng.uniform(5e3, 6e4, 300), rng.uniform(2, 15, 300), rng.uniform(-5, 30, 300)
    approach = find_approach(heat, range_k, wet, 2.0)
    assert np.all(approach > 0)
    leaving = find_saturated_enthalpy(wet) + heat
    assert np.all(leaving <= find_saturated_enthalpy(wet + approach + range_k) * (1 + 1e-9))
    assert heat / (WATER_J_PER_KG_K * range_k) == pytest.approx(heat / range_k / 4186.0)


def test_without_a_chiller_the_supply_rises_and_with_one_it_does_not() -> None:
    free = run(CoolingPlant(design_it="1 MW", trim_chiller=False), supply_c=20.0)
    chilled = run(CoolingPlant(design_it="1 MW"), supply_c=20.0)
    warm = free.supply_c > 20.001
    assert np.count_nonzero(warm) > 10
    assert chilled.supply_c == pytest.approx(20.0)
    assert np.array_equal(chilled.chiller_w > 0, warm)
    assert free.chiller_w.max() == 0


def test_pumps_follow_the_flow_and_cores_follow_the_coolant() -> None:
    plant = CoolingPlant(design_it="1 MW", static_head_share=0.0, leakage_per_k=0.0)
    full, half = run(plant), run(plant, flow=0.5)
    assert half.pumps_w / full.pumps_w == pytest.approx(1 / 8)
    assert half.core_c.min() > full.core_c.max()
    assert run(plant, supply_c=40.0).core_c - run(plant, supply_c=32.0).core_c == pytest.approx(8.0)


def test_leakage_makes_warm_coolant_cost_power() -> None:
    plant = CoolingPlant(design_it="1 MW")
    assert run(plant, supply_c=42.0).it_w == pytest.approx(run(plant).it_w * 1.004)


def test_make_up_water_replaces_what_evaporates_and_is_drained() -> None:
    hours = run(CoolingPlant(design_it="1 MW", concentration_cycles=4.0))
    assert hours.makeup_kg_per_s == pytest.approx(hours.evaporation_kg_per_s * 4 / 3)
    assert 1.5 < hours.wue_l_per_kwh < 1.9
    assert run(CoolingPlant(design_it="1 MW", heat_rejection="dry_cooler")).wue_l_per_kwh == 0


@pytest.mark.parametrize(
    ("design", "problem"),
    [
        ({"design_it": 10_000}, "expected a power with its unit"),
        ({"design_it": "0 W"}, "design_it: found 0 W, expected the most power of IT"),
        ({"design_it": "1 MW", "supply_c": 46}, "supply_c: 46 C is above max_supply_c, 45 C"),
    ],
)
def test_a_plant_that_cannot_be_is_refused(design: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        CoolingPlant.model_validate(design)


def test_the_wet_bulb_is_that_of_the_tables() -> None:
    # ASHRAE's chart at sea level: 30 C and 50 % have a wet bulb of 22.0 C; saturated air has its own temperature
    assert find_wet_bulb(np.array([30.0, 20.0]), np.array([0.5, 1.0])) == pytest.approx([22.0, 20.0], abs=0.1)


def test_weather_takes_humidity_for_a_wet_bulb_and_leaves_out_gaps(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "weather.csv"
    path.write_text("time,site,dry_bulb_c,relative_humidity_pct\n0,a,30,50\n1,a,,50\n2,b,20,100\n")
    found = read_weather(path, {}, "a")
    assert found.times == ["0"]
    assert found.wet_bulb_c == pytest.approx([22.0], abs=0.1)
    with pytest.raises(DataError, match="no hour of site c; sites are a, b"):
        read_weather(path, {}, "c")
    with pytest.raises(UsageError, match="no column temperature, found time"):
        read_weather(path, {"dry_bulb_c": "temperature"})
    path.write_text("time,dry_bulb_c,wet_bulb_c\n0,303,20\n")
    with pytest.raises(DataError, match="csv:2: dry_bulb_c '303'"):
        read_weather(path, {})
    path.write_text("time,dry_bulb_c,wet_bulb_c\n0,15,20\n")
    with pytest.raises(DataError, match="csv:2: wet_bulb_c 20 is above dry_bulb_c 15"):
        read_weather(path, {})
    path.write_text("time,dry_bulb_c,relative_humidity_pct\n0,20,0.5\n1,20,0.5\n")
    with pytest.raises(DataError, match=r"relative_humidity_pct is 0\.5 at most; expected percent"):
        read_weather(path, {})
