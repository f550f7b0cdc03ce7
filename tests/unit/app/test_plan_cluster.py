"""A fleet file as the cluster of a plan: nodes, the cap that its budgets leave, and its site's prices."""

from pathlib import Path

import pytest

from phalanx.app.budget import load_prices
from phalanx.app.plan_cluster import find_fleet_cluster
from phalanx.autoconfig.plan import load_sized_cluster
from phalanx.cli.plan_output import _predict_carbon_kg
from phalanx.errors import UsageError

FLEET = """\
sites: {{s: {{budget: {budget}}}}}
feeds: {{a: {{site: s}}}}
rows: {{r: {{feed: a}}}}
racks: {{"k[1-2]": {{row: r, node_type: h, nodes: 4}}, c: {{row: r, node_type: {other}, nodes: 1}}}}
node_types: {{h: {{node: dgx-h100, device_min_cap: 200 W}}, g: {{node: dgx-a100}}}}
power: {{margin: 0}}
simulate: {{site: {{pue: 1.1, price_per_kwh: 0.15, currency: EUR}}}}
"""


def write_fleet(folder: Path, budget: str = "200 kW", other: str = "h") -> Path:
    path = folder / "fleet.yaml"
    path.write_text(FLEET.format(budget=budget, other=other))
    return path


def test_a_fleet_has_its_nodes_and_what_its_site_states(tmp_path: Path) -> None:
    cluster = find_fleet_cluster(str(write_fleet(tmp_path)))
    assert cluster is not None
    prices = cluster.prices
    assert (cluster.nodes, cluster.devices, cluster.node.accelerator.name) == (9, 72, "NVIDIA H100 SXM")
    assert (prices.pue, prices.kwh, prices.currency, prices.carbon_g_per_kwh) == (1.1, 0.15, "EUR", None)
    assert prices.power_cap_w is None


def test_the_cap_is_what_the_budget_leaves_each_device(tmp_path: Path) -> None:
    cluster = find_fleet_cluster(str(write_fleet(tmp_path, "77.4 kW")))  # 9 x (4.6 kW + 8 caps)
    assert cluster is not None
    assert cluster.prices.power_cap_w == pytest.approx(500.0, abs=0.1)


def test_a_type_is_named_where_there_are_several(tmp_path: Path) -> None:
    path = write_fleet(tmp_path, other="g")
    with pytest.raises(UsageError, match="it has g, h"):
        find_fleet_cluster(str(path))
    cluster = find_fleet_cluster(f"{path}:h")
    assert cluster is not None
    assert cluster.nodes == 8


def test_what_is_no_fleet_file_is_left_to_the_planner(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("node: dgx-h100\nnodes: 4\n")
    assert [find_fleet_cluster(text, tmp_path) for text in ("h100:8", "dgx-h100", "cluster.yaml")] == [None] * 3


def test_a_fleet_has_no_more_devices_than_its_own(tmp_path: Path) -> None:
    cluster = find_fleet_cluster(str(write_fleet(tmp_path)))
    assert cluster is not None
    with pytest.raises(UsageError, match="72 devices"):
        load_sized_cluster(cluster, 128)


def test_runs_keep_the_prices_of_a_fleet_file(tmp_path: Path) -> None:
    prices = load_prices({"PHALANX_CLUSTER": str(write_fleet(tmp_path))})
    assert prices is not None
    assert prices.kwh == 0.15


def test_carbon_is_energy_at_the_building_times_the_grids_intensity() -> None:
    from types import SimpleNamespace

    prices, energy = SimpleNamespace(carbon_g_per_kwh=300.0), SimpleNamespace(site_kwh=1000.0)
    plan = SimpleNamespace(cluster=SimpleNamespace(prices=prices), energy=energy)
    assert _predict_carbon_kg(plan) == 300.0  # type: ignore[arg-type]
