"""Which nodes a run has, who may be one of them, and which workers each gets."""

import io
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from made_events import made
from made_messages import start_workers
from phalanx.errors import ExitCode, UnfitNodeError, UsageError
from phalanx.jobs.member import Member, farewell
from phalanx.jobs.nodes import NODE_SILENCE, Crew, Here, There, interface_of, introduction, misfit, network_of, words_of
from phalanx.jobs.sources import fingerprint
from phalanx.run.channel import pair, receive, send
from phalanx.run.event_types import StepDone
from phalanx.run.membership import Membership
from phalanx.run.messages import (
    HeartbeatEntry,
    Heartbeats,
    LauncherHello,
    Leave,
    Message,
    Ping,
    Rejected,
    SendSignal,
    StartStore,
    WorkerExited,
)
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
    wire.send(replace(introduction(node, 3), **(other or {})))
    until(lambda: arrived.qsize() > before)
    return wire


def test_all_that_a_worker_said_comes_before_its_end(here: Here, ends: list[socket.socket]) -> None:
    """However many packets that was: steps were told twice, or a run started again, where they came after it."""
    for step in range(3):
        send(ends[3], made(StepDone, step=step))
    send(ends[1], WorkerExited(rank=0, exit_status=0))
    told = here.receive(here.control)
    assert told is not None
    assert [getattr(message, "step", message.kind) for message in told] == [0, 1, 2, "worker_exited"]
    assert here.receive(here.events) == []  # what was ready is read by now, and nobody waits for more


def test_a_nursery_that_is_gone_is_noticed(here: Here, ends: list[socket.socket]) -> None:
    ends[1].close()
    assert here.receive(here.control) is None


def test_without_variables_a_machine_is_alone() -> None:
    assert Membership.from_environment({}) == Membership(0, 1, None)


def test_a_node_knows_its_place_and_the_leader() -> None:
    environment = {"PHALANX_NUM_NODES": "4", "PHALANX_NODE_RANK": "2", "PHALANX_LEADER_ADDR": "node-1.cluster:4711"}
    assert Membership.from_environment(environment) == Membership(2, 4, ("node-1.cluster", 4711))
    environment["PHALANX_LEADER_ADDR"] = "[fe80::1]:4711"
    assert Membership.from_environment(environment).leader == ("fe80::1", 4711)


@pytest.mark.parametrize(
    "environment",
    [
        {"PHALANX_NUM_NODES": "two"},
        {"PHALANX_NUM_NODES": "2", "PHALANX_NODE_RANK": "2", "PHALANX_LEADER_ADDR": "a:1"},
        {"PHALANX_NUM_NODES": "2"},
        {"PHALANX_NUM_NODES": "2", "PHALANX_LEADER_ADDR": "a"},
        {"PHALANX_NUM_NODES": "2", "PHALANX_LEADER_ADDR": "a:port"},
        {"PHALANX_NUM_NODES": "2", "PHALANX_LEADER_ADDR": "a:70000"},
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
        ({"torch_version": "1.0"}, "torch is 1.0 on"),
        ({"torch_version": ""}, "torch is unknown on"),
        ({"phalanx_version": "99"}, "phalanx is 99 on"),
        ({"python_version": "2.7"}, "python is 2.7 on"),
        ({"num_nodes": 5}, "nodes is 5 on"),
        (
            {"build_fingerprint": "0123"},
            f"runs other code of Phalanx {version('phalanx')} than the leading node: install the same",
        ),
        ({"node_rank": 3}, "there is no node 3 among 3"),
        ({"node_rank": 0}, "there is no node 0 among 3"),
    ],
)
def test_a_node_that_does_not_fit_is_told_why_and_sent_away(crew: Crew, other: dict[str, Any], why: str) -> None:
    wire = come(crew, 1, other)
    assert crew.admit() == []
    (leave,) = [message for message in wire.receive() or [] if isinstance(message, Leave)]
    assert leave.exit_code == ExitCode.UNFIT_NODE
    assert why in (leave.message or "")
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
    assert words_of(left) == f"node 2 ({socket.gethostname()}) left with exit code 77: its GPU does not answer"
    assert crew.partings() == []


def test_a_node_that_is_sent_away_counts_as_one_that_left(crew: Crew) -> None:
    come(crew, 1, {"torch_version": "1.0"}).close()
    crew.admit()
    (left,) = crew.partings()
    assert (left.node_rank, left.exit_code, "torch is 1.0 on" in words_of(left)) == (1, ExitCode.UNFIT_NODE, True)


def test_who_leaves_while_the_leader_makes_its_run_ready_is_reported_at_once_and_kept_for_its_events(
    crew: Crew, capsys: pytest.CaptureFixture[str]
) -> None:
    wire = come(crew, 1)
    crew.attended = False
    until(lambda: crew.missing == [2])
    leave(crew, 1)
    until(lambda: "node 1" in capsys.readouterr().err)
    assert crew.missing == [1, 2]
    assert [left.node_rank for left in crew.partings()] == [1]
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
        until(lambda: [message for message in wire.receive() or () if message == Leave(exit_code=int(ExitCode.RECIPE))])
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
            left: list[Leave] = []

            def gone(wire: Wire = wire, left: list[Leave] = left) -> bool:
                left.extend(message for message in wire.receive() or () if isinstance(message, Leave))
                return bool(left)

            until(gone)
            assert [(each.exit_code, each.message) for each in left] == [expected[index]]
            wire.close()


def test_a_node_without_a_sign_for_too_long_is_found(crew: Crew) -> None:
    wire = come(crew, 1)
    ((node, _),) = crew.admit()
    assert crew.silent(node.heard + NODE_SILENCE) == []
    assert crew.silent(node.heard + NODE_SILENCE + 1) == [node]
    wire.close()


def test_signs_of_far_workers_are_told_by_the_clock_of_this_machine() -> None:
    near, far = socket.socketpair()
    node = There(Wire(near, b"key", leads=True), replace(introduction(1, 2), host="n1"), clock=lambda: 500.0)
    member = Wire(far, b"key", leads=False)
    beat = HeartbeatEntry(rank=4, pid=77, num_beats=9, step=3, phase="data", age_s=2.5, busy_s=1.5)
    step = made(StepDone, step=3)
    member.send(Heartbeats(entries=(beat,), stopped_ranks=(4,)), step)
    assert node.receive(node.wire) == [step]
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


def test_a_node_that_starts_a_program_of_another_framework_is_sent_away(crew: Crew) -> None:
    assert crew.door is not None
    arrived = crew.door.arrived
    wire = dial((crew.door.address, crew.door.port), TOKEN)
    identity = asdict(introduction(1, 3))
    wire.send(LauncherHello(**identity, address="127.0.0.1", ports=(1, 2), nproc_per_node=1))
    until(lambda: arrived.qsize())
    assert crew.admit() == []
    why = "it starts a program of another framework, and the leading node trains"
    assert wire.receive() == [Leave(exit_code=int(ExitCode.UNFIT_NODE), message=why)]
    wire.close()


@pytest.mark.parametrize(
    ("said", "code", "printed"),
    [
        (Leave(exit_code=75), ExitCode.UNFINISHED, ""),
        (Leave(exit_code=77, message="no GPU"), ExitCode.UNFIT_NODE, "error: no GPU\n"),
        (Rejected(message="another program"), ExitCode.USAGE, "error: another program\n"),
        (StartStore(address="127.0.0.1"), None, ""),
    ],
    ids=["leave", "leave, and why", "rejected", "what no leader says"],
)
def test_a_node_leaves_as_its_leader_says(
    here: Here, ends: list[socket.socket], said: Message, code: ExitCode | None, printed: str
) -> None:
    with Door(("127.0.0.1", 0), TOKEN) as door:
        address = (door.address, door.port)
        wire = dial(address, TOKEN)
        wire.send(introduction(1, 2))
        leader, _ = door.arrived.get(timeout=5)
        leader.send(Ping(), said)
        out = io.StringIO()
        with Member(Membership(1, 2, address), TOKEN, out, {}) as member:
            assert member._serve(wire, here, lambda: False) == code
        for each in (wire, leader):
            each.close()
    assert out.getvalue() == printed
    ends[0].close()
    assert receive(ends[1]) == (None if code is None else [SendSignal(signal=9)])


def test_the_key_of_an_attempt_is_made_on_each_node_and_never_travels(ends: list[socket.socket]) -> None:
    pulses = Pulses()
    start, kill = start_workers("f", {}, Path("logs"), nonce="n1"), SendSignal(signal=9)
    Here(ends[0], ends[2], pulses, TOKEN).send(start, kill)
    told = receive(ends[1])
    pulses.close()
    assert told == [replace(start, store_key=store_key(TOKEN, "n1").hex()), kill]
    assert len({store_key(TOKEN, "n1"), store_key(TOKEN, "n2"), store_key(b"another token", "n1")}) == 3


def test_workers_of_one_machine_need_no_key(ends: list[socket.socket]) -> None:
    pulses = Pulses()
    start = start_workers("f", {}, Path("logs"))
    Here(ends[0], ends[2], pulses).send(start)
    pulses.close()
    assert receive(ends[1]) == [start]
