"""Which nodes a run has, who may be one of them, and which workers each gets."""

import io
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from made_events import made
from made_messages import start_workers
from phalanx.errors import ExitCode, UnfitNodeError, UsageError
from phalanx.jobs.agent.node_agent import NodeAgent, report_departure
from phalanx.jobs.agent.node_group import (
    NODE_TIMEOUT_S,
    LocalNode,
    NodeGroup,
    RemoteNode,
    compute_build_fingerprint,
    find_interface,
    interface_variables,
    make_hello,
    words_of,
)
from phalanx.run import Run
from phalanx.run.authentication import derive_store_key
from phalanx.run.control_channel import AuthConnection, ControlServer, connect_to_leader
from phalanx.run.event_types import StepDone
from phalanx.run.heartbeat import Heartbeat, HeartbeatTable
from phalanx.run.leader_address import write_leader_address
from phalanx.run.messages import Message, make_socket_pair, receive, send
from phalanx.run.node_env import NodeEnv
from phalanx.run.process_messages import (
    HeartbeatEntry,
    Heartbeats,
    LauncherHello,
    Leave,
    Ping,
    SendSignal,
    StartStore,
    StopRequested,
    WorkerExited,
)
from train_harness import wait_until

TOKEN = b"0123456789abcdef0123456789abcdef"


@pytest.fixture
def ends() -> Iterator[list[socket.socket]]:
    """Of this node's fork server and of its workers, each with the far one behind it."""
    ends = [*make_socket_pair(), *make_socket_pair()]
    yield ends
    for each in ends:
        each.close()


@pytest.fixture
def here(ends: list[socket.socket]) -> Iterator[LocalNode]:
    pulses = HeartbeatTable()
    yield LocalNode(ends[0], ends[2], pulses)
    pulses.close()


@pytest.fixture
def crew(here: LocalNode) -> Iterator[NodeGroup]:
    with ControlServer(("127.0.0.1", 0), TOKEN) as door, NodeGroup(here, 3, door) as crew:
        crew.is_supervised = True
        yield crew


def come(crew: NodeGroup, node: int, other: dict[str, Any] | None = None) -> AuthConnection:
    assert crew.server is not None
    arrived = crew.server.joins
    before = arrived.qsize()
    wire = connect_to_leader((crew.server.address, crew.server.port), TOKEN)
    wire.send(replace(make_hello(node, 3), **(other or {})))
    wait_until(lambda: arrived.qsize() > before)
    return wire


def test_all_that_a_worker_said_comes_before_its_end(here: LocalNode, ends: list[socket.socket]) -> None:
    """However many packets that was: steps were told twice, or a run started again, where they came after it."""
    for step in range(3):
        send(ends[3], made(StepDone, step=step))
    send(ends[1], WorkerExited(rank=0, exit_status=0))
    told = here.receive(here.control)
    assert told is not None
    assert [getattr(message, "step", message.kind) for message in told] == [0, 1, 2, "worker_exited"]
    assert here.receive(here.events) == []  # what was ready is read by now, and nobody waits for more


def test_a_node_knows_its_place_and_the_leader() -> None:
    environment = {"PHALANX_NUM_NODES": "4", "PHALANX_NODE_RANK": "2", "PHALANX_LEADER_ADDR": "node-1.cluster:4711"}
    assert NodeEnv.from_environment(environment) == NodeEnv(2, 4, ("node-1.cluster", 4711))
    environment["PHALANX_LEADER_ADDR"] = "[fe80::1]:4711"
    assert NodeEnv.from_environment(environment).leader_address == ("fe80::1", 4711)


def test_a_run_may_need_fewer_nodes_than_it_has() -> None:
    place = {"PHALANX_NODE_RANK": "1", "PHALANX_LEADER_ADDR": "a:1"}
    assert NodeEnv.from_environment({"PHALANX_NUM_NODES": "2:4", **place}) == NodeEnv(1, 4, ("a", 1), 2)
    assert NodeEnv.from_environment({"PHALANX_NUM_NODES": "4:4", **place}) == NodeEnv(1, 4, ("a", 1))


@pytest.mark.parametrize(
    "environment",
    [
        {"PHALANX_NUM_NODES": "two"},
        {"PHALANX_NUM_NODES": "3:2", "PHALANX_LEADER_ADDR": "a:1"},
        {"PHALANX_NUM_NODES": "2", "PHALANX_NODE_RANK": "x", "PHALANX_LEADER_ADDR": "a:1"},
        {"PHALANX_NUM_NODES": "2", "PHALANX_NODE_RANK": "2", "PHALANX_LEADER_ADDR": "a:1"},
        {"PHALANX_NUM_NODES": "2"},
        {"PHALANX_NUM_NODES": "2", "PHALANX_LEADER_ADDR": "a"},
        {"PHALANX_NUM_NODES": "2", "PHALANX_LEADER_ADDR": "a:70000"},
    ],
)
def test_a_place_that_cannot_be_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="PHALANX_"):
        NodeEnv.from_environment(environment)


def test_nodes_come_in_any_order_and_get_their_ranks_by_index(crew: NodeGroup, here: LocalNode) -> None:
    wires = [come(crew, 2), come(crew, 1)]
    crew.accept_joins()
    assert crew.missing_nodes == []
    found = [(getattr(node, "node_rank", 0), list(ranks)) for node, ranks in crew.assign_ranks(3, 2).items()]
    assert found == [(0, [0, 1]), (1, [2, 3]), (2, [4, 5])]
    for wire in wires:
        wire.close()


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"torch_version": "1.0"}, "torch is 1.0 on"),
        ({"phalanx_version": "99"}, "phalanx is 99 on"),
        ({"num_nodes": 5}, "nodes is 5 on"),
        (
            {"build_fingerprint": "0123"},
            f"runs other code of Phalanx {version('phalanx')} than the leading node: install the same",
        ),
        ({"node_rank": 3}, "there is no node 3 among 3"),
        ({"node_rank": 0}, "node 0 leads this run"),
    ],
)
def test_a_node_that_does_not_fit_is_told_why_and_sent_away(crew: NodeGroup, other: dict[str, Any], why: str) -> None:
    wire = come(crew, 1, other)
    assert crew.accept_joins() == []
    (leave,) = [message for message in wire.receive() or [] if isinstance(message, Leave)]
    assert leave.exit_code == ExitCode.UNFIT_NODE
    assert why in (leave.message or "")
    assert crew.missing_nodes == [1, 2]
    wire.close()


def leave(crew: NodeGroup, node: int, why: str = "its GPU does not answer") -> None:
    """As a node that takes its leave."""
    assert crew.server is not None
    error = UnfitNodeError(why)
    before = crew.server.joins.qsize()
    report_departure(NodeEnv(node, 3, (crew.server.address, crew.server.port)), TOKEN, error)
    wait_until(lambda: crew.server.joins.qsize() > before or crew._departures)  # type: ignore[union-attr]


def test_a_node_that_leaves_as_unfit_says_why_and_is_none_of_those_that_came(crew: NodeGroup) -> None:
    leave(crew, 2)
    assert crew.accept_joins() == []
    (left,) = crew.take_departures()
    assert words_of(left) == f"node 2 ({socket.gethostname()}) left with exit code 77: its GPU does not answer"
    assert crew.take_departures() == []


def test_who_leaves_while_the_leader_makes_its_run_ready_is_reported_at_once_and_kept_for_its_events(
    crew: NodeGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    wire = come(crew, 1)
    crew.is_supervised = False
    wait_until(lambda: crew.missing_nodes == [2])
    leave(crew, 1)
    wait_until(lambda: "node 1" in capsys.readouterr().err)
    assert crew.missing_nodes == [1, 2]
    assert [left.node_rank for left in crew.take_departures()] == [1]
    wire.close()


def test_a_leader_that_is_not_there_gets_nothing_and_not_waited_for_long() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    times = iter((0.0, 1.0, 6.0))
    report_departure(NodeEnv(1, 2, ("127.0.0.1", port)), TOKEN, UnfitNodeError("no"), lambda: next(times))
    assert list(times) == []


def test_a_node_that_comes_again_replaces_its_older_connection(crew: NodeGroup) -> None:
    first = come(crew, 1)
    ((old, nothing),) = crew.accept_joins()
    assert nothing is None
    second = come(crew, 1)
    ((new, replaced),) = crew.accept_joins()
    assert replaced is old
    crew.remove_node(old)
    assert crew.remote_nodes == {1: new}
    for wire in (first, second):
        wire.close()


def test_the_others_are_told_how_the_run_ended(here: LocalNode) -> None:
    with ControlServer(("127.0.0.1", 0), TOKEN) as door:
        with NodeGroup(here, 3, door) as crew:
            wire = come(crew, 1)
            crew.exit_code = ExitCode.RECIPE
        wait_until(
            lambda: [message for message in wire.receive() or () if message == Leave(exit_code=int(ExitCode.RECIPE))]
        )
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
    here: LocalNode, code: ExitCode, unfit: dict[int, str], expected: dict[int, tuple[int, str | None]]
) -> None:
    with ControlServer(("127.0.0.1", 0), TOKEN) as door:
        with NodeGroup(here, 3, door) as crew:
            wires = {index: come(crew, index) for index in expected}
            crew.exit_code, crew.unfit = code, unfit
        for index, wire in wires.items():
            left: list[Leave] = []

            def gone(wire: AuthConnection = wire, left: list[Leave] = left) -> bool:
                left.extend(message for message in wire.receive() or () if isinstance(message, Leave))
                return bool(left)

            wait_until(gone)
            assert [(each.exit_code, each.message) for each in left] == [expected[index]]
            wire.close()


def test_a_node_without_a_sign_for_too_long_is_found(crew: NodeGroup) -> None:
    wire = come(crew, 1)
    ((node, _),) = crew.accept_joins()
    assert crew.find_timed_out(node.last_message_at + NODE_TIMEOUT_S) == []
    assert crew.find_timed_out(node.last_message_at + NODE_TIMEOUT_S + 1) == [node]
    wire.close()


def test_a_pause_of_the_leader_is_no_silence_of_the_nodes(crew: NodeGroup) -> None:
    wire = come(crew, 1)
    ((node, _),) = crew.accept_joins()
    start = node.last_message_at
    assert crew.find_timed_out(start + 1) == []
    looks = [(second, bool(crew.find_timed_out(start + second))) for second in range(40, 55)]
    assert [second for second, is_lost in looks if is_lost] == [50, 51, 52, 53, 54]
    wire.close()


def test_signs_of_far_workers_are_told_by_the_clock_of_this_machine() -> None:
    near, far = socket.socketpair()
    node = RemoteNode(
        AuthConnection(near, b"key", is_leader=True), replace(make_hello(1, 2), host="n1"), clock=lambda: 500.0
    )
    member = AuthConnection(far, b"key", is_leader=False)
    beat = HeartbeatEntry(rank=4, pid=77, num_beats=9, step=3, phase="data_wait", age_s=2.5, busy_s=1.5)
    step = made(StepDone, step=3)
    member.send(Heartbeats(entries=(beat,), stopped_ranks=(4,)), step)
    assert node.receive(node.connection) == [step]
    assert node.heartbeats([4, 5]) == {4: Heartbeat(77, 9, 3, "data_wait", 497.5, 1.5), 5: None}
    assert node.stopped_ranks(node.heartbeats([4])) == {4}
    for wire in (node.connection, member):
        wire.close()


def test_workers_talk_over_the_interface_of_the_jobs_address_unless_told_otherwise() -> None:
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("203.0.113.9") is None
    assert interface_variables("127.0.0.1", {"NCCL_SOCKET_IFNAME": "ib0"}) == {"GLOO_SOCKET_IFNAME": "lo"}


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
    assert compute_build_fingerprint(first) == compute_build_fingerprint(package("same", a="1", b="2"))
    others = [package("edited", a="1", b="3"), package("renamed", a="1", c="2"), package("moved", a="12", b="")]
    assert len({compute_build_fingerprint(each) for each in (first, *others)}) == 4


def test_a_node_that_starts_a_program_of_another_framework_is_sent_away(crew: NodeGroup) -> None:
    assert crew.server is not None
    arrived = crew.server.joins
    wire = connect_to_leader((crew.server.address, crew.server.port), TOKEN)
    identity = asdict(make_hello(1, 3))
    wire.send(LauncherHello(**identity, address="127.0.0.1", ports=(1, 2), nproc_per_node=1))
    wait_until(lambda: arrived.qsize())
    assert crew.accept_joins() == []
    why = "it starts a program of another framework, and the leading node trains"
    assert wire.receive() == [Leave(exit_code=int(ExitCode.UNFIT_NODE), message=why)]
    wire.close()


@pytest.mark.parametrize(
    ("said", "code", "printed"),
    [
        (Leave(exit_code=75), ExitCode.UNFINISHED, ""),
        (Leave(exit_code=77, message="no GPU"), ExitCode.UNFIT_NODE, "error: no GPU\n"),
        (StartStore(address="127.0.0.1"), None, ""),
    ],
    ids=["leave", "leave, and why", "what no leader says"],
)
def test_a_node_leaves_as_its_leader_says(
    here: LocalNode, ends: list[socket.socket], said: Message, code: ExitCode | None, printed: str
) -> None:
    with ControlServer(("127.0.0.1", 0), TOKEN) as door:
        address = (door.address, door.port)
        wire = connect_to_leader(address, TOKEN)
        wire.send(make_hello(1, 2))
        leader, _ = door.joins.get(timeout=5)
        leader.send(Ping(), said)
        out = io.StringIO()
        with NodeAgent(NodeEnv(1, 2, address), TOKEN, out, {}) as member:
            assert member._serve_connection(wire, here, lambda: False) == code
        for each in (wire, leader):
            each.close()
    assert out.getvalue() == printed
    ends[0].close()
    assert receive(ends[1]) == (None if code is None else [SendSignal(signal=9)])


def test_a_node_that_cannot_keep_the_run_starts_no_workers(
    here: LocalNode, ends: list[socket.socket], tmp_path: Path
) -> None:
    def check_node(run: Run) -> None:
        raise UnfitNodeError(f"{run.path}: too little free space")

    with ControlServer(("127.0.0.1", 0), TOKEN) as door:
        address = (door.address, door.port)
        wire = connect_to_leader(address, TOKEN)
        wire.send(make_hello(1, 2))
        leader, _ = door.joins.get(timeout=5)
        leader.send(start_workers("f", {"run": str(tmp_path)}, tmp_path))
        with NodeAgent(NodeEnv(1, 2, address), TOKEN, io.StringIO(), {}) as member:
            member.check_node = check_node
            with pytest.raises(UnfitNodeError, match=f"{tmp_path}: too little free space"):
                member._serve_connection(wire, here, lambda: False)
        for each in (wire, leader):
            each.close()
    ends[0].close()
    assert receive(ends[1]) is None


def test_a_node_that_was_asked_to_go_does_not_lead_where_its_leader_is_lost(here: LocalNode, tmp_path: Path) -> None:
    run = Run(tmp_path)
    with ControlServer(("127.0.0.1", 0), TOKEN) as door:
        address = (door.address, door.port)
        write_leader_address(run, address, 0)
        wire = connect_to_leader(address, TOKEN)
        wire.send(make_hello(1, 3))
        leader, _ = door.joins.get(timeout=5)
        member = NodeAgent(NodeEnv(1, 3, address, min_nodes=1), TOKEN, io.StringIO(), {}, run=run)
        with member:
            member.signals.received.append(signal.SIGTERM)
            member._forward_signals(wire)
            assert leader.receive() == [StopRequested(only_this_node=True)]
            leader.close()
            assert member._serve_connection(wire, here, lambda: False) is None
            assert member._connect_to_leader(time.monotonic() + 60) is None
            assert not member._take_over()
        wire.close()


def test_the_key_of_an_attempt_is_made_on_each_node_and_never_travels(ends: list[socket.socket]) -> None:
    pulses = HeartbeatTable()
    start, kill = start_workers("f", {}, Path("logs"), nonce="n1"), SendSignal(signal=9)
    LocalNode(ends[0], ends[2], pulses, TOKEN).send(start, kill)
    told = receive(ends[1])
    pulses.close()
    assert told == [replace(start, store_key=derive_store_key(TOKEN, "n1").hex()), kill]
    assert (
        len({derive_store_key(TOKEN, "n1"), derive_store_key(TOKEN, "n2"), derive_store_key(b"another token", "n1")})
        == 3
    )


def test_workers_of_one_machine_need_no_key(ends: list[socket.socket]) -> None:
    pulses = HeartbeatTable()
    start = start_workers("f", {}, Path("logs"))
    LocalNode(ends[0], ends[2], pulses).send(start)
    pulses.close()
    assert receive(ends[1]) == [start]
