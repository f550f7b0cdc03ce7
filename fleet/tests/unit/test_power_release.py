"""Give devices their recorded caps back: on release, after crashes, and at the end of a sweep."""

import contextlib
from collections.abc import Sequence

import pytest

from faulty_fleet import FakeClock, FakeNode, FaultyCapDevice
from phalanx_fleet.power.devices import CapLimits
from phalanx_fleet.power.messages import NodeReport, NodeRequest
from phalanx_fleet.power.node_keeper import CapRecord, NodeKeeper
from phalanx_fleet.power.release_caps import find_release_excesses, list_releases
from phalanx_fleet.power_tree import BudgetLevel, NodePower, PoweredNode, PowerTree

LIMITS = CapLimits(200, 700, 700)


def make_node(clock: FakeClock, caps_w: Sequence[float] = (650.0, 600.0)) -> FakeNode:
    devices = [FaultyCapDevice(f"g{i}", clock, LIMITS, lambda t: 600.0) for i in range(len(caps_w))]
    for device, cap_w in zip(devices, caps_w, strict=True):
        device.put_cap(cap_w)
    return FakeNode("n0", devices, clock)


def send(node: FakeNode, seq: int, epoch: int = 1, **fields: object) -> NodeReport:
    assert node.keeper is not None
    session = node.keeper.answer(NodeRequest(seq - 1, epoch, f"g{epoch}", takes_over=True)).session
    return node.keeper.answer(NodeRequest(seq, epoch, f"g{epoch}", session=session, **fields))  # type: ignore[arg-type]


def order(node: FakeNode, seq: int, cap_w: float, reverts: bool = False, lease_s: float = 30.0) -> NodeReport:
    caps = (cap_w,) * 2
    return send(node, seq, caps_w=caps, fallback_w=(300.0,) * 2, lease_s=lease_s, reverts=reverts)


@pytest.fixture
def node() -> FakeNode:
    """A node whose devices have had an order of 400 W."""
    node = make_node(FakeClock())
    order(node, 2, 400.0)
    return node


def caps_of(node: FakeNode) -> list[float]:
    return [device.cap_w for device in node.devices]


def restart_keeper(node: FakeNode) -> None:
    node.stop_keeper()
    node.start_keeper(at_boot=False)


def test_a_release_restores_the_caps_of_before_the_first_order(node: FakeNode) -> None:
    order(node, 4, 350.0)
    report = send(node, 2, epoch=2, releases=True)
    assert (report.refusal, report.problems, caps_of(node)) == ("", (), [650.0, 600.0])
    assert node.keeper is not None
    assert node.keeper.record == CapRecord(2, "g2", ("g0", "g1"))


def test_a_first_order_raises_what_was_below_it() -> None:
    node = make_node(FakeClock())
    assert order(node, 2, 690.0).refusal == ""
    assert caps_of(node) == [690.0, 690.0]


@pytest.mark.parametrize("crash", ["keeper", "node"])
def test_a_release_restores_also_after_a_crash(node: FakeNode, crash: str) -> None:
    if crash == "keeper":
        restart_keeper(node)
    else:
        node.crash()
        node.start_keeper(at_boot=True)
    assert caps_of(node) == [300.0, 300.0]
    assert send(node, 2, epoch=2, releases=True).refusal == ""
    assert caps_of(node) == [650.0, 600.0]


def test_a_released_node_starts_with_the_caps_that_it_has(node: FakeNode) -> None:
    send(node, 2, epoch=2, releases=True)
    restart_keeper(node)
    assert caps_of(node) == [650.0, 600.0]


@pytest.mark.parametrize("is_running", [True, False])
def test_a_cap_that_another_program_has_set_is_left(node: FakeNode, is_running: bool) -> None:
    if not is_running:
        node.stop_keeper()
    node.devices[1].put_cap(250.0)
    if not is_running:
        node.start_keeper(at_boot=False)
    report = send(node, 2, epoch=2, releases=True)
    assert (report.refusal, caps_of(node)) == ("", [650.0, 250.0])
    assert "g1: 250 W were set by another program, and are left as they are" in report.problems


@pytest.mark.parametrize("num_writes", range(5))
def test_a_half_done_order_is_not_taken_for_a_foreign_change(node: FakeNode, num_writes: int) -> None:
    writes = 0

    def put_cap(device: FaultyCapDevice, cap_w: float) -> None:
        nonlocal writes
        if writes == num_writes:
            raise KeyboardInterrupt
        writes += 1
        device.history.append((0.0, cap_w))

    for device in node.devices:
        device.set_cap_w = lambda cap_w, device=device: put_cap(device, cap_w)  # type: ignore[method-assign]
    with contextlib.suppress(KeyboardInterrupt):
        send(node, 4, caps_w=(500.0, 350.0), fallback_w=(300.0,) * 2, lease_s=30.0)
        send(node, 6, caps_w=(320.0, 450.0), fallback_w=(300.0,) * 2, lease_s=30.0)
    for device in node.devices:
        del device.set_cap_w  # type: ignore[method-assign]
    restart_keeper(node)
    report = send(node, 2, epoch=2, releases=True)
    assert (report.problems, caps_of(node)) == ((), [650.0, 600.0])


def test_a_device_that_does_not_answer_is_named_and_can_be_released_later(node: FakeNode) -> None:
    node.devices[0].fails_writes = True
    report = send(node, 2, epoch=2, releases=True)
    assert report.refusal == "not restored: g0; release this node again when they answer"
    assert caps_of(node) == [400.0, 600.0]
    node.devices[0].fails_writes = False
    assert send(node, 4, epoch=2, releases=True).refusal == ""
    assert caps_of(node) == [650.0, 600.0]


def test_an_exchanged_device_gets_its_factory_limit_at_a_release(node: FakeNode) -> None:
    node.devices[1] = FaultyCapDevice("new", node.now, LIMITS, lambda t: 600.0)
    restart_keeper(node)
    assert caps_of(node) == [200.0, 200.0]
    assert send(node, 2, epoch=2, releases=True).refusal == ""
    assert caps_of(node) == [650.0, 700.0]


def test_a_damaged_record_means_the_lowest_caps(node: FakeNode) -> None:
    node.store.record = CapRecord()
    restart_keeper(node)
    assert caps_of(node) == [200.0, 200.0]


def test_a_keeper_that_only_reads_lists_what_its_start_would_lower() -> None:
    node = make_node(FakeClock())
    keeper = NodeKeeper("n0", node.devices, node.store, node.now, starts_lowest=True, is_read_only=True)
    assert keeper.start_writes == [("g0", 650.0, 200.0), ("g1", 600.0, 200.0)]
    assert caps_of(node) == [650.0, 600.0]


def test_the_old_caps_come_back_when_the_lease_of_a_sweep_ends() -> None:
    clock = FakeClock()
    node = make_node(clock)
    report = order(node, 2, 250.0, reverts=True)
    assert [device.cap_w for device in report.devices] == [650.0, 600.0]  # what comes back counts already
    order(node, 4, 200.0, reverts=True)
    clock.now = 31.0
    node.check()
    assert caps_of(node) == [650.0, 600.0]
    assert node.keeper is not None
    assert node.keeper.record.caps_w == ()


def test_the_old_caps_come_back_when_the_keeper_is_killed_in_a_sweep() -> None:
    node = make_node(FakeClock())
    order(node, 2, 250.0, reverts=True)
    restart_keeper(node)
    node.check()
    assert caps_of(node) == [650.0, 600.0]


def test_a_guard_that_takes_over_ends_the_return_to_old_caps() -> None:
    clock = FakeClock()
    node = make_node(clock)
    order(node, 2, 250.0, reverts=True)
    send(node, 2, epoch=2, caps_w=(280.0,) * 2, fallback_w=(260.0,) * 2, lease_s=30.0)
    clock.now = 31.0
    node.check()
    assert caps_of(node) == [260.0, 260.0]


def test_a_sweep_of_a_held_node_returns_to_its_held_caps_and_stays_held() -> None:
    clock = FakeClock()
    node = make_node(clock)
    order(node, 2, 400.0)
    order(node, 4, 250.0, reverts=True)
    clock.now = 31.0
    node.check()
    assert caps_of(node) == [400.0, 400.0]
    node.check()
    assert caps_of(node) == [300.0, 300.0]  # its lease has ended, too


def test_a_release_that_breaks_a_budget_is_found() -> None:
    power = NodePower(2, 700.0, 70.0, 500.0, 250.0, 200.0)
    tree = PowerTree((BudgetLevel("site", "s", 1500.0),), (PoweredNode("n0", "h", power, 0),))
    node = make_node(FakeClock())
    report = order(node, 2, 400.0)
    writes = list_releases({"n0": report}, ["n0", "n1"])
    assert [str(each) for each in writes] == ["restore n0: g0: 400 W -> 650 W", "restore n0: g1: 400 W -> 600 W"]
    (excess,) = find_release_excesses(tree, [[400.0, 400.0]], writes, [1500.0], 0.0)
    assert str(excess) == "site s: 1750 W of a budget of 1500 W"
