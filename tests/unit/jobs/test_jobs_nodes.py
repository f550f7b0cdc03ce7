"""Which nodes a run has, who may be one of them, and which workers each gets."""

import socket
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import ExitCode, UnfitNodeError, UsageError
from phalanx.jobs.member import farewell
from phalanx.jobs.nodes import NODE_SILENCE, Crew, Here, There, interface_of, introduction, misfit, network_of
from phalanx.jobs.sources import fingerprint
from phalanx.run.channel import pair, receive, send
from phalanx.run.membership import Membership
from phalanx.run.pulse import Beat, Pulses
from phalanx.run.wire import Door, Wire, dial, store_key

TOKEN = b"0123456789abcdef0123456789abcdef"


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 5
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def ends() -> Iterator[list[socket.socket]]:
    """Of this node's nursery and of its workers, each with the far one behind it."""
    ends = [*pair(), *pair()]
    yield ends
    for each in ends:
        each.close()


@pytest.fixture
def here(ends: list[socket.socket]) -> Iterator[Here]:
    pulses = Pulses()
    yield Here(ends[0], ends[2], pulses)
    pulses.close()


@pytest.fixture
def crew(here: Here) -> Iterator[Crew]:
    with Door(("127.0.0.1", 0), TOKEN) as door, Crew(here, 3, door) as crew:
        crew.attended = True
        yield crew


def come(crew: Crew, node: int, other: dict[str, Any] | None = None) -> Wire:
    assert crew.door is not None
    arrived = crew.door.arrived
    before = arrived.qsize()
    wire = dial((crew.door.address, crew.door.port), TOKEN)
    wire.send({**introduction(node, 3), **(other or {})})
    until(lambda: arrived.qsize() > before)
    return wire


def test_all_that_a_worker_said_comes_before_its_end(here: Here, ends: list[socket.socket]) -> None:
    """However many packets that was: steps were told twice, or a run started again, where they came after it."""
    for step in range(3):
        send(ends[3], {"kind": "step", "step": step})
    send(ends[1], {"kind": "exited", "rank": 0})
    told = here.receive(here.control)
    assert told is not None
    assert [message.get("step", message["kind"]) for message in told] == [0, 1, 2, "exited"]
    assert here.receive(here.events) == []  # what was ready is read by now, and nobody waits for more


def test_a_nursery_that_is_gone_is_noticed(here: Here, ends: list[socket.socket]) -> None:
    ends[1].close()
    assert here.receive(here.control) is None


def test_without_variables_a_machine_is_alone() -> None:
    assert Membership.from_environment({}) == Membership(0, 1, None)


def test_a_node_knows_its_place_and_the_leader() -> None:
    environment = {"PHALANX_NODES": "4", "PHALANX_NODE": "2", "PHALANX_LEADER": "node-1.cluster:4711"}
    assert Membership.from_environment(environment) == Membership(2, 4, ("node-1.cluster", 4711))
    environment["PHALANX_LEADER"] = "[fe80::1]:4711"
    assert Membership.from_environment(environment).leader == ("fe80::1", 4711)


@pytest.mark.parametrize(
    "environment",
    [
        {"PHALANX_NODES": "two"},
        {"PHALANX_NODES": "2", "PHALANX_NODE": "2", "PHALANX_LEADER": "a:1"},
        {"PHALANX_NODES": "2"},
        {"PHALANX_NODES": "2", "PHALANX_LEADER": "a"},
        {"PHALANX_NODES": "2", "PHALANX_LEADER": "a:port"},
        {"PHALANX_NODES": "2", "PHALANX_LEADER": "a:70000"},
    ],
)
def test_a_place_that_cannot_be_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="PHALANX_"):
        Membership.from_environment(environment)


def test_nodes_come_in_any_order_and_get_their_ranks_by_index(crew: Crew, here: Here) -> None:
    wires = [come(crew, 2), come(crew, 1)]
    crew.admit()
    assert crew.missing == []
    found = [(getattr(node, "index", 0), list(ranks)) for node, ranks in crew.ranks(6)]
    assert found == [(0, [0, 1]), (1, [2, 3]), (2, [4, 5])]
    for wire in wires:
        wire.close()


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"torch": "1.0"}, "torch is 1.0 on"),
        ({"phalanx": "99"}, "phalanx is 99 on"),
        ({"python": "2.7"}, "python is 2.7 on"),
        ({"nodes": 5}, "nodes is 5 on"),
        ({"code": "0123"}, f"runs other code of Phalanx {version('phalanx')} than the leading node: install the same"),
        ({"node": 3}, "there is no node 3 among 3"),
        ({"node": 0}, "there is no node 0 among 3"),
        ({"node": None}, "there is no node None among 3"),
        ({"node": "1"}, "there is no node 1 among 3"),
        ({"node": True}, "there is no node True among 3"),
        ({"node": [1]}, "there is no node [1] among 3"),
    ],
)
def test_a_node_that_does_not_fit_is_told_why_and_sent_away(crew: Crew, other: dict[str, Any], why: str) -> None:
    wire = come(crew, 1, other)
    assert crew.admit() == []
    (leave,) = [message for message in wire.receive() or [] if message["kind"] == "leave"]
    assert (leave["code"], why in leave["text"]) == (ExitCode.UNFIT_NODE, True)
    assert crew.missing == [1, 2]
    wire.close()


def leave(crew: Crew, node: int, why: str = "its GPU does not answer") -> None:
    """As a node that takes its leave."""
    assert crew.door is not None
    error = UnfitNodeError(why)
    before = crew.door.arrived.qsize()
    farewell(Membership(node, 3, (crew.door.address, crew.door.port)), TOKEN, error)
    until(lambda: crew.door.arrived.qsize() > before or crew._left)  # type: ignore[union-attr]


def test_a_node_that_leaves_as_unfit_says_why_and_is_none_of_those_that_came(crew: Crew) -> None:
    leave(crew, 2)
    assert crew.admit() == []
    (left,) = crew.partings()
    assert left.words == f"node 2 ({socket.gethostname()}) left with exit code 77: its GPU does not answer"
    assert crew.partings() == []


def test_a_node_that_is_sent_away_counts_as_one_that_left(crew: Crew) -> None:
    come(crew, 1, {"torch": "1.0"}).close()
    crew.admit()
    (left,) = crew.partings()
    assert (left.index, left.code, "torch is 1.0 on" in left.words) == (1, ExitCode.UNFIT_NODE, True)


def test_who_leaves_while_the_leader_makes_its_run_ready_is_reported_at_once_and_kept_for_its_events(
    crew: Crew, capsys: pytest.CaptureFixture[str]
) -> None:
    wire = come(crew, 1)
    crew.attended = False
    until(lambda: crew.missing == [2])
    leave(crew, 1)
    until(lambda: "node 1" in capsys.readouterr().err)
    assert crew.missing == [1, 2]
    assert [left.index for left in crew.partings()] == [1]
    wire.close()


def test_a_leader_that_is_not_there_gets_nothing_and_not_waited_for_long() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    times = iter((0.0, 1.0, 6.0))
    farewell(Membership(1, 2, ("127.0.0.1", port)), TOKEN, UnfitNodeError("no"), lambda: next(times))
    assert list(times) == []


def test_a_node_that_comes_again_replaces_its_older_connection(crew: Crew) -> None:
    first = come(crew, 1)
    ((old, nothing),) = crew.admit()
    assert nothing is None
    second = come(crew, 1)
    ((new, replaced),) = crew.admit()
    assert replaced is old
    crew.lose(old)
    assert crew.others == {1: new}
    for wire in (first, second):
        wire.close()


def test_the_others_are_told_how_the_run_ended(here: Here) -> None:
    with Door(("127.0.0.1", 0), TOKEN) as door:
        with Crew(here, 3, door) as crew:
            wire = come(crew, 1)
            crew.code = ExitCode.RECIPE
        until(lambda: [message for message in wire.receive() or [{"kind": "gone"}] if message["kind"] != "ping"])
        wire.close()


@pytest.mark.parametrize(
    ("code", "unfit", "expected"),
    [
        (ExitCode.UNFINISHED, {1: "its GPU failed"}, {1: (77, "its GPU failed"), 2: (75, None)}),
        (ExitCode.UNFIT_NODE, {}, {1: (75, None), 2: (75, None)}),
    ],
    ids=["another", "the leading one"],
)
def test_only_the_node_that_is_unfit_leaves_as_unfit(
    here: Here, code: ExitCode, unfit: dict[int, str], expected: dict[int, tuple[int, str | None]]
) -> None:
    with Door(("127.0.0.1", 0), TOKEN) as door:
        with Crew(here, 3, door) as crew:
            wires = {index: come(crew, index) for index in expected}
            crew.code, crew.unfit = code, unfit
        for index, wire in wires.items():
            left: list[dict[str, Any]] = []

            def gone(wire: Wire = wire, left: list[dict[str, Any]] = left) -> bool:
                left.extend(wire.receive() or [])
                return bool(left) and left[-1]["kind"] == "leave"

            until(gone)
            assert (left[-1]["code"], left[-1].get("text")) == expected[index]
            wire.close()


def test_a_node_without_a_sign_for_too_long_is_found(crew: Crew) -> None:
    wire = come(crew, 1)
    ((node, _),) = crew.admit()
    assert crew.silent(node.heard + NODE_SILENCE) == []
    assert crew.silent(node.heard + NODE_SILENCE + 1) == [node]
    wire.close()


def test_signs_of_far_workers_are_told_by_the_clock_of_this_machine() -> None:
    near, far = socket.socketpair()
    node = There(Wire(near, b"key", leads=True), {"host": "n1", "node": 1}, clock=lambda: 500.0)
    member = Wire(far, b"key", leads=False)
    member.send({"kind": "beats", "beats": [[4, 77, 9, 3, "data", 2.5, 1.5]], "held": [4]}, {"kind": "step", "step": 3})
    assert node.receive(node.wire) == [{"kind": "step", "step": 3}]
    assert node.beats([4, 5]) == {4: Beat(77, 9, 3, "data", 497.5, 1.5), 5: None}
    assert node.held(node.beats([4])) == {4}
    for wire in (node.wire, member):
        wire.close()


def test_workers_talk_over_the_interface_of_the_jobs_address_unless_told_otherwise() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
    assert network_of("127.0.0.1", {"NCCL_SOCKET_IFNAME": "ib0"}) == {"GLOO_SOCKET_IFNAME": "lo"}


def test_the_fingerprint_is_that_of_names_and_contents_of_modules(tmp_path: Path) -> None:
    def package(name: str, **files: str) -> Path:
        folder = tmp_path / name
        (folder / "room").mkdir(parents=True)
        for stem, text in files.items():
            (folder / "room" / f"{stem}.py").write_text(text)
        return folder

    first = package("first", a="1", b="2")
    (first / "room/.#a.py").symlink_to("me@here")  # an editor's lock
    (first / "room/a.pyc").write_bytes(b"3")
    assert fingerprint(first) == fingerprint(package("same", a="1", b="2"))
    others = [package("edited", a="1", b="3"), package("renamed", a="1", c="2"), package("moved", a="12", b="")]
    assert len({fingerprint(each) for each in (first, *others)}) == 4


def test_nodes_with_the_same_versions_fit() -> None:
    assert misfit(introduction(1, 3), introduction(0, 3)) is None


@pytest.mark.parametrize("node", ["x", None, [1], {"a": 1}, 1.5, True])
def test_an_agent_that_says_no_number_is_sent_away(crew: Crew, node: Any) -> None:
    wire = come(crew, 1, {"node": node})
    assert crew.admit() == []
    assert crew.others == {}
    wire.close()


def test_the_key_of_an_attempt_is_made_on_each_node_and_never_travels(ends: list[socket.socket]) -> None:
    pulses = Pulses()
    start = {"kind": "start", "nonce": "n1"}
    Here(ends[0], ends[2], pulses, TOKEN).send(start, {"kind": "signal", "number": 9})
    told, other = receive(ends[1]) or []
    pulses.close()
    assert told == {**start, "key": store_key(TOKEN, "n1").hex()}
    assert other == {"kind": "signal", "number": 9}
    assert len({store_key(TOKEN, "n1"), store_key(TOKEN, "n2"), store_key(b"another token", "n1")}) == 3


def test_workers_of_one_machine_need_no_key(ends: list[socket.socket]) -> None:
    pulses = Pulses()
    Here(ends[0], ends[2], pulses).send({"kind": "start"})
    pulses.close()
    assert receive(ends[1]) == [{"kind": "start"}]
