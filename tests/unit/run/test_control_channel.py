"""The control channel: who knows the token talks, who does not is sent away, nobody on the way can change a word."""

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from made_messages import signed_frame
from phalanx.errors import UsageError
from phalanx.run.authentication import (
    MAX_PENDING_HANDSHAKES,
    AuthenticationError,
    HandshakeServer,
    client_handshake,
    load_token,
)
from phalanx.run.control_channel import (
    AuthConnection,
    ControlServer,
    accept_agent,
    connect_to_leader,
    find_listen_address,
)
from phalanx.run.fields import to_fields
from phalanx.run.messages import Message
from phalanx.run.process_messages import HeartbeatEntry, Heartbeats, Hello, Ping, RankResult, SendSignal

TOKEN = b"0123456789abcdef0123456789abcdef"
HELLO = Hello(node_rank=1, num_nodes=2, host="n1")


@pytest.fixture
def door() -> Iterator[ControlServer]:
    with ControlServer(("127.0.0.1", 0), TOKEN) as door:
        yield door


def enter(door: ControlServer, token: bytes = TOKEN) -> AuthConnection:
    wire = connect_to_leader((door.address, door.port), token)
    wire.send(HELLO)
    return wire


@pytest.fixture
def ends() -> Iterator[tuple[AuthConnection, AuthConnection]]:
    near, far = socket.socketpair()
    leader, member = AuthConnection(near, b"key", is_leader=True), AuthConnection(far, b"key", is_leader=False)
    yield leader, member
    leader.close()
    member.close()


def test_who_knows_the_token_comes_in_and_messages_go_both_ways(door: ControlServer) -> None:
    member = enter(door)
    leader, hello = door.joins.get(timeout=5)
    assert hello == HELLO
    leader.send(Ping(), SendSignal(signal=9))
    assert member.receive() == [Ping(), SendSignal(signal=9)]
    entry = HeartbeatEntry(rank=4, pid=77, num_beats=9, step=3, phase="data_wait", age_s=2.5, busy_s=1.5)
    member.send(Heartbeats(entries=(entry,), stopped_ranks=()))
    assert leader.receive() == [Heartbeats(entries=(entry,), stopped_ranks=())]
    leader.close()
    assert member.receive() is None
    member.close()


@pytest.mark.parametrize(
    "said",
    [
        *({"node_rank": value} for value in ("1", None, [1], {"a": 1}, 1.5, True, -1)),
        *({"host": None}, {"num_nodes": "2"}, {"kind": "ping"}, {"kind": "gossip"}),
    ],
)
def test_who_knows_the_token_and_does_not_say_what_it_is_stays_out(
    door: ControlServer, said: dict[str, object]
) -> None:
    wire = connect_to_leader((door.address, door.port), TOKEN)
    wire.sock.sendall(signed_frame(wire, [{**to_fields(HELLO), **said}]))
    assert wire.receive() is None
    assert door.joins.empty()
    wire.close()


def test_who_does_not_know_the_token_is_refused_on_both_sides(door: ControlServer) -> None:
    with pytest.raises(AuthenticationError):
        enter(door, b"another token that is long enough")
    assert door.joins.empty()


def test_a_member_does_not_trust_a_leader_that_does_not_know_the_token() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(os.urandom(32))
                sock.recv(64)
                sock.sendall(os.urandom(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(AuthenticationError, match="does not know the token"):
            connect_to_leader(listener.getsockname(), TOKEN)
        thread.join()


def test_a_long_message_arrives_whole(ends: tuple[AuthConnection, AuthConnection]) -> None:
    leader, member = ends
    message = RankResult(rank=0, value="x" * 500_000)
    thread = threading.Thread(target=leader.send, args=(message,))
    thread.start()
    found: list[Message] = []
    while not found:
        found = member.receive() or []
    thread.join()
    assert found == [message]


@pytest.mark.parametrize("what", ["changed", "repeated", "turned back", "too large"])
def test_a_frame_of_somebody_else_ends_the_connection(what: str, ends: tuple[AuthConnection, AuthConnection]) -> None:
    leader, member = ends
    leader.send(Ping())
    frame = member.sock.recv(1000)
    if what == "changed":
        member_sees = frame.replace(b"ping", b"pong")
    elif what == "repeated":
        member_sees = frame * 2
    elif what == "too large":
        member_sees = struct.pack("!I", 1 << 30) + frame
    else:
        member.sock.sendall(frame)
        assert leader.receive() is None
        return
    leader.sock.sendall(member_sees)
    assert member.receive() is None


def test_the_token_goes_over_no_wire() -> None:
    near, far = socket.socketpair()
    seen: list[bytes] = []

    class Listening(socket.socket):
        def sendall(self, data: bytes) -> None:  # type: ignore[override]
            seen.append(bytes(data))
            super().sendall(data)

    listening = Listening(fileno=near.detach())
    thread = threading.Thread(target=lambda: far.sendall(far.recv(32) + bytes(32)))
    thread.start()
    with listening, far:
        with pytest.raises(AuthenticationError):
            accept_agent(listening, TOKEN)
        thread.join()
    assert seen
    assert all(TOKEN not in each for each in seen)


def test_the_token_comes_from_a_file_or_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(TOKEN + b"\n")
    file.chmod(0o600)
    other = "fedcba9876543210"
    assert load_token({"PHALANX_TOKEN_FILE": str(file)}) == TOKEN
    assert load_token({"PHALANX_TOKEN": other}) == other.encode()
    assert load_token({"PHALANX_TOKEN_FILE": str(file), "PHALANX_TOKEN": other}) == TOKEN


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o606, 0o666])
def test_a_token_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_bytes(TOKEN)
    file.chmod(mode)
    with pytest.raises(UsageError, match="other users may"):
        load_token({"PHALANX_TOKEN_FILE": str(file)})


@pytest.mark.parametrize(
    "environment",
    [
        *(
            {},
            {"PHALANX_TOKEN": "short"},
            {"PHALANX_TOKEN_FILE": "/nowhere/token"},
            {"PHALANX_TOKEN_FILE": "/dev/zero"},
        ),
        *({"PHALANX_TOKEN": "a" * 40}, {"PHALANX_TOKEN": "password" * 8}, {"PHALANX_TOKEN": "abcabd" * 8 + "x"}),
    ],
)
def test_no_token_or_one_that_can_be_guessed_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        load_token(environment)


def test_a_connection_for_another_purpose_is_no_agents(door: ControlServer) -> None:
    with socket.create_connection((door.address, door.port)) as sock:
        client_handshake(sock, TOKEN, b"E")
        assert sock.recv(1) == b""  # sent away
    assert door.joins.empty()


@pytest.mark.parametrize(
    ("host", "address", "found"),
    [
        ("node-1", "10.0.0.1", "node-1"),
        ("node-1", "127.0.1.1", ""),  # as Debian's installer writes it into /etc/hosts
        ("localhost", "127.0.0.1", "localhost"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_a_name_that_leads_to_the_loopback_at_home_means_all_interfaces(host: str, address: str, found: str) -> None:
    assert find_listen_address(host, lambda name: address) == found


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid"])
def test_an_address_that_is_not_this_machines_is_told_in_one_reason(host: str) -> None:
    with pytest.raises(UsageError) as told:
        ControlServer((host, 4000), TOKEN)
    assert str(told.value).startswith(f"cannot listen on {host}:4000: ")
    assert "while attempting" not in str(told.value)


def test_a_door_that_is_taken_is_told(door: ControlServer) -> None:
    with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{door.port}: Address already in use"):
        ControlServer(("127.0.0.1", door.port), TOKEN)


@contextlib.contextmanager
def dripping(connect: Callable[[], socket.socket], count: int = 1) -> Iterator[None]:
    """Callers that say a byte now and then, and so never fall silent."""
    over = threading.Event()

    def drip() -> None:
        with connect() as sock, contextlib.suppress(OSError):
            while not over.wait(0.02):
                sock.sendall(b"x")

    threads = [threading.Thread(target=drip) for _ in range(count)]
    for thread in threads:
        thread.start()
    yield
    over.set()
    for thread in threads:
        thread.join()


def test_more_slow_callers_than_there_are_places_keep_nobody_out(door: ControlServer) -> None:
    with dripping(lambda: socket.create_connection((door.address, door.port)), MAX_PENDING_HANDSHAKES + 10):
        for _ in range(3):
            begun = time.monotonic()
            enter(door).close()
            door.joins.get(timeout=5)[0].close()
            assert time.monotonic() - begun < 2.0


def test_a_slow_caller_has_one_deadline_for_all_that_it_has_to_say() -> None:
    near, far = socket.socketpair()
    with near, dripping(lambda: far):
        begun = time.monotonic()
        with pytest.raises(AuthenticationError, match="did not authenticate in time"):
            accept_agent(near, TOKEN, timeout_s=0.3)
        assert 0.3 <= time.monotonic() - begun < 1.0


def test_a_listener_that_answers_slowly_does_not_hold_a_caller_for_long() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        dripping(lambda: listener.accept()[0]),
        pytest.raises(AuthenticationError),
    ):
        connect_to_leader(listener.getsockname(), TOKEN, timeout_s=0.3)


def test_where_all_places_are_taken_the_oldest_of_the_address_with_most_gives_way() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with HandshakeServer(listener, lambda sock, until: None, lambda guest: None) as greeter:
        pairs = [socket.socketpair() for _ in range(5)]
        for (near, _), address in zip(pairs, ("a", "b", "b", "c", "b"), strict=True):
            greeter._pending[near] = address
        greeter._evict_oldest()
        assert [near in greeter._pending for near, _ in pairs] == [True, False, True, True, True]
        assert pairs[1][1].recv(1) == b""
        for near, far in pairs:
            near.close()
            far.close()
        greeter._pending.clear()
