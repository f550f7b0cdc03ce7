"""The pages of a fleet file: budgets with what is late at its most, margins of devices."""

from dataclasses import replace
from pathlib import Path

import pytest

from made_samples import full_node
from phalanx.errors import PhalanxError
from phalanx.fleet.fleet_node import FleetNode
from phalanx.fleet.latest_reading import LatestReading, reading_from_sample
from phalanx.fleet.power.load_targets import LoadTarget
from phalanx.fleet.power_tree import NodePower
from phalanx.fleet.telemetry.sample import DeviceSample, NodeSample, RackSample
from phalanx.fleet.thermal.plant_settings import CoolingPlant
from phalanx.serve.access import make_access
from phalanx.serve.cooling_page import list_margins, render_cooling
from phalanx.serve.fleet_routes import ServedFleet, load_served_fleet
from phalanx.serve.pages import PAGE_TABS
from phalanx.serve.power_page import read_levels, render_power
from serve_browser import Browser

NOW = 1000.0
FLEET = """
sites: {s: {}}
feeds: {f: {site: s, budget: 30 kW}, g: {feed: f}}
rows: {w: {feed: f, budget: 21 kW}, v: {feed: g}}
racks: {r1: {row: w, node_type: h100, nodes: 2}, r2: {row: v, node_type: h100, nodes: 1}}
node_types: {h100: {node: dgx-h100}}
simulate:
  days: 5
  jobs: {a: {count: 1, devices: {8: 1}, median_h: 10}}
"""


@pytest.fixture
def fleet(tmp_path: Path) -> ServedFleet:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    return load_served_fleet(tmp_path / "fleet.yaml")


def capped(name: str, age_s: float = 0.0, devices: int = 8, cap_w: float = 4000.0) -> FleetNode:
    reading = LatestReading(NOW - age_s, 1.0, 5000.0, "node", cap_w=cap_w, num_devices=devices)
    return FleetNode(name, "healthy", None, None, reading)


def test_a_level_claims_enforced_caps_and_the_most_of_what_is_late_or_silent(fleet: ServedFleet) -> None:
    levels = {each.level.label: each for each in read_levels(fleet.tree, [capped("r1-1"), capped("r1-2", 9)], 0.0, NOW)}
    row, site = levels["row w"], levels["site s"]
    assert row.claim_w == 4000 + 4600 + 10_200
    assert (row.draw_w, row.num_read, row.num_nodes, row.oldest) == (5000, 1, 2, NOW)
    assert row.headroom_w == 21_000 - 18_800
    assert site.claim_w == row.claim_w + 10_200
    assert levels["row v"].oldest is None


def test_a_node_of_which_a_device_is_not_read_claims_its_most(fleet: ServedFleet) -> None:
    levels = read_levels(fleet.tree, [capped("r2-1", devices=7, cap_w=3000.0)], 0.0, NOW)
    assert next(each for each in levels if each.level.name == "r2").claim_w == 10_200


def test_levels_stand_below_their_parent_and_an_exceeded_budget_is_said(fleet: ServedFleet) -> None:
    page = render_power(fleet.tree, [], 0.0, NOW)
    order = [
        page.index(f">{text}<") for text in ("site s", "\u2003feed f", "\u2003" * 2 + "row w", "\u2003" * 3 + "rack r1")
    ]
    assert order == sorted(order)
    assert "feed f may draw 0.6 kW more than its budget" in page
    assert "0 of 3 nodes read" in page


def test_the_budget_of_a_load_target_that_holds_now_is_shown(fleet: ServedFleet) -> None:
    target = LoadTarget("row w", 15_000.0, NOW - 10, NOW + 10)
    page = render_power(fleet.tree, [], 0.0, NOW, [target])
    assert "15.0 kW (load target)" in page
    assert "row w may draw 5.4 kW more than its budget" in page
    assert "(load target)" not in render_power(fleet.tree, [], 0.0, NOW + 11, [target])


def test_load_targets_are_read_again_when_their_file_changes(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    targets = tmp_path / "targets.yaml"
    targets.write_text("targets: []")
    served = load_served_fleet(tmp_path / "fleet.yaml", targets)
    browser = Browser(tmp_path, make_access("127.0.0.1", False, None, demands_token=False), served)
    routes = browser.server.fleet_routes
    assert "(load target)" not in browser.get("/power").text
    targets.write_text("targets: [{level: row w, limit: 15 kW, start: '1970-01-01T00:00:00Z'}]")
    routes.context = replace(routes.context, wall_clock=lambda: NOW)
    assert "15.0 kW (load target)" in browser.get("/power").text
    targets.write_text("targets: [{level: row <x>, limit: 15 kW}]")
    routes.context = replace(routes.context, wall_clock=lambda: NOW + 1)
    page = browser.get("/power").text
    assert "15.0 kW (load target)" in page
    assert "the load targets of before hold" in page
    assert "<x>" not in page


def test_a_late_draw_is_not_shown(fleet: ServedFleet) -> None:
    assert "5.0 kW" in render_power(fleet.tree, [capped("r1-1")], 0.0, NOW)
    assert "5.0 kW" not in render_power(fleet.tree, [capped("r1-1", age_s=10)], 0.0, NOW)


def test_margins_are_sorted_and_predicted_at_full_power() -> None:
    plant, power = CoolingPlant(design_it="1 MW", core_rise_k=35.0), NodePower(8, 1300, 75, 4600, 2300)
    sample = full_node(NOW)
    node = FleetNode("n1", "healthy", None, None, reading_from_sample(sample, 1.0))
    found = list_margins([node], {"n1": sample}, plant, {"n1": power}, NOW)
    assert [each.margin_k for each in found] == [13, 14, 15, 16, 17, 18, 19, 20]
    assert found[0].full_power_margin_k == pytest.approx(13 - 35 / 2)
    late = list_margins([node], {"n1": sample}, plant, {"n1": power}, NOW + 60)
    assert late == []


def test_a_device_without_a_margin_has_that_of_the_plant() -> None:
    sample = NodeSample(NOW, devices=(DeviceSample(id="a", core_temperature_c=80.0), DeviceSample(id="b")))
    node = FleetNode("n1", "healthy", None, None, None)
    (found,) = list_margins([node], {"n1": sample}, CoolingPlant(design_it="1 MW"), {}, NOW)
    assert (found.margin_k, found.is_modeled) == (7.0, True)
    assert list_margins([node], {"n1": sample}, None, {}, NOW) == []


def test_a_leak_stands_first() -> None:
    page = render_cooling([RackSample(id="1", name="r<1>", has_leak=True, supply_temperature_c=32.0)], [])
    assert page.startswith('<p class="note problem">Leak: r&lt;1&gt;')
    assert "32.0 °C" in page


def test_the_pages_show_without_a_fleet_what_they_need(tmp_path: Path) -> None:
    browser = Browser(tmp_path, make_access("127.0.0.1", False, None, demands_token=False))
    assert "phalanx serve --fleet FLEET.yaml" in browser.get("/power").text
    assert "No rack is read" in browser.get("/cooling").text
    assert all(browser.get(f"/{address.removeprefix('./')}").status == 200 for _, address in PAGE_TABS)


def test_a_fleet_file_is_checked_before_anything_is_served(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET.replace("row: v", "row: x"))
    with pytest.raises(PhalanxError, match="no such row"):
        load_served_fleet(tmp_path / "fleet.yaml")
