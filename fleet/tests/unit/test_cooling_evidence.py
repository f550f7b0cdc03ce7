"""What is wrong with a node's cooling, and that it makes the node suspect."""

import json
from pathlib import Path
from typing import Any

import pytest

from fake_nodes import FakeNodeBackend
from phalanx_fleet import nodes_file
from phalanx_fleet.evidence import find_cooling_findings
from phalanx_fleet.fleet_node import LatestReading
from phalanx_fleet.node_list import FleetReader, FleetSources
from phalanx_fleet.node_states import NodeState, NodeStates
from phalanx_fleet.telemetry.service_reading import RackSample, ServiceReading

NOW = 1000.0
FRESH, LATE = LatestReading(NOW, 10.0, draw_w=4000.0), LatestReading(NOW - 31.0, 10.0, draw_w=4000.0, margin_k=0.0)
CDU_RACKS = {"c1": ("r1", "r2")}


def find(samples: list[RackSample], reading: LatestReading | None = FRESH, rack: str | None = "r1") -> list[str]:
    return [each.kind for each in find_cooling_findings(rack, samples, CDU_RACKS, reading, NOW)]


@pytest.mark.parametrize(
    ("sample", "kinds"),
    [
        (RackSample(id="r1", has_leak=True), ["leak"]),
        (RackSample(id="r1", flow_l_per_min=0.0), ["no-flow"]),
        (RackSample(id="c1", equipment="CDU", has_leak=True, flow_l_per_min=0.0), ["leak", "no-flow"]),
        (RackSample(id="r2", has_leak=True), []),
        (RackSample(id="r1", equipment="CDU", has_leak=True), []),
        (RackSample(id="r1"), []),
        (RackSample(id="r1", has_leak=False, flow_l_per_min=120.0), []),
    ],
)
def test_a_leak_and_no_flow_are_of_the_nodes_of_the_rack_or_of_its_cdu(sample: RackSample, kinds: list[str]) -> None:
    assert find([sample]) == kinds


def test_without_a_reading_of_the_node_a_flow_of_0_says_nothing() -> None:
    assert find([RackSample(id="r1", flow_l_per_min=0.0)], None) == []


@pytest.mark.parametrize(("margin_k", "kinds"), [(0.0, ["throttling"]), (-1.0, ["throttling"]), (3.0, []), (None, [])])
def test_a_margin_of_0_is_throttling(margin_k: float | None, kinds: list[str]) -> None:
    assert find([], LatestReading(NOW, 10.0, margin_k=margin_k), rack=None) == kinds
    assert find([], LATE, rack=None) == []


class LeakingBus:
    name, problems = "bus", ()

    def read(self) -> ServiceReading:
        return ServiceReading(racks=(RackSample(id="r1", has_leak=True),))

    def close(self) -> None:
        pass


def test_a_leak_makes_the_nodes_of_its_rack_suspect_and_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content: dict[str, Any] = {"nodes": [{"name": "n1", "rack": "r1"}, {"name": "n2", "rack": "r2"}]}
    file = tmp_path / "nodes.yml"
    file.write_text(json.dumps({**content, "mqtt": {"url": "mqtts://bus"}}))
    monkeypatch.setattr(nodes_file, "open_mqtt", lambda options: LeakingBus())
    with NodeStates(tmp_path / "nodes.db", lambda: NOW) as states:
        sources = FleetSources(FakeNodeBackend(2), file)  # type: ignore[arg-type]
        reader = FleetReader(sources, states, now=lambda: NOW)
        view = reader.read()
        reader.close()
        found = states.find("n1")
        assert found is not None
        assert (found.state, found.actor) == (NodeState.SUSPECT, "evidence")
        assert found.reason.startswith("rack r1 reports a leak: drain the node")
    assert [(node.name, node.rack, node.cooling) for node in view.nodes] == [
        ("n1", "r1", "rack r1 reports a leak"),
        ("n2", "r2", None),
    ]
