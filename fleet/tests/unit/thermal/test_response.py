"""Faults of the cooling: what counts as one, and what follows, in which order."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from phalanx_fleet.telemetry.rack_points import RackPoints
from phalanx_fleet.telemetry.service_reading import RackSample
from phalanx_fleet.thermal.guard import (
    CooledNodes,
    CoolingAction,
    CoolingFault,
    CoolingResponder,
    FaultDetector,
    NodeMargin,
    ObservedFault,
    Problems,
)
from settable_clock import SettableClock

RACKS = {"n1": "r1", "n2": "r1", "n3": "r2"}
REPORT, DRAIN, SAVE = CoolingAction
LEAK = ObservedFault(CoolingFault.LEAK, "rack r1", ("n1", "n2"), "rack r1 reports a leak", 0.0)


@dataclass
class FakeActions:
    """Nodes that run one job. Actions in `failing` are refused."""

    failing: set[str] = field(default_factory=set)
    done: list[tuple[str, str]] = field(default_factory=list)

    def drain(self, nodes: Sequence[str], reason: str) -> Problems:
        return self._act("drain", nodes)

    def list_jobs(self, node: str) -> Sequence[str]:
        return ["7"]

    def request_save(self, jobs: Sequence[str]) -> Problems:
        return self._act("request_save", jobs)

    def _act(self, action: str, targets: Sequence[str]) -> Problems:
        if action in self.failing:
            return dict.fromkeys(targets, f"{action} is refused")
        self.done += [(action, target) for target in targets]
        return {}


def respond(actions: FakeActions, *faults: ObservedFault, may_act: bool = True) -> list[tuple[CoolingAction, str, str]]:
    responder = CoolingResponder(actions, SettableClock(), may_act)
    events = [*responder.respond(faults), *responder.respond(faults)]  # it lasts: the second time nothing follows
    return [(each.action, each.target, each.problem) for each in events]


def test_a_leak_is_reported_and_its_nodes_are_drained_before_their_jobs_save() -> None:
    actions = FakeActions()
    assert respond(actions, LEAK) == [(REPORT, "rack r1", ""), (DRAIN, "n1", ""), (DRAIN, "n2", ""), (SAVE, "7", "")]
    assert actions.done == [("drain", "n1"), ("drain", "n2"), ("request_save", "7")]


def test_an_action_that_fails_does_not_keep_the_next_ones_from_being_done() -> None:
    actions = FakeActions({"drain"})
    assert respond(actions, LEAK)[1:] == [
        (DRAIN, "n1", "drain is refused"),
        (DRAIN, "n2", "drain is refused"),
        (SAVE, "7", ""),
    ]


def test_without_permission_everything_is_reported_and_nothing_done() -> None:
    actions = FakeActions()
    assert [action for action, _, _ in respond(actions, LEAK, may_act=False)] == [REPORT, DRAIN, DRAIN, SAVE]
    assert actions.done == []


def test_a_node_that_throttles_is_reported_and_drained_and_its_job_trains_on() -> None:
    detector = FaultDetector(CooledNodes({"wet": "r1"}), 0.2)
    margins = {"dry": NodeMargin(0.0), "wet": NodeMargin(0.0), "cool": NodeMargin(12.0)}
    actions = FakeActions()
    responder = CoolingResponder(actions, SettableClock(), may_act=True)
    for second in range(3600):
        responder.respond(detector.find_faults([], margins, float(second)))
    assert actions.done == [("drain", "dry"), ("drain", "wet")]


def detect(samples: list[list[RackSample]], cdu_racks: dict[str, tuple[str, ...]] | None = None) -> FaultDetector:
    detector = FaultDetector(CooledNodes(RACKS, cdu_racks or {}), 0.2)
    for second, racks in enumerate(samples):
        detector.find_faults(racks, {}, second)
    return detector


def test_one_measurement_alone_is_no_fault() -> None:
    detector = FaultDetector(CooledNodes(RACKS), 0.2)
    leak, dry = [RackSample(id="r1", has_leak=True)], [RackSample(id="r1", has_leak=False)]
    found = [detector.find_faults(racks, {}, second) for second, racks in enumerate([leak, dry, leak, leak, leak])]
    assert [len(each) for each in found] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("seconds", [2.5, 9.0])
def test_one_measurement_that_is_read_again_and_again_is_one(seconds: float) -> None:
    detector = FaultDetector(CooledNodes(RACKS), 0.2)
    for age_s in range(int(seconds) + 1):
        leak = RackSample(id="r1", has_leak=True, flow_l_per_min=0.0, age_s=float(age_s))
        assert detector.find_faults([leak], {"n1": NodeMargin(0.0, float(age_s))}, 100.0 + age_s) == []


def test_values_that_an_exporter_renews_each_30_s_are_one_measurement_until_then() -> None:
    detector = FaultDetector(CooledNodes({"n1": "r1"}), 0.2)
    found = [len(detector.find_faults([], {"n1": NodeMargin(0.0, 0.0, 30.0)}, float(second))) for second in range(40)]
    assert (found.index(1), sum(found)) == (30, 10)


def test_a_leak_that_is_measured_once_counts_after_10_seconds() -> None:
    detector = FaultDetector(CooledNodes(RACKS), 0.2)
    for age_s in range(11):
        leak = RackSample(id="r1", has_leak=True, age_s=float(age_s))
        found = detector.find_faults([leak], {}, 100.0 + age_s)
    assert [each.fault for each in found] == [CoolingFault.LEAK]


def test_a_message_of_another_sensor_is_no_second_measurement_of_a_leak() -> None:
    points, detector = RackPoints(0.0), FaultDetector(CooledNodes({"n1": "7"}), 0.2)
    metadata = "BMS/v1/PUB/Metadata/Rack/%s/a"
    value = "BMS/v1/PUB/Value/Rack/%s/a"
    leak, flow = "RackLeakDetect", "RackLiquidFlow"
    for kind, unit in ((leak, {}), (flow, {"engUnit": "LPM"})):
        content = {"rackLocationId": "7", "rackLocationName": "7", **unit}
        points.receive(metadata % kind, json.dumps(content).encode(), 0.0)
    points.receive(value % leak, b'{"value": 1, "timestamp": 1000000, "quality": 1}', 0.0)
    for second in range(8):
        message = f'{{"value": 100, "timestamp": {1000000 + 1000 * second}, "quality": 1}}'
        points.receive(value % flow, message.encode(), float(second))
        racks = points.read(1000.0 + second, float(second))
        assert racks[0].has_leak
        assert detector.find_faults(racks, {}, float(second)) == []


def test_a_missing_flow_is_blindness_and_no_fault() -> None:
    detector = detect([[RackSample(id="r1", flow_l_per_min=180.0)]] * 10)
    missing = [RackSample(id="r1"), RackSample(id="r2", has_leak=False)]
    assert [detector.find_faults(missing, {}, 20.0 + second) for second in range(5)] == [[]] * 5
    assert detector.find_blind_racks(missing) == ["r1"]


def test_a_rack_without_a_usual_flow_has_not_lost_it() -> None:
    detector = detect([[RackSample(id="r1", flow_l_per_min=0.0)]] * 10)
    assert detector.find_faults([RackSample(id="r1", flow_l_per_min=0.0)], {}, 20.0) == []


def test_a_cdu_that_stops_is_a_fault_of_all_nodes_that_it_supplies() -> None:
    usual, lost = (RackSample(id="c1", equipment="CDU", flow_l_per_min=each) for each in (400.0, 0.0))
    detector = detect([[usual]] * 10, {"c1": ("r1", "r2")})
    for second in range(4):
        faults = detector.find_faults([lost], {}, 20.0 + second)
    assert [(each.fault, each.place, each.nodes) for each in faults] == [
        (CoolingFault.NO_FLOW, "CDU c1", ("n1", "n2", "n3"))
    ]


def test_a_leak_at_a_cdu_only_drains() -> None:
    leak = [RackSample(id="c1", equipment="CDU", has_leak=True)]
    detector = detect([leak] * 3, {"c1": ("r1",)})
    (fault,) = detector.find_faults(leak, {}, 3.0)
    assert (fault.nodes, fault.needs_save) == (("n1", "n2"), False)
