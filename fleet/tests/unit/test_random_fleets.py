"""Balances and bounds that hold for any fleet, on random ones: device time, power, caps and heat."""

import random

import numpy as np
import pytest

from phalanx_fleet.power.allocation import NodeCaps, PoweredJob, allocate_caps
from phalanx_fleet.power.committed_power import find_excesses
from phalanx_fleet.power.speed_curve import SpeedCurve, SweepPoint
from phalanx_fleet.power_tree import BudgetLevel, NodePower, PoweredNode, PowerTree
from phalanx_fleet.simulate.fleet_simulation import NodeTypeGroup, simulate_fleet
from phalanx_fleet.simulate.random_events import NodeHistory
from phalanx_fleet.simulation_settings import SimulationSettings
from phalanx_fleet.thermal.cooling_tower import find_wet_bulb
from phalanx_fleet.thermal.plant import PlantControls, simulate_plant
from phalanx_fleet.thermal.plant_settings import CoolingPlant

MARGIN = 0.02
POWER = NodePower(8, 700.0, 75.0, 4600.0, 2300.0)


@pytest.mark.parametrize("seed", range(40))
def test_device_time_and_power_of_a_simulation_are_within_their_bounds(seed: int) -> None:
    source = random.Random(seed)
    num_nodes = source.randint(2, 10)
    saves = {"mode": source.choice(["sync", "async"]), "save_s": source.uniform(0, 600), "restart_s": 300}
    settings = SimulationSettings.model_validate(
        {
            "days": source.uniform(1, 20),
            "spares": source.choice([0, 0.2]),
            "power_cap": source.choice([1, 0.6]),
            "jobs": {"a": {"per_day": source.uniform(1, 20), "devices": {1: 1, 8: 1}, "sigma": 1, "checkpoint": saves}},
            "failures": {"f": {"per_1000_node_days": source.choice([0, 100, 2000]), "repair_share": source.random()}},
        }
    )
    group = NodeTypeGroup("h100", POWER, [NodeHistory()] * num_nodes, num_nodes)
    result = simulate_fleet([group], settings, seed)
    assert sum(result.shares.values()) == pytest.approx(1, abs=1e-9)
    assert min(result.shares.values()) >= -1e-12
    assert 0 <= result.it_mean_w <= result.it_peak_w <= num_nodes * POWER.max_w * (1 + 1e-9)
    assert result.site.balance_error <= 1e-9


@pytest.mark.parametrize("seed", range(200))
def test_caps_of_a_random_tree_are_within_limits_and_what_is_said_of_budgets_is_true(seed: int) -> None:
    source = random.Random(seed)
    levels = [BudgetLevel("site", "s", None), BudgetLevel("rack", "r0", None, 0), BudgetLevel("rack", "r1", None, 0)]
    power = NodePower(4, 700.0, 75.0, 1000.0, 500.0, 200.0)
    tree = PowerTree(
        tuple(levels),
        tuple(PoweredNode(f"n{i}", "h", power, source.randint(1, 2)) for i in range(source.randint(1, 8))),
    )
    limits = [None if source.random() < 0.1 else NodeCaps(200.0, 700.0, 4) for _ in tree.nodes]
    jobs = []
    for index in range(len(tree.nodes)):
        caps = [200.0, *sorted(source.uniform(210, 690) for _ in range(source.randint(0, 4))), 700.0]
        exponent = source.uniform(0.05, 1.2)
        points = [
            SweepPoint(c, (c / 700) ** exponent * source.gauss(1, 0.03), c * source.uniform(0.6, 1.1)) for c in caps
        ]
        source.shuffle(points)
        curve = SpeedCurve.fit(points)
        assert np.all(np.diff(curve.speeds) >= 0)
        assert np.all(np.diff(curve.draws_w) >= 0)
        curves = {"h": curve} if source.random() < 0.7 else {}
        jobs.append(PoweredJob(f"j{index}", {index: tuple(range(source.randint(1, 4)))}, curves))
    most_w = tree.sum_by_level([power.max_w * (1 + MARGIN)] * len(tree.nodes))
    budgets_w = [source.choice([None, source.uniform(0.2, 1.0) * each]) for each in most_w]
    found = allocate_caps(tree, limits, jobs, budgets_w, MARGIN, 0.0)
    committed_w = [
        power.rest_max_w + (4 * 700.0 if limit is None else sum(caps)) * (1 + MARGIN)
        for caps, limit in zip(found.caps_w, limits, strict=True)
    ]
    assert found.is_within == (not find_excesses(tree, committed_w, budgets_w))
    for caps, limit in zip(found.caps_w, limits, strict=True):
        assert limit is None or all(200.0 <= cap <= 700.0 for cap in caps)
    for index, job in enumerate(jobs):
        if limits[index] is not None:
            assert len({found.caps_w[index][device] for device in job.devices[index]}) == 1


@pytest.mark.parametrize("seed", range(30))
def test_a_random_plant_gives_away_what_the_site_draws(seed: int) -> None:
    source, values = random.Random(seed), np.random.default_rng(seed)
    plant = CoolingPlant(
        design_it=f"{10 ** source.uniform(-1, 2):.3f} MW",
        heat_rejection=source.choice(["tower", "dry_cooler"]),
        trim_chiller=source.random() < 0.5,
        liquid_share=source.choice([0.0, 0.9, 1.0]),
        conversion_efficiency=source.uniform(0.85, 1.0),
        hall_range_k=source.uniform(3, 20),
        tower_approach_k=source.uniform(2, 8),
        leakage_per_k=source.choice([0.0, 0.0004, 0.02]),
    )
    dry_c = values.uniform(-30, 48, 50)
    wet_c = np.minimum(dry_c, find_wet_bulb(dry_c, values.uniform(0.05, 1, 50)))
    it_w = plant.design_it * values.choice([0.001, 0.3, 1.0, 1.1], 50)
    controls = PlantControls(values.uniform(10, 50, 50), source.uniform(0.4, 1.1))
    hours = simulate_plant(plant, it_w, dry_c, wet_c, controls)
    warmer = simulate_plant(plant, it_w, dry_c + 2, wet_c + 2, controls)
    assert hours.balance_error.max() <= 1e-9
    # the fans outside warm the air themselves
    assert np.abs(hours.rejected_w - hours.site_w + hours.fans_w).max() <= 1e-9 * plant.design_it
    assert hours.pue >= 1
    assert np.all(warmer.supply_c >= hours.supply_c - 1e-6)
