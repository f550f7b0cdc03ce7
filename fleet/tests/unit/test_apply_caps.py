"""`phalanx power guard --once` on a fake fleet."""

import random
from pathlib import Path

import pytest

from faulty_fleet import FakeClock, FakeLinks, FakeNetwork, make_fake_nodes
from phalanx.errors import UnfitNodeError, UsageError
from phalanx_fleet.audit_log import write_audit
from phalanx_fleet.commands.power_output import format_plan, plan_to_json
from phalanx_fleet.power import control as power
from phalanx_fleet.power.control import AuditLog, apply_caps, load_power_fleet, open_guard, plan_caps, read_nodes

FLEET = """
name: t
sites: {s: {budget: 15 kW}}
feeds: {a: {site: s}}
rows: {r: {feed: a}}
racks: {k: {row: r, node_type: h100, nodes: 2}}
node_types: {h100: {node: dgx-h100, device_min_cap: 200 W}}
"""


@pytest.mark.parametrize("follows", [True, False])
def test_a_single_write_ends_with_an_error_where_a_device_does_not_follow(
    follows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    fleet, clock = load_power_fleet(tmp_path / "fleet.yaml"), FakeClock(1000.0)
    monkeypatch.setattr(power, "seconds_since_boot", clock)
    nodes = make_fake_nodes(fleet.tree.nodes, clock)
    nodes[0].devices[0].ignores_writes = not follows
    links = FakeLinks(nodes, clock, FakeNetwork(), random.Random(0))

    def sleep(seconds: float) -> None:
        clock.now += seconds

    guard = open_guard(fleet, links, read_nodes(fleet, links, sleep), takes_over=False)
    steps = apply_caps(fleet, guard, AuditLog(tmp_path / "audit.jsonl"), sleep)
    if follows:
        list(steps)
        assert sum(node.committed_w(4600.0, fleet.settings.margin) for node in nodes) <= 15000.0
    else:
        with pytest.raises(UnfitNodeError, match="do not follow"):
            list(steps)


def test_caps_are_still_lowered_when_the_audit_log_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    fleet, clock = load_power_fleet(tmp_path / "fleet.yaml"), FakeClock(1000.0)
    monkeypatch.setattr(power, "seconds_since_boot", clock)
    nodes = make_fake_nodes(fleet.tree.nodes, clock)
    links = FakeLinks(nodes, clock, FakeNetwork(), random.Random(0))

    def sleep(seconds: float) -> None:
        clock.now += seconds

    audit = AuditLog(tmp_path / "audit.jsonl")
    (tmp_path / "audit.jsonl").unlink()
    (tmp_path / "audit.jsonl").mkdir()
    guard = open_guard(fleet, links, read_nodes(fleet, links, sleep), takes_over=False)
    notices = [text for status in apply_caps(fleet, guard, audit, sleep) for text in status.notices]
    assert notices[0] == f"the audit log {tmp_path}/audit.jsonl cannot be written: Is a directory"
    assert sum(node.committed_w(4600.0, fleet.settings.margin) for node in nodes) <= 15000.0


def test_nothing_is_ordered_without_an_audit_log(tmp_path: Path) -> None:
    write_audit(tmp_path / "state", [{"node": "n1"}])
    with pytest.raises(UsageError, match="the audit log cannot be written there: "):
        AuditLog(tmp_path / "state" / "audit.jsonl")


def test_a_plan_that_raises_caps_says_how_much_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock = tmp_path / "fleet.yaml", FakeClock(1000.0)
    path.write_text(FLEET)
    monkeypatch.setattr(power, "seconds_since_boot", clock)
    fleet = load_power_fleet(path)
    links = FakeLinks(make_fake_nodes(fleet.tree.nodes, clock), clock, FakeNetwork(), random.Random(0))

    def sleep(seconds: float) -> None:
        clock.now += seconds

    guard = open_guard(fleet, links, read_nodes(fleet, links, sleep), takes_over=False)
    list(apply_caps(fleet, guard, AuditLog(tmp_path / "audit.jsonl"), sleep))
    path.write_text(FLEET.replace("15 kW", "16 kW"))
    fleet = load_power_fleet(path)
    reading = read_nodes(fleet, links, sleep)
    lines = format_plan(fleet, reading, plan_caps(fleet, reading))
    assert "committed: 15.0 kW now, 16.0 kW planned, 1.0 kW more" in lines


def test_a_plan_shows_draw_and_committed_power_of_whole_nodes(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    fleet, clock = load_power_fleet(tmp_path / "fleet.yaml"), FakeClock(1000.0)
    nodes = make_fake_nodes(fleet.tree.nodes, clock, noise_share=0.0)
    for device in [device for node in nodes for device in node.devices]:
        device.demand_w = lambda t: 500.0
    links = FakeLinks(nodes, clock, FakeNetwork(), random.Random(0))
    reading = read_nodes(fleet, links, lambda seconds: None)
    found = plan_to_json(fleet, reading, plan_caps(fleet, reading))
    committed_w = 2 * (4600 + 8 * 700 * 1.02)
    level = {"committed_w": committed_w, "draw_w": 2 * (4600 + 8 * 500), "num_silent_nodes": 0}
    assert found["levels"][0] == {"level": "site s", "budget_w": 15000, **level, "headroom_w": 15000 - committed_w}
    nodes[0].devices[0].is_lost = True
    again = plan_to_json(fleet, read_nodes(fleet, links, lambda seconds: None), plan_caps(fleet, reading))
    assert "'draw_w': None" in str(again["levels"])
    assert "'draw_w': 1" not in str(again["levels"])
