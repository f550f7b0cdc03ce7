"""The pages of a fleet file: budgets with what is late at its most, margins of devices."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from made_samples import full_node
from phalanx.errors import PhalanxError
from phalanx.serve.access import make_access
from phalanx.telemetry.sample import DeviceSample
from phalanx_fleet.fleet_node import FleetNode, LatestReading, reading_from_sample
from phalanx_fleet.pages import make_pages, power_page
from phalanx_fleet.pages.fleet_pages import FleetPages
from phalanx_fleet.pages.power_page import (
    BAR_WIDTH,
    LINE_WIDTH,
    DeviceMargin,
    ServedFleet,
    list_margins,
    load_served_fleet,
    read_levels,
    render_cooling,
    render_power,
)
from phalanx_fleet.pages.site_history import HistoryPoint
from phalanx_fleet.power.load_targets import LoadTarget
from phalanx_fleet.telemetry.service_reading import RackSample
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
    reading = LatestReading(NOW - age_s, 1.0, 5000.0, "node", device_cap_w=cap_w, num_devices=devices)
    return FleetNode(name, "healthy", None, None, reading)


def test_a_level_commits_enforced_caps_and_the_maximum_of_what_is_late_or_silent(fleet: ServedFleet) -> None:
    levels = {each.label: each for each in read_levels(fleet.tree, [capped("r1-1"), capped("r1-2", 9)], 0.0, NOW)}
    row, site = levels["row w"], levels["site s"]
    assert row.committed_w == 4000 + 4600 + 10_200
    assert (row.draw_w, row.num_read, row.num_nodes, row.oldest) == (5000, 1, 2, NOW)
    assert row.headroom_w == 21_000 - 18_800
    assert site.committed_w == row.committed_w + 10_200
    assert levels["row v"].oldest is None


def test_a_node_of_which_a_device_is_not_read_commits_its_maximum(fleet: ServedFleet) -> None:
    levels = read_levels(fleet.tree, [capped("r2-1", devices=7, cap_w=3000.0)], 0.0, NOW)
    assert next(each for each in levels if each.label == "rack r2").committed_w == 10_200


def test_a_node_in_repair_commits_its_maximum(fleet: ServedFleet) -> None:
    levels = read_levels(fleet.tree, [replace(capped("r2-1"), state="repair")], 0.0, NOW)
    found = next(each for each in levels if each.label == "rack r2")
    assert (found.committed_w, found.num_read) == (10_200, 0)


def test_draw_counts_what_the_committed_power_counts(fleet: ServedFleet) -> None:
    devices = LatestReading(NOW, 1.0, 3400.0, "CPU and accelerators", device_draw_w=3000.0, num_devices=8)
    nodes = [FleetNode("r1-1", "healthy", None, None, devices), capped("r1-2"), capped("r2-1", devices=7)]
    nodes[2] = replace(nodes[2], reading=replace(devices, num_devices=7))
    levels = {each.label: each for each in read_levels(fleet.tree, nodes, 0.0, NOW)}
    assert (levels["rack r1"].draw_w, levels["rack r1"].num_read) == (3000 + 4600 + 5000, 2)
    assert (levels["rack r2"].draw_w, levels["rack r2"].num_read) == (0, 0)


def test_levels_stand_below_their_parent_and_an_exceeded_budget_is_said(fleet: ServedFleet) -> None:
    page = render_power(read_levels(fleet.tree, [], 0.0, NOW), {})
    order = [
        page.index(f">{text}<") for text in ("site s", "\u2003feed f", "\u2003" * 2 + "row w", "\u2003" * 3 + "rack r1")
    ]
    assert order == sorted(order)
    assert "feed f may draw 0.6 kW more than its budget" in page
    assert "0 of 3 nodes read" in page


def test_the_budget_of_a_load_target_that_holds_now_is_shown(fleet: ServedFleet) -> None:
    target = LoadTarget("row w", 15_000.0, NOW - 10, NOW + 10)
    page = render_power(read_levels(fleet.tree, [], 0.0, NOW, [target]), {})
    assert "15.0 kW (load target)" in page
    assert "row w may draw 5.4 kW more than its budget" in page
    assert "(load target)" not in render_power(read_levels(fleet.tree, [], 0.0, NOW + 11, [target]), {})


def test_load_targets_are_read_again_when_their_file_changes(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    targets = tmp_path / "targets.yaml"
    targets.write_text("targets: []")
    pages = make_pages(fleet=tmp_path / "fleet.yaml", targets=targets)
    browser = Browser(tmp_path, make_access("127.0.0.1", False, None, demands_token=False), [pages])
    routes = pages._fleet_routes
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
    assert "5.0 kW" in render_power(read_levels(fleet.tree, [capped("r1-1")], 0.0, NOW), {})
    assert "5.0 kW" not in render_power(read_levels(fleet.tree, [capped("r1-1", age_s=10)], 0.0, NOW), {})


def test_nodes_stand_below_their_rack_with_a_link_to_their_page(fleet: ServedFleet) -> None:
    page = render_power(read_levels(fleet.tree, [capped("r1-1")], 0.0, NOW), {})
    rack, node = page.index(">" + "\u2003" * 3 + "rack r1<"), page.index('<a href="nodes/r1-1">node r1-1</a>')
    assert rack < node
    assert "power?rack=" not in page


def test_of_a_large_fleet_the_nodes_of_the_chosen_rack_are_shown(
    fleet: ServedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(power_page, "MAX_TABLE_ROWS", 9)
    levels = read_levels(fleet.tree, [], 0.0, NOW)
    closed, opened = render_power(levels, {}), render_power(levels, {}, "r2")
    assert '<a href="power?rack=r1">rack r1</a>' in closed
    assert "node r" not in closed
    assert ("node r2-1" in opened, "node r1-1" in opened) == (True, False)


def test_a_bar_has_draw_committed_power_and_budget_to_one_scale(fleet: ServedFleet) -> None:
    nodes = [capped("r1-1"), capped("r1-2")]
    page = render_power(read_levels(fleet.tree, nodes, 0.0, NOW), {})
    row = page[page.index("row w") :]
    assert 'aria-label="10.0 kW drawn, 17.2 kW committed of 21.0 kW"' in row
    scale = BAR_WIDTH / 21_000
    assert f'<rect class="committed" y="4" width="{17_200 * scale:.1f}" height="12"/>' in row
    assert f'<rect class="draw" y="7" width="{10_000 * scale:.1f}" height="6"/>' in row
    assert f'<rect class="budget" x="{BAR_WIDTH - 1:.1f}"' in row
    assert 'class="over"' in render_power(read_levels(fleet.tree, [], 0.0, NOW), {})  # feed f: 30.6 kW of 30 kW


def test_a_level_has_a_line_of_its_draw_in_the_last_day(fleet: ServedFleet) -> None:
    line = [HistoryPoint(NOW - back, 1, watts, watts, watts) for back, watts in ((43_200, 5000.0), (0, 10_000.0))]
    page = render_power(read_levels(fleet.tree, [], 0.0, NOW), {"rack r1": line})
    assert page.count("<polyline") == 1
    assert f'<polyline points="{LINE_WIDTH / 2:.1f},10.0 {LINE_WIDTH:.1f},1.0"/>' in page
    assert 'aria-label="draw of 24 h: 5.0 kW to 10.0 kW"' in page


def test_the_20_lowest_margins_keep_the_order_of_nodes_while_they_change() -> None:
    margins = [DeviceMargin(f"n{number}", "0", None, None, 50.5 - number, NOW) for number in range(30)]
    page = render_cooling([], margins)
    assert re.findall(r"<td>(n\d+)</td>", page) == [f"n{number}" for number in range(10, 30)]
    moved = [replace(each, margin_k=each.margin_k + 0.4 * (-1) ** index) for index, each in enumerate(margins)]
    assert re.findall(r"<td>(n\d+)</td>", render_cooling([], moved)) == re.findall(r"<td>(n\d+)</td>", page)
    assert "and 10 devices with more margin" in page


def test_margins_are_those_of_devices_that_report_one_and_are_not_late() -> None:
    sample = full_node(NOW)
    devices = (*sample.devices, DeviceSample(id="b", core_temperature_c=80.0))
    node = FleetNode("n1", "healthy", None, None, reading_from_sample(sample, 1.0))
    found = list_margins([node], {"n1": replace(sample, devices=devices)}, NOW)
    assert [each.margin_k for each in found] == [20, 19, 18, 17, 16, 15, 14, 13]
    assert list_margins([node], {"n1": sample}, NOW + 60) == []


def test_a_leak_stands_first() -> None:
    page = render_cooling([RackSample(id="1", name="r<1>", has_leak=True, supply_temperature_c=32.0)], [])
    assert page.startswith('<p class="note problem">Leak: r&lt;1&gt;')
    assert "32.0 C" in page


def test_the_pages_show_without_a_fleet_what_they_need(tmp_path: Path) -> None:
    browser = Browser(tmp_path, make_access("127.0.0.1", False, None, demands_token=False), [make_pages()])
    assert "phalanx serve --fleet FLEET.yaml" in browser.get("/power").text
    assert "No rack is read" in browser.get("/cooling").text
    assert all(browser.get(f"/{address.removeprefix('./')}").status == 200 for _, address in FleetPages.tabs)


def test_a_fleet_file_is_checked_before_anything_is_served(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET.replace("row: v", "row: x"))
    with pytest.raises(PhalanxError, match="no such row"):
        load_served_fleet(tmp_path / "fleet.yaml")
