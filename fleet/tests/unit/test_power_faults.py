"""A fault of one node, rack or connection lowers, blocks and blinds nothing else that power control holds."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from faulty_fleet import (
    FakeClock,
    FakeLinks,
    FakeNetwork,
    FakeNode,
    FaultyCapDevice,
    FaultyStore,
    make_fake_nodes,
)
from phalanx_fleet.power.allocation import NodeCaps, NodeLimit, PoweredJob, allocate_caps
from phalanx_fleet.power.committed_power import list_budgets
from phalanx_fleet.power.control import PowerReading, load_power_fleet, open_guard
from phalanx_fleet.power.devices import CapLimits, TimedDevice
from phalanx_fleet.power.guard import GuardIdentity, LostNodeError, PowerGuard, group_by_rack, plan_fallbacks
from phalanx_fleet.power.links import ANSWER_TIMEOUT_S, END_TIMEOUT_S, HelperConnection, HelperLinks, LocalLinks
from phalanx_fleet.power.messages import MAX_EPOCH, NodeReport, NodeRequest, WireError, format_line, parse_report
from phalanx_fleet.power.node_helper import MAX_CONNECTIONS, NodeHelper, PeerList
from phalanx_fleet.power.node_keeper import NodeKeeper
from phalanx_fleet.power.speed_curve import SpeedCurve
from phalanx_fleet.power_settings import PowerSettings
from phalanx_fleet.power_tree import BudgetLevel, NodePower, PoweredNode, PowerTree

DGX = NodePower(8, 700.0, 70.0, 4600.0, 2300.0, 200.0)
LIMITS = NodeCaps(200.0, 700.0, 8)


def make_tree(*budgets_w: float | None, nodes: int = 4) -> PowerTree:
    """Return a site without a budget and racks with these."""
    racks = [BudgetLevel("rack", f"k{index}", budget_w, 0) for index, budget_w in enumerate(budgets_w)]
    places = [(rack, number) for rack in range(len(racks)) for number in range(nodes)]
    return PowerTree(
        (BudgetLevel("site", "s", None), *racks),
        tuple(PoweredNode(f"k{rack}-{number}", "h100", DGX, 1 + rack) for rack, number in places),
    )


@pytest.mark.parametrize("min_cap_share", [0.0, 0.3])
def test_a_rack_that_does_not_fit_lowers_no_other_one(min_cap_share: float) -> None:
    tree = make_tree(25_600.0, None, 45_000.0)
    limits: list[NodeLimit] = [None, *[LIMITS] * 11]
    found = allocate_caps(tree, limits, group_by_rack(tree), list_budgets(tree), 0.02, min_cap_share)
    assert found.caps_w == [[], *[[200.0] * 8] * 3, *[[700.0] * 8] * 8]
    assert not found.is_within


@pytest.mark.parametrize("seed", range(10))
def test_watts_lost_outside_of_what_does_not_fit_are_zero(seed: int) -> None:
    source = random.Random(seed)
    full_w, low_w = 4 * (4600.0 + 5600.0 * 1.02), 4 * (4600.0 + 1600.0 * 1.02)
    tree = make_tree(low_w + 1.0, *[source.choice([None, source.uniform(low_w, full_w)]) for _ in range(3)])
    knee_w = source.uniform(250.0, 600.0)
    curve = SpeedCurve((200.0, knee_w, 700.0), (0.3, 0.95, 1.0), (200.0, knee_w, 700.0))
    jobs = [
        PoweredJob(f"j{node}", {node: tuple(range(8))}, {"h100": curve} if source.random() < 0.5 else {})
        for node in range(16)
        if source.random() < 0.8
    ]
    budgets_w, share = list_budgets(tree), source.choice([0.0, 0.3])
    healthy = allocate_caps(tree, [LIMITS] * 16, jobs, [None, None, *budgets_w[2:]], 0.02, share)
    broken = allocate_caps(tree, [None, *[LIMITS] * 15], jobs, budgets_w, 0.02, share)
    assert not broken.is_within
    pairs = zip(healthy.caps_w[4:], broken.caps_w[4:], strict=True)
    lost_w = sum(before - after for pair in pairs for before, after in zip(*pair, strict=True))
    assert abs(lost_w) < 0.1


class Bench:
    """A guard, its nodes in two racks without a common budget, and its clock."""

    def __init__(self) -> None:
        self.tree, self.clock, self.settings = make_tree(25_600.0, 45_000.0), FakeClock(), PowerSettings()
        self.nodes = make_fake_nodes(self.tree.nodes, self.clock)
        self.network = FakeNetwork()
        links = FakeLinks(self.nodes, self.clock, self.network, random.Random(0))
        jobs, budgets_w = group_by_rack(self.tree), list_budgets(self.tree)
        fallbacks, _ = plan_fallbacks(self.tree, budgets_w, self.settings)
        identity = GuardIdentity(1, "g")
        self.guard = PowerGuard(self.tree, self.settings, identity, links, lambda: jobs, lambda: budgets_w, fallbacks)
        self.fallback_w = fallbacks[0][0]
        self.notices: list[str] = []

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.now += 1.0
            for node in self.nodes:
                node.check()
            if self.clock.now % 2 == 0:
                self.notices += self.guard.step(self.clock.now).notices

    def caps_w(self, rack: int) -> set[int]:
        return {round(device.cap_w) for node in self.nodes[4 * rack : 4 * rack + 4] for device in node.devices}

    def keeper(self, node: int) -> NodeKeeper:
        keeper = self.nodes[node].keeper
        assert keeper is not None
        return keeper


def test_the_leases_of_other_racks_are_renewed_while_one_rack_is_over_its_budget() -> None:
    bench = Bench()
    bench.run(60)
    assert bench.caps_w(1) == {700}
    bench.network.lost_nodes.add("k0-0")
    bench.nodes[0].stop_keeper()
    bench.run(120)
    assert bench.caps_w(1) == {700}
    assert max(bench.caps_w(0)) <= 700  # the lost one keeps its cap; its keeper is gone


def test_a_device_that_someone_else_has_capped_costs_its_rack_at_most_its_fallback() -> None:
    bench = Bench()
    bench.run(60)
    bench.nodes[0].devices[0].put_cap(210.0)  # nvidia-smi -pl, or the power brake of a BMC
    bench.run(120)
    assert bench.caps_w(1) == {700}
    (bound,) = {*bench.guard.bound_caps(bench.clock.now)[0]}
    assert bound == pytest.approx(bench.fallback_w + 1.0)
    assert any("it takes no orders until a guard is started with --take-over" in text for text in bench.notices)


def test_a_device_that_reports_an_impossible_draw_lowers_nothing() -> None:
    bench = Bench()
    bench.run(60)
    bench.nodes[0].devices[0].noise_w = 1e12
    before = bench.caps_w(0)
    bench.run(60)
    assert bench.caps_w(0) == before


def test_a_node_that_comes_back_with_an_older_guards_higher_epoch_is_taken_over() -> None:
    bench = Bench()
    bench.run(20)
    bench.keeper(0).answer(NodeRequest(1, 12, "guard-of-last-month", takes_over=True))
    bench.run(60)  # what this guard lent it has ended meanwhile
    assert bench.guard._accounts[0].is_owned()
    assert bench.keeper(0).record.epoch == 13
    assert bench.caps_w(1) == {700}


def test_a_node_that_another_guard_holds_is_left_to_it_and_the_others_are_kept() -> None:
    bench = Bench()
    bench.run(20)
    bench.keeper(0).answer(NodeRequest(1, 12, "other", takes_over=True))
    for seq in range(2, 12):
        session = bench.keeper(0).answer(NodeRequest(seq, 12, "other")).session
        caps, fallback = (300.0,) * 8, (200.0,) * 8
        bench.keeper(0).answer(NodeRequest(100 * seq, 12, "other", False, session, caps, fallback, 30.0))
        bench.run(10)
    assert bench.keeper(0).record.writer == "other"
    assert bench.caps_w(1) == {700}
    assert any("other has it with epoch 12 and a lease of" in text for text in bench.notices)


def test_a_guard_stops_when_another_one_has_all_nodes_that_answer() -> None:
    bench = Bench()
    bench.run(20)
    for node in range(8):
        bench.keeper(node).answer(NodeRequest(1, 2, "other", takes_over=True))
    with pytest.raises(LostNodeError, match="other has taken over k0-0 with epoch 2, and no node is left"):
        bench.run(6)


def test_a_node_that_reports_the_highest_epoch_leaves_one_for_the_others() -> None:
    with pytest.raises(WireError, match="epoch"):
        parse_report(format_line(NodeReport("n", "s", 1, 1, MAX_EPOCH + 1, "w")))


class FakeProcess:
    """A process that does not end, and that must not be waited for."""

    pid = 4711

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.stderr = os.fdopen(self.reader, "rb")

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        raise AssertionError("a step waits for a process")


class Peer:
    """The other end of a connection that a process carries."""

    def __init__(self) -> None:
        own, self.socket = socket.socketpair()
        own.setblocking(False)
        self.process = FakeProcess()
        self.connection = HelperConnection(own, cast("subprocess.Popen[bytes]", self.process))

    def close(self) -> None:
        for each in (self.connection.socket, self.socket, self.process.stderr):
            each.close()
        os.close(self.process.writer)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def make_peer() -> Iterator[Callable[[], Peer]]:
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(contextlib.closing(Peer()))


def make_links(clock: FakeClock, peer: Peer) -> HelperLinks:
    return HelperLinks({"n0": lambda: peer.connection}, clock)


def test_a_greeting_before_the_first_report_is_no_fault(clock: FakeClock, make_peer: Callable[[], Peer]) -> None:
    peer = make_peer()
    links = make_links(clock, peer)
    links.send("n0", NodeRequest(1, 1, "g"))
    peer.socket.sendall(b"Welcome to n0\n")
    assert links.receive() == []
    assert "Welcome to n0" in links.problems["n0"]
    peer.socket.sendall(format_line(NodeReport("n0", "s", 1, 1, 1, "g")))
    assert [report.node for report in links.receive()] == ["n0"]
    assert links.problems == {}


def test_no_step_waits_for_a_process_that_does_not_end(
    clock: FakeClock, make_peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: signals.append(number))
    peer = make_peer()
    links = make_links(clock, peer)
    links.send("n0", NodeRequest(1, 1, "g"))
    peer.socket.close()
    for seconds in (0.0, 1.0, END_TIMEOUT_S, 2 * END_TIMEOUT_S):
        clock.now = seconds
        assert links.receive() == []
    assert signals == [signal.SIGTERM, signal.SIGKILL]
    os.write(peer.process.writer, b"error: no route\n")
    peer.process.returncode = 1
    links.receive()
    assert links.problems == {"n0": "no route"}


def test_a_process_that_prints_many_errors_is_read(clock: FakeClock, make_peer: Callable[[], Peer]) -> None:
    peer = make_peer()
    links = make_links(clock, peer)
    links.send("n0", NodeRequest(1, 1, "g"))
    os.set_blocking(peer.process.writer, False)
    for _ in range(8):  # a pipe has 64 KiB
        os.write(peer.process.writer, b"x" * (1 << 14))
        links.receive()


def test_a_peer_that_never_answers_is_connected_again(clock: FakeClock, make_peer: Callable[[], Peer]) -> None:
    num_connects = 0

    def connect() -> HelperConnection:
        nonlocal num_connects
        num_connects += 1
        return make_peer().connection

    links = HelperLinks({"n0": connect}, clock)
    for second in range(round(ANSWER_TIMEOUT_S) + 3):
        clock.now = float(second)
        links.send("n0", NodeRequest(second + 1, 1, "g"))
        links.receive()
    assert num_connects == 2
    assert links.problems == {"n0": "no answer for 30 s"}


class Refusing:
    """Allows no user."""

    def find_refusal(self, uid: int, gid: int) -> str:
        return f"user {uid} may not use this helper"


def make_helper(tmp_path: Path, peers: object) -> NodeHelper:
    node = FakeNode("n0", [], FakeClock())
    assert node.keeper is not None
    return NodeHelper("n0", node.keeper, tmp_path / "audit.jsonl", cast(PeerList, peers))


def test_a_user_who_may_not_order_is_told_why_and_holds_no_connection(tmp_path: Path, clock: FakeClock) -> None:
    helper = make_helper(tmp_path, Refusing())
    own, other = socket.socketpair()
    helper.add_connection(other)
    own.setblocking(False)
    links = HelperLinks({"n0": lambda: HelperConnection(own)}, clock)
    links.send("n0", NodeRequest(1, 1, "g"))
    assert links.receive() == []
    assert links.problems == {"n0": f"user {os.getuid()} may not use this helper"}


def test_idle_connections_give_way_to_a_new_one(tmp_path: Path) -> None:
    class Allowing:
        def find_refusal(self, uid: int, gid: int) -> str:
            return ""

    helper = make_helper(tmp_path, Allowing())
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(MAX_CONNECTIONS + 1)]
        for own, other in pairs:
            stack.enter_context(own)
            stack.enter_context(other)
            helper.add_connection(other)
        assert pairs[0][0].recv(1) == b""
        pairs[1][0].setblocking(False)
        with pytest.raises(BlockingIOError):
            pairs[1][0].recv(1)


FLEET = """
name: f
sites: {s: {budget: 20 kW}}
feeds: {a: {site: s}}
rows: {r: {feed: a}}
node_types: {h: {node: dgx-h100}}
racks: {k: {row: r, node_type: h, nodes: 2}}
"""


@pytest.fixture
def fleet_files(tmp_path: Path) -> tuple[Path, Path]:
    fleet, targets = tmp_path / "fleet.yaml", tmp_path / "targets.yaml"
    fleet.write_text(FLEET)
    begin, end = (time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + s)) for s in (-60, 3000))
    target = {"level": "site s", "limit": "15 kW", "start": begin, "end": end}
    targets.write_text(json.dumps({"targets": [target]}))
    return fleet, targets


def test_a_load_target_holds_when_the_clock_is_set(
    fleet_files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = load_power_fleet(fleet_files[0], None, fleet_files[1])
    guard = open_guard(fleet, LocalLinks({}), PowerReading({}, [[None] * 8] * 2), takes_over=False)
    now = time.time()
    for step_s in (-3600.0, 3600.0, 86_400.0):
        monkeypatch.setattr(time, "time", lambda step_s=step_s: now + step_s)
        assert guard._find_budgets() == [15_000.0, None, None, None]


def test_a_driver_that_hangs_on_one_device_keeps_no_other_from_the_end_of_its_lease() -> None:
    clock, limits = FakeClock(), CapLimits(200.0, 700.0, 700.0)
    plain = [FaultyCapDevice(name, clock, limits, lambda _: 600.0) for name in ("gpu-0", "gpu-1")]
    released = threading.Event()
    hanging = TimedDevice(plain[0], timeout_s=0.05)
    keeper = NodeKeeper("n0", [hanging, plain[1]], FaultyStore(), clock)
    keeper.answer(NodeRequest(1, 1, "guard", takes_over=True))
    session = keeper.answer(NodeRequest(2, 1, "guard")).session
    raised = NodeRequest(3, 1, "guard", session=session, caps_w=(600.0,) * 2, fallback_w=(300.0,) * 2, lease_s=30.0)
    assert keeper.answer(raised).refusal == ""
    plain[0].read_cap_w = lambda: [released.wait(60.0), plain[0].cap_w][1]  # type: ignore[method-assign]
    clock.now += 31.0
    keeper.check_lease()
    assert plain[1].cap_w == 300.0
    report = keeper.answer(NodeRequest(4, 1, "guard"))
    assert [device.cap_w for device in report.devices] == [None, 300.0]
    assert any("gpu-0: its driver hangs" in problem for problem in report.problems)
    released.set()
    while hanging.is_hanging():
        time.sleep(0.01)
    keeper.check_lease()
    assert plain[0].cap_w == 300.0
