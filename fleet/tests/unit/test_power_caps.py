"""Caps that keep a tree of budgets: committed, curves, allocation, plans, the keeper of a node, and the guard."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from faulty_fleet import FakeClock, FakeLinks, FakeNetwork, FakeNode, FaultyCapDevice, make_fake_nodes
from phalanx.errors import DataError, RecipeError
from phalanx_fleet.power.allocation import NodeCaps, PoweredJob, allocate_caps
from phalanx_fleet.power.committed_power import CapWrite, find_committed_w, find_excesses, list_budgets, plan_writes
from phalanx_fleet.power.control import load_jobs_file
from phalanx_fleet.power.devices import CapError, CapLimits, RaplCapDevice, open_nvml_devices
from phalanx_fleet.power.guard import GuardIdentity, NodeAccount, PowerGuard, plan_fallbacks
from phalanx_fleet.power.messages import (
    DeviceCap,
    NodeReport,
    NodeRequest,
    WireError,
    format_line,
    parse_report,
    parse_request,
)
from phalanx_fleet.power.node_keeper import NodeKeeper
from phalanx_fleet.power.speed_curve import SpeedCurve, SweepPoint
from phalanx_fleet.power_settings import PowerSettings
from phalanx_fleet.power_tree import BudgetLevel, NodePower, PoweredNode, PowerTree

POWER = NodePower(2, 700.0, 70.0, 500.0, 250.0, 200.0)
LIMITS = NodeCaps(200.0, 700.0, 2)


def list_violations(
    tree: PowerTree,
    bounds_w: Sequence[Sequence[float | None]],
    writes: Sequence[CapWrite],
    budgets_w: Sequence[float | None],
    margin: float,
) -> list[str]:
    """Return every state on the way that is over a budget where the state before was not: none, for a plan."""
    caps: list[Sequence[float | None]] = [list(each) for each in bounds_w]
    committed = [find_committed_w(node.power, each, margin) for node, each in zip(tree.nodes, caps, strict=True)]
    was_over = {each.label for each in find_excesses(tree, committed, budgets_w)}
    found = []
    for number, write in enumerate(writes, 1):
        committed[write.node] = find_committed_w(tree.nodes[write.node].power, write.caps_w, margin)
        over = find_excesses(tree, committed, budgets_w)
        found += [f"after write {number}: {each}" for each in over if each.label not in was_over]
        was_over &= {each.label for each in over}
    return found


def make_tree(num_nodes: int = 2, budget_w: float = 3000.0) -> PowerTree:
    levels = (BudgetLevel("site", "s", budget_w), BudgetLevel("rack", "k", None, 0))
    return PowerTree(levels, tuple(PoweredNode(f"n{i}", "h", POWER, 1) for i in range(num_nodes)))


def make_job(name: str, *nodes: int, curve: SpeedCurve | None = None, priority: int = 0) -> PoweredJob:
    return PoweredJob(name, dict.fromkeys(nodes, (0, 1)), {} if curve is None else {"h": curve}, priority)


STEEP = SpeedCurve((200.0, 700.0), (0.3, 1.0), (200.0, 700.0))
FLAT = SpeedCurve((200.0, 300.0, 700.0), (0.9, 1.0, 1.0), (200.0, 290.0, 300.0))


def test_a_silent_device_commits_its_maximum() -> None:
    assert find_committed_w(POWER, [300.0, None], 0.1) == pytest.approx(1000 * 1.1 + 500)


def test_a_curve_of_noisy_points_never_falls() -> None:
    curve = SpeedCurve.fit([SweepPoint(c, r, c) for c, r in ((100, 4.0), (150, 8.0), (200, 7.0), (250, 10.0))])
    assert [curve.speed_at(cap) for cap in (100, 150, 200, 250)] == pytest.approx([0.4, 0.75, 0.75, 1.0])
    assert list(curve.speeds) == sorted(curve.speeds)
    low_w, high_w = curve.find_caps(np.array([0.4, 0.9])).tolist()
    assert low_w == 100.0
    assert curve.speed_at(high_w) == pytest.approx(0.9)


def test_a_sweep_of_one_cap_is_refused() -> None:
    with pytest.raises(DataError, match="at least 2 different caps"):
        SpeedCurve.fit([SweepPoint(100, 1, 1)])


def test_a_sweep_of_which_the_rate_falls_by_more_than_noise_is_refused() -> None:
    points = [SweepPoint(cap, rate, cap) for cap, rate in ((200, 3.2), (377, 3.5), (700, 0.65))]
    with pytest.raises(DataError, match=r"the rate falls from 3.2 at 200 W to 0.65 at 700 W, by more than noise"):
        SpeedCurve.fit(points)


def test_the_lowest_cap_of_a_job_is_one_that_devices_obey() -> None:
    curve = SpeedCurve((100.0, 150.0, 300.0), (0.5, 0.8, 1.0), (121.0, 150.0, 280.0))
    assert curve.lowest_obeyed_cap(0.02) == 150.0


def test_without_a_sweep_all_devices_have_one_cap() -> None:
    tree = make_tree()
    found = allocate_caps(tree, [LIMITS] * 2, [make_job("a", 0), make_job("b", 1)], [3000.0, None], 0.0, 0.3)
    assert [cap for caps in found.caps_w for cap in caps] == pytest.approx([500.0] * 4, abs=0.01)


def test_watts_go_where_they_buy_most_speed() -> None:
    tree, jobs = make_tree(), [make_job("steep", 0, curve=STEEP), make_job("flat", 1, curve=FLAT)]
    found = allocate_caps(tree, [LIMITS] * 2, jobs, [3000.0, None], 0.0, 0.3)
    assert found.caps_w[0][0] == pytest.approx(700.0)
    assert found.caps_w[1][0] == pytest.approx(300.0)
    assert found.speeds == {"steep": pytest.approx(1.0), "flat": pytest.approx(1.0)}


def test_the_last_step_of_a_swept_job_is_as_large_as_its_budget_bears() -> None:
    jobs = [make_job("low", 0, curve=STEEP), make_job("high", 1, curve=STEEP, priority=1)]
    found = allocate_caps(make_tree(), [LIMITS] * 2, jobs, [2813.0, None], 0.0, 0.3)
    assert found.is_within
    assert sum(find_committed_w(POWER, caps, 0.0) for caps in found.caps_w) == pytest.approx(2813.0)
    assert found.speeds["low"] == pytest.approx(STEEP.speed_at(206.5))


def test_all_devices_of_a_job_have_the_cap_of_its_tightest_rack() -> None:
    levels = (BudgetLevel("rack", "a", 1400.0), BudgetLevel("rack", "b", 9000.0))
    tree = PowerTree(levels, (PoweredNode("n0", "h", POWER, 0), PoweredNode("n1", "h", POWER, 1)))
    found = allocate_caps(tree, [LIMITS] * 2, [make_job("a", 0, 1)], [1400.0, 9000.0], 0.0, 0.3)
    assert [cap for caps in found.caps_w for cap in caps] == pytest.approx([450.0] * 4, abs=0.01)


def test_a_job_of_higher_priority_is_slowed_down_last() -> None:
    tree, jobs = make_tree(), [make_job("low", 0, curve=STEEP), make_job("high", 1, curve=STEEP, priority=1)]
    found = allocate_caps(tree, [LIMITS] * 2, jobs, [2800.0, None], 0.0, 0.3)
    assert found.speeds["high"] == pytest.approx(1.0)
    assert (found.speeds["low"] or 1.0) < 0.5


def test_budgets_that_the_lowest_caps_exceed_are_not_within() -> None:
    found = allocate_caps(make_tree(), [LIMITS, None], [], [2000.0, None], 0.0, 0.3)
    assert not found.is_within


@pytest.mark.parametrize("seed", range(10))
def test_every_state_of_a_plan_is_within_the_budgets(seed: int) -> None:
    source = random.Random(seed)
    tree = make_tree(4, source.uniform(3700, 7700))
    before = [[source.uniform(200, 700)] * 2 for _ in range(4)]
    jobs = [make_job(f"j{i}", i, curve=source.choice([STEEP, FLAT])) for i in range(3)]
    target = allocate_caps(tree, [LIMITS] * 4, jobs, list_budgets(tree), 0.02, 0.3).caps_w
    writes = plan_writes(tree, before, target, list_budgets(tree), 0.02)
    assert list_violations(tree, before, writes, list_budgets(tree), 0.02) == []
    assert [w.is_raise for w in writes] == sorted(w.is_raise for w in writes)


def make_node(clock: FakeClock) -> FakeNode:
    devices = [FaultyCapDevice(f"g{i}", clock, CapLimits(200, 700, 700), lambda t: 600.0) for i in range(2)]
    return FakeNode("n0", devices, clock)


def order(node: FakeNode, seq: int, cap_w: float, epoch: int = 1, lease_s: float = 30.0) -> NodeReport:
    assert node.keeper is not None
    session = node.keeper.answer(NodeRequest(seq - 1, epoch, "g", takes_over=True)).session
    request = NodeRequest(seq, epoch, "g", False, session, (cap_w,) * 2, (300.0,) * 2, lease_s)
    return node.keeper.answer(request)


@pytest.fixture
def node() -> FakeNode:
    """A node whose devices have had an order of 400 W."""
    node = make_node(FakeClock())
    order(node, 2, 400.0)
    return node


def test_a_lease_ends_without_the_guard() -> None:
    clock = FakeClock()
    node = make_node(clock)
    assert order(node, 2, 600.0).devices[0].cap_w == 600.0
    clock.now = 31.0
    node.check()
    assert [device.cap_w for device in node.devices] == [300.0, 300.0]


def test_what_is_below_the_fallback_is_not_raised_when_the_lease_ends() -> None:
    clock = FakeClock()
    node = make_node(clock)
    order(node, 2, 250.0)
    clock.now = 31.0
    node.check()
    assert node.devices[0].cap_w == 250.0


def test_a_restarted_node_is_capped_before_it_gets_work() -> None:
    node = make_node(FakeClock())
    order(node, 2, 600.0)
    node.crash()
    before = node.has_job
    node.start_keeper(at_boot=True)
    assert (before, node.has_job) == (False, True)
    assert [device.cap_w for device in node.devices] == [300.0, 300.0]


def test_nothing_is_raised_when_a_device_does_not_follow(node: FakeNode) -> None:
    node.devices[0].ignores_writes = True
    assert node.keeper is not None
    session = node.keeper.answer(NodeRequest(3, 1, "g")).session
    report = node.keeper.answer(NodeRequest(4, 1, "g", False, session, (300.0, 500.0), (300.0,) * 2, 30.0))
    assert report.refusal == "a device was not lowered, so nothing is raised"
    assert [device.cap_w for device in report.devices] == [400.0, 400.0]


def test_a_full_disk_stops_raises_and_keeps_the_higher_committed_power(node: FakeNode) -> None:
    node.store.fails = True
    report = order(node, 4, 300.0)
    assert "the record cannot be written" in report.refusal
    assert (node.devices[0].cap_w, report.devices[0].cap_w) == (300.0, 400.0)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"epoch": 0}, "g with epoch 1 has this node"),
        ({"session": "old"}, "the order is of before this node's restart"),
        ({"seq": 2}, "request 2 came after request 2"),
        ({"lease_s": 61.0}, "a lease of 61 s; expected up to 60 s"),
        ({"caps_w": (100.0, 100.0)}, "g0 takes caps from 200 to 700 W, not 100 W"),
        ({"caps_w": (300.0,)}, "1 caps and 2 fallbacks for 2 devices"),
    ],
)
def test_an_order_is_refused(change: dict[str, object], refusal: str) -> None:
    node = make_node(FakeClock())
    report = order(node, 2, 400.0)
    assert node.keeper is not None
    request = NodeRequest(9, 1, "g", False, report.session, (300.0,) * 2, (300.0,) * 2, 30.0)
    assert node.keeper.answer(replace(request, **change)).refusal == refusal  # type: ignore[arg-type]
    assert node.devices[0].cap_w == 400.0


def test_a_keeper_that_only_reads_lowers_nothing() -> None:
    node = make_node(FakeClock())
    order(node, 2, 600.0)
    reader = NodeKeeper("n0", node.devices, node.store, node.now, is_read_only=True)
    reader.end_lease()
    report = reader.answer(NodeRequest(1, 9, "x", takes_over=True))
    assert (report.refusal, node.devices[0].cap_w) == ("this keeper only reads", 600.0)


def test_a_cap_that_someone_else_set_is_reported(node: FakeNode) -> None:
    node.devices[0].put_cap(500.0)
    assert order(node, 4, 400.0).foreign_change == "g0 has a cap of 500 W; 400 W were written"


def test_a_device_that_restarted_is_capped_again(node: FakeNode) -> None:
    node.reload_driver()
    node.check()
    assert (node.devices[0].cap_w, node.has_job) == (400.0, True)


def make_report(seq: int, newest: int, cap_w: float) -> NodeReport:
    return NodeReport("n0", "s", seq, newest, 1, "g", (DeviceCap("g0", cap_w, 200, 700, 100.0),))


def test_a_raise_that_was_sent_counts_and_a_lowering_does_not() -> None:
    account = NodeAccount(1, "g", fresh_s=3.0)
    account.add_request(NodeRequest(1, 1, "g"), 0.0)
    assert account.add_report(make_report(1, 1, 300.0))
    account.add_request(NodeRequest(2, 1, "g", session="s", caps_w=(500.0,)), 0.1)
    account.add_request(NodeRequest(3, 1, "g", session="s", caps_w=(250.0,)), 0.2)
    assert account.bound_caps(0.3, 1) == [500.0]
    assert account.add_report(make_report(3, 3, 250.0))
    assert account.bound_caps(0.3, 1) == [250.0]


def test_a_late_report_is_missing_and_an_older_one_is_ignored() -> None:
    account = NodeAccount(1, "g", fresh_s=3.0)
    for seq in (1, 2):
        account.add_request(NodeRequest(seq, 1, "g"), float(seq))
    assert account.add_report(make_report(2, 2, 300.0))
    assert not account.add_report(make_report(1, 1, 200.0))
    assert account.bound_caps(5.1, 1) == [None]


def make_guard(clock: FakeClock, budget_w: float = 6000.0) -> tuple[PowerGuard, list[FakeNode], FakeNetwork, PowerTree]:
    tree, network, settings = make_tree(4, budget_w), FakeNetwork(), PowerSettings()
    nodes = make_fake_nodes(tree.nodes, clock)
    links = FakeLinks(nodes, clock, network, random.Random(0))
    jobs = [make_job(f"j{i}", i) for i in range(4)]
    budgets = list_budgets(tree)
    fallbacks, _ = plan_fallbacks(tree, budgets, settings)
    identity = GuardIdentity(1, "g")
    return PowerGuard(tree, settings, identity, links, lambda: jobs, lambda: budgets, fallbacks), nodes, network, tree


def run_guard_for(guard: PowerGuard, nodes: list[FakeNode], clock: FakeClock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now += 1.0
        for node in nodes:
            node.check()
        if clock.now % 2 == 0:
            guard.step(clock.now)


def test_a_guard_brings_a_fleet_below_its_budget() -> None:
    clock = FakeClock()
    guard, nodes, _, tree = make_guard(clock)
    run_guard_for(guard, nodes, clock, 10)
    committed = [node.committed_w(500.0, 0.02) for node in nodes]
    assert find_excesses(tree, committed, list_budgets(tree)) == []
    assert sum(committed) > 5900


def test_the_others_make_way_for_a_silent_node() -> None:
    clock = FakeClock()
    guard, nodes, network, _ = make_guard(clock, 6600.0)
    run_guard_for(guard, nodes, clock, 20)
    network.lost_nodes.add("n3")
    run_guard_for(guard, nodes, clock, 20)
    others = [node.committed_w(500.0, 0.02) for node in nodes[:3]]
    assert sum(others) + 1400 * 1.02 + 500 <= 6600.0 + 1e-6


def test_a_guard_that_cannot_be_safe_says_so() -> None:
    clock = FakeClock()
    guard, nodes, network, _ = make_guard(clock, 4400.0)
    run_guard_for(guard, nodes, clock, 20)
    network.lost_nodes |= {"n2", "n3"}
    run_guard_for(guard, nodes, clock, 20)
    assert "site s: 5672 W of a budget of 4400 W at the lowest caps" in guard.step(clock.now).unsafe[0]


def test_a_guard_that_has_lost_its_rights_says_so() -> None:
    clock = FakeClock()
    guard, nodes, _, _ = make_guard(clock)
    for device in nodes[0].devices:
        device.fails_writes = True
    run_guard_for(guard, nodes, clock, 20)
    status = guard.step(clock.now)
    assert "caps are not lowered as asked" in status.unsafe[0]
    assert "n0: a device was not lowered, so nothing is raised" in status.notices


def test_devices_that_exceed_their_caps_are_lowered_until_the_measured_power_fits() -> None:
    clock = FakeClock()
    guard, nodes, _, _ = make_guard(clock)
    for node in nodes:
        for device in node.devices:
            device.overshoot, device.demand_w = 0.15, lambda t: 700.0
    run_guard_for(guard, nodes, clock, 120)
    measured = sum(device.draw_at(clock.now) + 250.0 for node in nodes for device in node.devices)
    assert measured <= 6000.0 * 1.01


def test_messages_survive_the_wire() -> None:
    request = NodeRequest(3, 1, "g", False, "s", (300.0, 400.0), (300.0, 300.0), 30.0)
    report = make_report(1, 1, 300.0)
    assert parse_request(format_line(request)) == request
    assert parse_report(format_line(report)) == report
    for line in (b"", b"[]", b"{}", b'{"kind": "node_request", "seq": "x"}', b"\xff" * 10):
        with pytest.raises(WireError):
            parse_request(line)


class NvmlOfOneGpu:
    """The functions of pynvml that set caps."""

    class NVMLError(Exception):
        """An error of the driver."""

    def __init__(self, may_write: bool) -> None:
        self.limit_mw, self.may_write = 700_000, may_write

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> SimpleNamespace:
        return SimpleNamespace()

    def nvmlDeviceGetUUID(self, gpu: object) -> bytes:
        return b"GPU-a"

    def nvmlDeviceGetPowerManagementLimitConstraints(self, gpu: object) -> tuple[int, int]:
        return 200_000, 700_000

    def nvmlDeviceGetPowerManagementDefaultLimit(self, gpu: object) -> int:
        return 700_000

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: object) -> int:
        return self.limit_mw

    def nvmlDeviceSetPowerManagementLimit(self, gpu: object, limit_mw: int) -> None:
        if not self.may_write:
            raise self.NVMLError("Insufficient Permissions")
        self.limit_mw = limit_mw


def test_a_gpu_is_capped_in_milliwatts() -> None:
    library = NvmlOfOneGpu(may_write=True)
    (device,) = open_nvml_devices(library)
    device.set_cap_w(450.0)
    assert (library.limit_mw, device.read_cap_w()) == (450_000, 450.0)
    assert device.read_limits() == CapLimits(200.0, 700.0, 700.0)


def test_lost_rights_are_named() -> None:
    (device,) = open_nvml_devices(NvmlOfOneGpu(may_write=False))
    with pytest.raises(CapError, match="GPU-a: nvmlDeviceSetPowerManagementLimit: Insufficient Permissions"):
        device.set_cap_w(450.0)


def test_both_windows_of_a_cpu_package_are_set(tmp_path: Path) -> None:
    for name in ("constraint_0_power_limit_uw", "constraint_1_power_limit_uw", "constraint_0_max_power_uw"):
        (tmp_path / name).write_text("360000000")
    device = RaplCapDevice(tmp_path)
    device.set_cap_w(200.0)
    assert device.read_cap_w() == 200.0
    assert (tmp_path / "constraint_1_power_limit_uw").read_text() == "200000000"


TWO_CAPS = "[{cap: 300 W, rate: 1, draw: 1 W}, {cap: 900 W, rate: 2, draw: 2 W}]"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("jobs: {a: {nodes: n7}}", "n7: no such node"),
        ("jobs: {a: {nodes: n0}, b: {nodes: n0}}", "n0 is of job a, too"),
        ("jobs: {a: {nodes: n0, sweep: {h: [{cap: 300, rate: 1, draw: 1 W}]}}}", "expected a power with its unit"),
        ("jobs: {a: {nodes: n0, sweep: {h: [{cap: 300 W, rate: 1, draw: 1 W}]}}}", "at least 2 different caps"),
        (f"jobs: {{a: {{nodes: n0, sweep: {{x: {TWO_CAPS}}}}}}}", "x: no node type of its nodes; they are h"),
        (f"jobs: {{a: {{nodes: n0, sweep: {{h: {TWO_CAPS}}}}}}}", "a device takes caps from 200 to 700 W, not 900 W"),
        (f"jobs: {{a: {{nodes: n0, run: r, sweep: {{h: {TWO_CAPS}}}}}}}", "expected one of `sweep` and `run`"),
    ],
)
def test_a_wrong_jobs_file_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "jobs.yaml").write_text(text)
    with pytest.raises(RecipeError, match=problem):
        load_jobs_file(tmp_path / "jobs.yaml", make_tree())
