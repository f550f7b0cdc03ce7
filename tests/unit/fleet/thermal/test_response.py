"""Leak, lost flow and lost margin on the fake fleet: the order of what is done, and whether it is in time."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from phalanx.fleet.fake_cooling import FakeCooledFleet, FakeSavingJob
from phalanx.fleet.power.devices import CapLimits
from phalanx.fleet.power.fake_fleet import FakeCapDevice, FakeClock, FakeNode
from phalanx.fleet.telemetry.sample import RackSample
from phalanx.fleet.thermal.cooling_faults import CooledNodes, FaultDetector
from phalanx.fleet.thermal.flow_loss import CoolingAction, CoolingFault
from phalanx.fleet.thermal.response import CoolingResponder, ResponseEvent

RACKS = {"n1": "r1", "n2": "r1", "n3": "r2"}
FAULT_S = 10.0
REPORT, STOP, ISOLATE, SAVE, OFF = CoolingAction


@dataclass
class Rehearsal:
    """A guard that looks each second, on three nodes with devices of 1 kW."""

    heat_j_per_k: float = 300.0
    save_s: float | None = 5.0
    may_act: bool = True
    events: list[ResponseEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        clock = FakeClock()
        nodes = {
            name: FakeNode(
                name,
                [FakeCapDevice(f"{name}-0", clock, CapLimits(200.0, 1000.0, 1000.0), lambda t: 1000.0, 0.0, 0.0)],
                clock,
            )
            for name in RACKS
        }
        self.fleet = FakeCooledFleet(nodes, RACKS, clock, self.heat_j_per_k)
        if self.save_s is not None:
            self.fleet.jobs = [FakeSavingJob("7", ("n1", "n2"), self.save_s)]
        self.detector = FaultDetector(CooledNodes(RACKS), 0.2)
        self.responder = CoolingResponder(self.fleet, clock, self.fleet.find_device, self.may_act)

    def run(self, until_s: float, break_it: Callable[[FakeCooledFleet], None], at_s: float = FAULT_S) -> None:
        is_broken = False
        while self.fleet.clock.now < until_s:
            target = round(self.fleet.clock.now + 0.2, 6)
            if not is_broken and at_s <= target:
                self.fleet.run_until(at_s)
                break_it(self.fleet)
                is_broken = True
            self.fleet.run_until(target)
            now = self.fleet.clock.now
            if round(10 * now) % 10 == 0:
                faults = self.detector.find_faults(self.fleet.read_racks(), self.fleet.read_margins(), now)
                self.events += self.responder.respond(faults)
            self.events += self.responder.power_off_due()

    def order(self, target: str | None = None) -> list[tuple[CoolingAction, str]]:
        return [(each.action, each.target) for each in self.events if target in (None, each.target)]

    def time_of(self, action: CoolingAction, target: str) -> float:
        return next(e.time_s - FAULT_S for e in self.events if (e.action, e.target) == (action, target))


def lose_flow(fleet: FakeCooledFleet) -> None:
    fleet.flow_share["r1"] = 0.0


@pytest.mark.parametrize("heat_j_per_k", [300.0, 450.0, 600.0])
def test_lost_flow_is_reported_drained_saved_and_powered_off_before_90_degrees(heat_j_per_k: float) -> None:
    rehearsal = Rehearsal(heat_j_per_k, save_s=3.0)
    rehearsal.run(40.0, lose_flow)
    assert rehearsal.order() == [
        (REPORT, "rack r1"), (STOP, "n1"), (STOP, "n2"), (SAVE, "7"), (OFF, "n1"), (OFF, "n2"),
    ]  # fmt: skip
    job = rehearsal.fleet.jobs[0]
    assert job.saved_at is not None
    assert job.saved_at < rehearsal.fleet.off_at["n1"]
    assert max(rehearsal.fleet.peaks_c.values()) < 90.0
    assert rehearsal.time_of(REPORT, "rack r1") <= 2.0
    assert rehearsal.fleet.temperatures_c["n3"] == pytest.approx(60.0)
    assert "n3" not in rehearsal.fleet.drained


def test_without_a_response_it_is_at_90_degrees_in_9_seconds() -> None:
    rehearsal = Rehearsal(may_act=False)
    rehearsal.run(FAULT_S + 8.0, lose_flow)
    assert rehearsal.fleet.temperatures_c["n1"] < 90.0
    rehearsal.run(FAULT_S + 10.0, lambda fleet: None, at_s=1e9)
    assert rehearsal.fleet.temperatures_c["n1"] > 90.0


@pytest.mark.parametrize("at_s", [10.0, 10.3, 10.6, 10.9])
def test_the_moment_of_the_fault_does_not_matter(at_s: float) -> None:
    rehearsal = Rehearsal(save_s=None)
    rehearsal.run(40.0, lose_flow, at_s)
    assert max(rehearsal.fleet.peaks_c.values()) < 90.0


def test_a_save_that_takes_too_long_is_not_waited_for() -> None:
    rehearsal = Rehearsal(save_s=60.0)
    rehearsal.run(40.0, lose_flow)
    assert (SAVE, "7") not in rehearsal.order()
    assert next(each.text for each in rehearsal.events if each.action is OFF) == "no time to save"
    assert rehearsal.time_of(OFF, "n1") == rehearsal.time_of(REPORT, "rack r1")


def test_power_goes_off_as_soon_as_all_jobs_have_saved() -> None:
    rehearsal = Rehearsal(600.0, save_s=2.0)
    rehearsal.run(40.0, lose_flow)
    assert 2.0 <= rehearsal.time_of(OFF, "n1") - rehearsal.time_of(SAVE, "7") <= 2.21
    assert next(each.text for each in rehearsal.events if each.action is OFF) == "its jobs have saved"


def test_a_save_that_is_late_does_not_delay_power_off_beyond_its_time() -> None:
    rehearsal = Rehearsal(600.0, save_s=4.0)
    rehearsal.fleet.jobs[0].save_s = 4.0
    rehearsal.run(13.0, lose_flow)
    rehearsal.fleet.jobs[0].save_s = 100.0
    rehearsal.run(40.0, lambda fleet: None, at_s=1e9)
    assert rehearsal.time_of(OFF, "n1") <= rehearsal.time_of(SAVE, "7") + 5.0
    assert max(rehearsal.fleet.peaks_c.values()) < 90.0


def test_a_leak_asks_for_isolation_before_it_saves() -> None:
    rehearsal = Rehearsal()
    rehearsal.run(40.0, lambda fleet: fleet.leaks.add("r1"))
    assert [action for action, _ in rehearsal.order()] == [REPORT, STOP, STOP, ISOLATE, SAVE, OFF, OFF]
    assert rehearsal.fleet.isolated == ["rack r1"]


def test_an_action_that_fails_does_not_keep_the_next_ones_from_being_done() -> None:
    rehearsal = Rehearsal()
    rehearsal.fleet.failing = {"stop_scheduling", "request_save", "request_isolation"}
    rehearsal.run(40.0, lambda fleet: fleet.leaks.add("r1"))
    assert [action for action, _ in rehearsal.order()] == [REPORT, STOP, STOP, ISOLATE, SAVE, OFF, OFF]
    assert {each.problem for each in rehearsal.events if each.action is STOP} == {"stop_scheduling is refused"}
    assert set(rehearsal.fleet.off_at) == {"n1", "n2"}


def test_without_permission_everything_is_reported_and_nothing_done() -> None:
    rehearsal = Rehearsal(may_act=False)
    rehearsal.run(40.0, lose_flow)
    assert [action for action, _ in rehearsal.order()][:6] == [REPORT, STOP, STOP, SAVE, OFF, OFF]
    assert [each.is_done for each in rehearsal.events][:6] == [True] + [False] * 5
    assert (rehearsal.fleet.drained, rehearsal.fleet.off_at, rehearsal.fleet.jobs[0].asked_at) == ({}, {}, None)


def test_a_lasting_fault_is_responded_to_once() -> None:
    rehearsal = Rehearsal()
    rehearsal.run(60.0, lambda fleet: fleet.leaks.add("r1"))
    assert len(rehearsal.events) == 7


def detect(samples: list[list[RackSample]], cdu_racks: dict[str, tuple[str, ...]] | None = None) -> FaultDetector:
    detector = FaultDetector(CooledNodes(RACKS, cdu_racks or {}), 0.2)
    for second, racks in enumerate(samples):
        detector.find_faults(racks, {}, second)
    return detector


def test_one_reading_alone_is_no_fault() -> None:
    detector = FaultDetector(CooledNodes(RACKS), 0.2)
    leak, dry = [RackSample(id="r1", has_leak=True)], [RackSample(id="r1", has_leak=False)]
    found = [detector.find_faults(racks, {}, second) for second, racks in enumerate([leak, dry, leak, leak, leak])]
    assert [len(each) for each in found] == [0, 0, 0, 1, 1]


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


def test_a_leak_at_a_cdu_powers_no_rack_off() -> None:
    leak = [RackSample(id="c1", equipment="CDU", has_leak=True)]
    detector = detect([leak] * 3, {"c1": ("r1",)})
    (fault,) = detector.find_faults(leak, {}, 3.0)
    assert (fault.nodes, fault.needs_power_off) == (("n1", "n2"), False)


def test_a_node_in_air_at_its_limit_is_drained_and_not_powered_off() -> None:
    detector = FaultDetector(CooledNodes({"wet": "r1"}), 0.2)
    for second in range(4):
        faults = detector.find_faults([], {"dry": 0.0, "wet": 0.0, "cool": 12.0, "unknown": None}, second)
    assert [(each.place, each.needs_power_off) for each in faults] == [("dry", False), ("wet", True)]
