"""A fleet file as the cluster of a plan: nodes, the cap that its budgets leave, and its site's prices."""

from pathlib import Path

import pytest

from phalanx.app.budget import load_prices
from phalanx.app.plan_cluster import find_fleet_cluster, find_plan_target
from phalanx.autoconfig.plan import load_sized_cluster
from phalanx.cli.plan_output import _predict_carbon_kg
from phalanx.errors import DataError, UsageError
from phalanx.fleet.power.sweep_file import PowerSweep, SweptCap, save_sweep
from phalanx.run import Run

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
    found = find_fleet_cluster(str(write_fleet(tmp_path)))
    assert found is not None
    cluster = found.cluster
    prices = cluster.prices
    assert (cluster.nodes, cluster.devices, cluster.node.accelerator.name) == (9, 72, "NVIDIA H100 SXM")
    assert (prices.pue, prices.kwh, prices.currency, prices.carbon_g_per_kwh) == (1.1, 0.15, "EUR", None)
    assert prices.power_cap_w is None


def test_the_cap_is_what_the_budget_leaves_each_device(tmp_path: Path) -> None:
    found = find_fleet_cluster(str(write_fleet(tmp_path, "77.4 kW")))  # 9 x (4.6 kW + 8 caps)
    assert found is not None
    assert found.cluster.prices.power_cap_w == pytest.approx(500.0, abs=0.1)


def test_a_type_is_named_where_there_are_several(tmp_path: Path) -> None:
    path = write_fleet(tmp_path, other="g")
    with pytest.raises(UsageError, match="it has g, h"):
        find_fleet_cluster(str(path))
    found = find_fleet_cluster(f"{path}:h")
    assert found is not None
    assert (found.cluster.nodes, found.node_type) == (8, "h")


def test_what_is_no_fleet_file_is_left_to_the_planner(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("node: dgx-h100\nnodes: 4\n")
    assert [find_fleet_cluster(text, tmp_path) for text in ("h100:8", "dgx-h100", "cluster.yaml")] == [None] * 3


def test_a_fleet_has_no_more_devices_than_its_own(tmp_path: Path) -> None:
    found = find_fleet_cluster(str(write_fleet(tmp_path)))
    assert found is not None
    cluster = found.cluster
    with pytest.raises(UsageError, match="72 devices"):
        load_sized_cluster(cluster, 128)


def test_runs_keep_the_prices_of_a_fleet_file(tmp_path: Path) -> None:
    prices = load_prices({"PHALANX_CLUSTER": str(write_fleet(tmp_path))})
    assert prices is not None
    assert prices.kwh == 0.15


def make_sweep(run: Path, node_type: str = "h", most_w: float = 700.0) -> Path:
    run.mkdir(parents=True)
    speeds = {200.0: 0.4, 450.0: 0.8, most_w: 1.0}
    caps = tuple(SweptCap(node_type, cap, 5 * speed, cap, cap, True, 10) for cap, speed in speeds.items())
    save_sweep(Run(run), PowerSweep(caps))
    return run


def test_a_sweep_of_the_recipes_run_is_found_and_one_that_is_given_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fleet = str(write_fleet(tmp_path, "77.4 kW"))
    assert find_plan_target(fleet, "gpt").swept is None
    make_sweep(tmp_path / "runs" / "gpt")
    found = find_plan_target(fleet, "gpt").swept
    assert found is not None
    assert (found.run, found.caps_w[0], found.caps_w[-1], found.speeds[-1]) == ("runs/gpt", 200.0, 700.0, 1.0)
    other = find_plan_target(fleet, "gpt", make_sweep(tmp_path / "other")).swept
    assert other is not None
    assert other.run == str(tmp_path / "other")


def test_a_given_run_must_have_a_sweep_of_these_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fleet = str(write_fleet(tmp_path))
    with pytest.raises(DataError, match="no sweep there"):
        find_plan_target(fleet, "gpt", tmp_path)
    with pytest.raises(DataError, match="is of nodes of type g, not h"):
        find_plan_target(fleet, "gpt", make_sweep(tmp_path / "runs" / "gpt", "g"))
    assert find_plan_target(fleet, "gpt").swept is None  # by default it is not of these nodes
    with pytest.raises(UsageError, match="give one by --cluster"):
        find_plan_target("h100:8", "gpt", tmp_path)


def test_carbon_is_energy_at_the_building_times_the_grids_intensity() -> None:
    from types import SimpleNamespace

    prices, energy = SimpleNamespace(carbon_g_per_kwh=300.0), SimpleNamespace(site_kwh=1000.0)
    plan = SimpleNamespace(cluster=SimpleNamespace(prices=prices), energy=energy)
    assert _predict_carbon_kg(plan) == 300.0  # type: ignore[arg-type]


def test_prices_by_hour_count_with_their_mean(tmp_path: Path) -> None:
    path = write_fleet(tmp_path)
    path.write_text(path.read_text().replace("price_per_kwh: 0.15", "price_per_kwh: h.csv, carbon_g_per_kwh: h.csv"))
    (tmp_path / "h.csv").write_text(
        "time,price_per_mwh,carbon_g_per_kwh\n2026-07-01T00:00,50,300\n2026-07-01T01:00,150,500\n"
    )
    found = find_fleet_cluster(str(path))
    assert found is not None
    assert (found.cluster.prices.kwh, found.cluster.prices.carbon_g_per_kwh) == (pytest.approx(0.1), 400)


def test_the_pue_of_a_plant_is_that_over_its_weather(tmp_path: Path) -> None:
    path = write_fleet(tmp_path)
    hours = [
        f"2026-07-{1 + hour // 24:02}T{hour % 24:02}:00,{20 + hour % 24},{15 + hour % 24 / 2}" for hour in range(48)
    ]
    (tmp_path / "w.csv").write_text("\n".join(["time,dry_bulb_c,wet_bulb_c", *hours]))
    site = "site: {weather: w.csv, plant: {design_it: 100 kW}, "
    path.write_text(path.read_text().replace("site: {pue: 1.1, ", site))
    found = find_fleet_cluster(str(path))
    assert found is not None
    assert 1.01 < found.cluster.prices.pue < 1.2


@pytest.mark.parametrize(("budget", "watts"), [("0 W", 0), ("20 kW", 20_000)])
def test_budgets_that_no_cap_keeps_are_refused(tmp_path: Path, budget: str, watts: int) -> None:
    with pytest.raises(UsageError, match=rf"the lowest caps: .* W of a budget of {watts} W"):
        find_fleet_cluster(str(write_fleet(tmp_path, budget)))
