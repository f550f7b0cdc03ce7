"""Power by load and energy: rules over a cluster's values."""

import pytest

from phalanx.cluster.spec import AcceleratorSpec, Cluster, NodeSpec, Prices
from phalanx.planner.energy import (
    RunEnergy,
    device_power,
    estimate_run_cost,
    node_power,
    predict_run_energy,
)


def accelerator(name: str = "some", power: float | None = 400.0, idle: float | None = 80.0) -> AcceleratorSpec:
    return AcceleratorSpec(name=name, tflops={"bf16": 100.0}, memory_gib=80, power_w=power, idle_w=idle)


def node(power: float | None = None, idle: float | None = None) -> NodeSpec:
    return NodeSpec(accelerator=accelerator(), count=8, power_w=power, idle_w=idle)


@pytest.mark.parametrize(("load", "watts"), [(0.0, 80.0), (0.5, 240.0), (1.0, 400.0), (1.7, 400.0), (-1.0, 80.0)])
def test_power_is_linear_in_the_load_between_idle_and_most(load: float, watts: float) -> None:
    assert device_power(accelerator(), load) == pytest.approx(watts)


def test_power_is_unknown_where_the_highest_draw_is() -> None:
    assert device_power(accelerator(power=None), 1.0) is None
    cluster = Cluster(name="c", nodes=1, node=NodeSpec(accelerator=accelerator(power=None), count=1))
    assert predict_run_energy(cluster, 60.0, nodes=1, load=1.0) is None


def test_a_node_draws_its_own_figures_at_both_ends() -> None:
    known = node(power=6500.0, idle=1500.0)
    assert node_power(known, 0.0) == pytest.approx(1500.0)
    assert node_power(known, 1.0) == pytest.approx(6500.0)


def test_the_rest_of_a_node_without_figures_is_a_share_of_its_devices() -> None:
    assert node_power(node(), 1.0) == pytest.approx(8 * 400 * 1.4)
    assert node_power(node(), 0.0) == pytest.approx(8 * 80 + 8 * 400 * 0.2)


def test_energy_counts_devices_then_nodes_then_the_building() -> None:
    cluster = Cluster(name="c", nodes=4, node=node(power=6500.0, idle=1500.0), prices=Prices(pue=1.5))
    energy = predict_run_energy(cluster, 7200.0, nodes=2, load=1.0)
    assert energy is not None
    assert energy.node_kwh == pytest.approx(2 * 6.5 * 2)
    assert energy.site_kwh == pytest.approx(1.5 * energy.node_kwh)


def test_rent_and_energy_have_their_own_prices() -> None:
    prices = Prices(device_hour=2.5, kwh=0.2)
    found = estimate_run_cost(3600.0, 8, prices, RunEnergy(8.0, 10.0, 8000.0))
    assert (found.device_hours, found.rent_cost) == (8.0, 8 * 2.5)
    assert found.energy_cost == pytest.approx(2.0)


def test_the_cost_is_unknown_without_prices() -> None:
    found = estimate_run_cost(10.0, 1, Prices(), None)
    assert (found.rent_cost, found.energy_cost) == (None, None)
