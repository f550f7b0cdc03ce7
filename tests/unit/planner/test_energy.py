"""Power by load, slow-down under caps and energy: rules over a cluster's values, and Zeus's measurements."""

import csv
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from phalanx.cluster.spec import AcceleratorSpec, Cluster, NodeSpec, Prices
from phalanx.planner.energy import (
    SweptSpeeds,
    device_power,
    node_power,
    predict_cap_slowdown,
    predict_run_energy,
    predict_swept_slowdown,
)

ZEUS = Path(__file__).parents[4] / "shared" / "validation" / "zeus_powerlimit.csv"
NAMES = {"v100": "NVIDIA V100 PCIe", "rtx6000": "Quadro RTX 6000", "a40": "NVIDIA A40", "p100": "NVIDIA P100 PCIe"}


def accelerator(name: str = "some", power: float | None = 400.0, idle: float | None = 80.0) -> AcceleratorSpec:
    return AcceleratorSpec(name=name, tflops={"bf16": 100.0}, memory_gib=80, power_w=power, idle_w=idle)


def node(power: float | None = None, idle: float | None = None) -> NodeSpec:
    return NodeSpec(accelerator=accelerator(), count=8, power_w=power, idle_w=idle)


@pytest.mark.parametrize(("load", "watts"), [(0.0, 80.0), (0.5, 240.0), (1.0, 400.0), (1.7, 400.0), (-1.0, 80.0)])
def test_power_is_linear_in_the_load_between_idle_and_most(load: float, watts: float) -> None:
    assert device_power(accelerator(), load) == pytest.approx(watts)


def test_a_cap_bounds_the_draw_and_leaves_smaller_draws_alone() -> None:
    assert device_power(accelerator(), 1.0, cap_w=300.0) == 300.0
    assert device_power(accelerator(), 0.2, cap_w=300.0) == pytest.approx(144.0)


def test_power_is_unknown_where_the_highest_draw_is() -> None:
    assert device_power(accelerator(power=None), 1.0) is None
    assert (
        predict_run_energy(
            Cluster(name="c", nodes=1, node=NodeSpec(accelerator=accelerator(power=None), count=1)), 60.0
        )
        is None
    )


def test_a_node_draws_its_own_figures_at_both_ends() -> None:
    known = node(power=6500.0, idle=1500.0)
    assert node_power(known, 0.0) == pytest.approx(1500.0)
    assert node_power(known, 1.0) == pytest.approx(6500.0)


def test_the_rest_of_a_node_without_figures_is_a_share_of_its_devices() -> None:
    assert node_power(node(), 1.0) == pytest.approx(8 * 400 * 1.4)
    assert node_power(node(), 0.0) == pytest.approx(8 * 80 + 8 * 400 * 0.2)


def test_a_cap_spares_only_the_devices() -> None:
    full, capped = node_power(node(), 1.0), node_power(node(), 1.0, cap_w=300.0)
    assert full is not None
    assert capped is not None
    assert full - capped == pytest.approx(8 * 100.0)


def test_energy_counts_devices_then_nodes_then_the_building() -> None:
    cluster = Cluster(name="c", nodes=4, node=node(power=6500.0, idle=1500.0), prices=Prices(pue=1.5))
    energy = predict_run_energy(cluster, 7200.0, nodes=2, load=1.0)
    assert energy is not None
    assert energy.accelerator_kwh == pytest.approx(2 * 8 * 0.4 * 2)
    assert energy.node_kwh == pytest.approx(2 * 6.5 * 2)
    assert energy.site_kwh == pytest.approx(1.5 * energy.node_kwh)


def test_the_clusters_cap_counts() -> None:
    capped = Cluster(name="c", nodes=1, node=node(), prices=Prices(power_cap_w=200.0))
    energy = predict_run_energy(capped, 3600.0, load=1.0)
    assert energy is not None
    assert energy.accelerator_kwh == pytest.approx(8 * 0.2)


@pytest.mark.parametrize("name", ["NVIDIA V100 SXM2 32GB", "NVIDIA H100 SXM"])
def test_a_lower_cap_never_makes_a_program_faster(name: str) -> None:
    found = [
        predict_cap_slowdown(accelerator(name), cap, 390.0).expected for cap in (400.0, 350.0, 300.0, 250.0, 200.0)
    ]
    assert found == sorted(found)
    assert found[0] >= 1.0


def test_a_program_that_draws_far_less_than_the_cap_is_not_slowed() -> None:
    slow = predict_cap_slowdown(accelerator("NVIDIA H100 SXM", 700.0, 93.0), 600.0, 300.0)
    assert (slow.expected, slow.low, slow.high) == (1.0, 1.0, 1.0)


def test_a_family_that_nobody_measured_gets_a_wide_range_that_holds_what_a_vendor_says() -> None:
    slow = predict_cap_slowdown(accelerator("NVIDIA H100 SXM", 700.0, 93.0), 600.0, 700.0)
    assert slow.source == "estimate from other families"
    assert slow.low < slow.expected < 1.10 < 1.15 < slow.high  # 10 to 15 % by a vendor's blog


SWEPT = SweptSpeeds("runs/a", (300.0, 500.0, 700.0), (0.5, 0.9, 1.0))


def test_what_a_sweep_has_measured_stands_instead_of_the_estimate() -> None:
    device = accelerator("NVIDIA H100 SXM", 700.0, 93.0)
    slow = predict_swept_slowdown(device, 400.0, 650.0, SWEPT)
    assert slow.expected == pytest.approx(1 / 0.7)
    assert slow.low < slow.expected < slow.high < 1.1 * slow.expected
    assert slow.source == "sweep of runs/a"


def test_a_sweep_that_began_below_the_highest_cap_adds_to_the_estimate_above_it() -> None:
    device = accelerator("NVIDIA H100 SXM", 800.0, 93.0)
    slow, above = predict_swept_slowdown(device, 400.0, 790.0, SWEPT), predict_cap_slowdown(device, 700.0, 790.0)
    assert above.expected > 1
    assert slow.expected == pytest.approx(above.expected / 0.7)
    assert slow.source == "sweep of runs/a below 700 W, estimate from other families above"


def test_a_cap_that_was_not_swept_is_estimated_and_it_is_said() -> None:
    device = accelerator("NVIDIA H100 SXM", 700.0, 93.0)
    slow, estimate = predict_swept_slowdown(device, 290.0, 650.0, SWEPT), predict_cap_slowdown(device, 290.0, 650.0)
    assert (slow.expected, slow.low, slow.high) == (estimate.expected, estimate.low, estimate.high)
    assert slow.source == "estimate from other families; the sweep of runs/a has 300 to 700 W"
    assert predict_swept_slowdown(device, 290.0, 650.0, None) == estimate


def test_a_cap_below_the_lowest_clocks_is_refused() -> None:
    with pytest.raises(ValueError, match="lowest clocks"):
        predict_cap_slowdown(accelerator("NVIDIA V100", 300.0), 80.0, 250.0)


def test_a_family_without_constants_needs_its_highest_draw() -> None:
    with pytest.raises(ValueError, match="needs power_w"):
        predict_cap_slowdown(accelerator("NVIDIA H100", power=None), 300.0, 600.0)


@pytest.mark.skipif(not ZEUS.exists(), reason=f"the measurements are not in this checkout: {ZEUS} is absent")
@pytest.mark.parametrize("gpu", NAMES)
def test_slow_down_under_caps_is_what_zeus_measured(gpu: str) -> None:
    with ZEUS.open() as file:
        rows = [row for row in csv.DictReader(file) if row["gpu"] == gpu]
    workloads = defaultdict(list)
    for row in rows:
        key = (row["dataset"], row["network"], row["batch_size"], row["optimizer"])
        workloads[key].append(tuple(float(row[name]) for name in ("power_limit", "time_per_epoch", "average_power")))
    own = accelerator(NAMES[gpu], max(float(row["power_limit"]) for row in rows))
    errors, baseline, inside = [], [], []
    for points in workloads.values():
        *capped, (_, uncapped_time, draw) = sorted(points)
        for cap, time, _ in capped:
            found, true = predict_cap_slowdown(own, cap, draw), time / uncapped_time
            errors.append(abs(found.expected / true - 1.0))
            baseline.append(abs(1.0 / true - 1.0))
            inside.append(found.low <= true <= found.high)
    # the reference left each workload out of its fit in turn; these are the constants of the whole fit
    reference = {"v100": 0.041, "rtx6000": 0.049, "a40": 0.062, "p100": 0.026}[gpu]
    assert statistics.mean(errors) < reference + 0.005
    assert statistics.mean(errors) < statistics.mean(baseline)
    assert statistics.mean(inside) > 0.75
