"""Metrics of nodes on the server's `/metrics`."""

import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleet_browser import FleetBrowser
from made_samples import full_node
from phalanx.serve.access import make_access
from phalanx.telemetry.exposition import render_families
from phalanx_fleet.fleet_node import SHOWN_STATES, FleetNode, LatestReading
from phalanx_fleet.node_list import FleetView
from phalanx_fleet.pages import make_pages
from phalanx_fleet.pages.fleet_pages import build_sample_metrics
from phalanx_fleet.telemetry.service_reading import RackSample
from serve_browser import Browser

NOW = 1_790_000_000.0
FLEET = """
sites: {s: {}}
feeds: {f: {site: s}}
rows: {w: {feed: f}}
racks: {r1: {row: w, node_type: h100, nodes: 1, budget: 21 kW}, r2: {row: w, node_type: h100, nodes: 1}}
node_types: {h100: {node: dgx-h100}}
"""


def test_nodes_are_counted_by_state_once_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    browser = FleetBrowser(tmp_path, make_access("127.0.0.1", False, None, demands_token=False), monkeypatch)
    assert "phalanx_nodes" not in browser.get("/metrics").text
    fresh, late = LatestReading(time.time(), 60.0), LatestReading(time.time() - 1000, 60.0)
    nodes = [
        FleetNode(name, state, None, None, reading)
        for name, state, reading in (
            ("a", "healthy", fresh),
            ("b", "down", fresh),
            ("c", "healthy", late),
            ("d", "healthy", None),
            ("e", "drained", None),
        )
    ]
    browser.pages.nodes.view = FleetView(nodes)
    families = text_string_to_metric_families(browser.get("/metrics").text)
    counts = {one.labels["state"]: one.value for family in families for one in family.samples if "state" in one.labels}
    assert {name: counts[name] for name in SHOWN_STATES} == {
        "healthy": 1,
        "suspect": 0,
        "drained": 1,
        "repair": 0,
        "testing": 0,
        "down": 1,
        "no reading": 1,
        "stale": 1,
    }


@pytest.mark.parametrize("age_s", [4.0, -4.0])
def test_the_sample_of_an_agent_that_is_late_is_missing(age_s: float) -> None:
    samples = {"n1": full_node(NOW), "n2": full_node(NOW - age_s)}
    page = render_families(build_sample_metrics(samples, NOW)).decode()
    assert 'phalanx_node_cpu_power_watts{node="n1"}' in page
    assert 'node="n2"' not in page


def test_readings_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    browser = FleetBrowser(tmp_path, make_access("127.0.0.1", False, None, demands_token=False), monkeypatch)
    monkeypatch.setattr(browser.pages.streams, "read_samples", lambda: {"n1": full_node(time.time())})
    assert "phalanx_device_power_watts" in browser.get("/metrics").text
    assert "phalanx_device_power_watts" not in browser.get("/metrics?readings=no").text


def test_levels_of_the_fleet_file_fans_and_leaks_have_metrics(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    browser = Browser(
        tmp_path,
        make_access("127.0.0.1", False, None, demands_token=False),
        [pages := make_pages(fleet=tmp_path / "fleet.yaml")],
    )
    assert "phalanx_power" not in browser.get("/metrics").text
    reading = LatestReading(time.time(), 60.0, 5000.0, "node", device_cap_w=4000.0, num_devices=8, failed_fans=1.0)
    late = LatestReading(0.0, 60.0, failed_fans=1.0)
    nodes = [FleetNode("r1-1", "healthy", None, None, reading), FleetNode("x", "healthy", None, None, late)]
    racks = [RackSample(id="r1", has_leak=True), RackSample(id="r2", has_leak=False), RackSample(id="r3")]
    pages.nodes.view = FleetView(nodes, (), racks)
    page = browser.get("/metrics").text
    for line in (
        'phalanx_power_budget_watts{level="rack r1"} 21000.0',
        'phalanx_power_committed_watts{level="rack r1"} 8680.0',
        'phalanx_power_draw_watts{level="rack r1"} 5000.0',
        'phalanx_power_headroom_watts{level="rack r1"} 12320.0',
        'phalanx_power_committed_watts{level="rack r2"} 10312.0',
        'phalanx_node_failed_fans{node="r1-1"} 1.0',
        'phalanx_rack_leak{name="",rack="r1"} 1.0',
        'phalanx_rack_leak{name="",rack="r2"} 0.0',
    ):
        assert f"{line}\n" in page
    for missing in ('draw_watts{level="rack r2"}', 'headroom_watts{level="rack r2"}', 'fans{node="x"}', 'rack="r3"'):
        assert missing not in page
