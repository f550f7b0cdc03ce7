"""A fleet file as the cluster of a plan: nodes, the cap that its budgets leave, and its site's prices."""

from pathlib import Path

import pytest

from phalanx.autoconfig.plan import load_sized_cluster
from phalanx.cli.main import main
from phalanx.cluster.load import load_cluster
from phalanx.errors import UsageError
from phalanx_fleet.fleet_cluster import describe_cluster

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
    cluster = describe_cluster(write_fleet(tmp_path))
    prices = cluster.prices
    assert (cluster.nodes, cluster.devices, cluster.node.accelerator.name) == (9, 72, "NVIDIA H100 SXM")
    assert (prices.pue, prices.kwh, prices.currency, prices.carbon_g_per_kwh) == (1.1, 0.15, "EUR", None)


def test_a_type_is_named_where_there_are_several(tmp_path: Path) -> None:
    path = write_fleet(tmp_path, other="g")
    with pytest.raises(UsageError, match="it has g, h"):
        describe_cluster(path)
    cluster = describe_cluster(path, "h")
    assert cluster.nodes == 8


def test_a_fleet_has_no_more_devices_than_its_own(tmp_path: Path) -> None:
    cluster = describe_cluster(write_fleet(tmp_path))
    with pytest.raises(UsageError, match="72 devices"):
        load_sized_cluster(cluster, 128)


def test_prices_by_hour_count_with_their_mean(tmp_path: Path) -> None:
    path = write_fleet(tmp_path)
    path.write_text(path.read_text().replace("price_per_kwh: 0.15", "price_per_kwh: h.csv, carbon_g_per_kwh: h.csv"))
    (tmp_path / "h.csv").write_text(
        "time,price_per_mwh,carbon_g_per_kwh\n2026-07-01T00:00,50,300\n2026-07-01T01:00,150,500\n"
    )
    cluster = describe_cluster(path)
    assert (cluster.prices.kwh, cluster.prices.carbon_g_per_kwh) == (pytest.approx(0.1), 400)


def test_the_pue_of_a_plant_is_that_over_its_weather(tmp_path: Path) -> None:
    path = write_fleet(tmp_path)
    hours = [
        f"2026-07-{1 + hour // 24:02}T{hour % 24:02}:00,{20 + hour % 24},{15 + hour % 24 / 2}" for hour in range(48)
    ]
    (tmp_path / "w.csv").write_text("\n".join(["time,dry_bulb_c,wet_bulb_c", *hours]))
    site = "site: {weather: w.csv, plant: {design_it: 100 kW}, "
    path.write_text(path.read_text().replace("site: {pue: 1.1, ", site))
    cluster = describe_cluster(path)
    assert 1.01 < cluster.prices.pue < 1.2


def test_the_written_file_is_a_cluster_for_the_planner(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    assert main(["power", "plan", str(write_fleet(tmp_path, "77.4 kW")), "--fake", "--write-cluster", str(path)]) == 0
    cluster = load_cluster(str(path))
    assert (cluster.nodes, cluster.prices.pue) == (9, 1.1)
