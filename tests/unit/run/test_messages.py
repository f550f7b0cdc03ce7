"""Messages between processes: each kind survives the way there, and nothing else is taken for one."""

import json
import socket
import threading
from dataclasses import MISSING, Field, fields, replace
from typing import Any, get_args

import pytest

from made_events import USUAL
from made_messages import COMMAND
from phalanx.run.event_types import RunWarning
from phalanx.run.fields import to_fields
from phalanx.run.messages import (
    MAX_PACKET_BYTES,
    MESSAGE_TYPES,
    Message,
    ProtocolError,
    decode,
    drain,
    encode,
    receive,
    send,
)
from phalanx.run.process_messages import (
    CallProgress,
    CallRaised,
    CallReturned,
    HeartbeatEntry,
    Heartbeats,
    Hello,
    LauncherHello,
    Leave,
    NodeDeparture,
    NodeFailed,
    NodeFinished,
    PendingCollective,
    Ping,
    Preload,
    ProcessReady,
    RankResult,
    RunCall,
    RunResult,
    SendSignal,
    StartStore,
    StartWorkers,
    StopRequested,
    StoreDied,
    StoreStarted,
    Topology,
    WaitingInCollective,
    WorkerCrashed,
    WorkerError,
    WorkerExited,
    WorkerFinishing,
    WorkersStarted,
)

NODE: dict[str, Any] = {
    "node_rank": 1,
    "host": "n1",
    "num_nodes": 2,
    "phalanx_version": "0.1.0",
    "torch_version": "2.11.0",
    "python_version": "3.12",
    "machine": "x86_64",
    "build_fingerprint": "0123",
}
WHOLE: list[Message] = [
    StartWorkers(
        attempt=3,
        world_size=4,
        command=COMMAND,
        environment={"A": "b"},
        logs_dir="logs",
        local_world_size=2,
        first_rank=2,
        store_address=("10.0.0.1", 4711),
        rendezvous_id=1,
        nonce="n",
        store_key="k",
    ),
    SendSignal(signal=9),
    StartStore(address="10.0.0.1"),
    RunCall(function="m:f", payload={"a": [1, None]}, call_id=5),
    Preload(function="m:f", payload=1),
    ProcessReady(),
    WorkersStarted(attempt=3),
    WorkerExited(rank=1, exit_status=-9, killed_by_agent=True),
    StoreStarted(port=4711),
    StoreDied(attempt=3),
    CallProgress(num_bytes=1 << 20, count=7),
    CallReturned(call_id=5, value=[1.5, {"a": None}]),
    CallRaised(call_id=5, message="no", exit_code=78, traceback="...", was_killed=True),
    WorkerCrashed(rank=1, message="RuntimeError: no (mine.py:3)"),
    WorkerError(rank=1, message="no", exit_code=78, out_of_memory=True),
    WaitingInCollective(
        rank=1,
        pending=(PendingCollective(group="0 of 0, 1", ranks=(0, 1), number=3, operation="barrier"),),
        issued={"0 of 0, 1": 3},
        stack="",
    ),
    RunResult(value={"status": "done"}),
    RankResult(rank=1, value=[0.5]),
    WorkerFinishing(rank=1, exit_code=75),
    Hello(**NODE),
    NodeDeparture(**NODE, exit_code=77, reason="no GPU"),
    LauncherHello(**NODE, address="10.0.0.2", ports=(1, 2), nproc_per_node=1),
    Heartbeats(
        entries=(HeartbeatEntry(rank=0, pid=1, num_beats=2, step=3, phase="data_wait", age_s=-1e-4, busy_s=1.0),),
        stopped_ranks=(0,),
    ),
    StopRequested(only_this_node=True),
    Ping(),
    Leave(exit_code=77, message="no"),
    Topology(hosts=("a", "b"), nproc_per_node=1, ports=((1, 2), (3, 4))),
    NodeFinished(),
    NodeFailed(exit_code=3),
]


def test_every_kind_has_a_name_of_its_own_and_is_tried_here() -> None:
    tried = {type(message) for message in WHOLE} | set(USUAL)
    assert set(MESSAGE_TYPES.values()) == set(get_args(Message)) == tried
    assert len(MESSAGE_TYPES) == len(get_args(Message))


@pytest.mark.parametrize("message", WHOLE, ids=lambda message: message.kind)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    given = to_fields(message)
    assert given.keys() == {"kind", *(field.name for field in fields(message))}, "a field has its default here"
    assert decode(encode([message, message])) == [message, message]


FIELDS = [(message, field) for message in WHOLE for field in fields(message)]


def decoded(message: Message, name: str, value: Any) -> list[Message]:
    """What is made of a message with another JSON value in a field; None leaves it out."""
    values = {**to_fields(message), name: value}
    return decode(json.dumps([{key: value for key, value in values.items() if value is not None}]).encode())


@pytest.mark.parametrize(("message", "field"), FIELDS, ids=lambda each: getattr(each, "kind", None) or each.name)
def test_a_field_may_be_left_out_only_if_it_has_a_default(message: Message, field: "Field[Any]") -> None:
    if field.default is MISSING:
        with pytest.raises(ProtocolError):
            decoded(message, field.name, None)
    else:
        assert decoded(message, field.name, None) == [replace(message, **{field.name: field.default})]


@pytest.mark.parametrize(("message", "field"), FIELDS, ids=lambda each: getattr(each, "kind", None) or each.name)
def test_a_field_of_another_type_is_refused(message: Message, field: "Field[Any]") -> None:
    if field.type is Any:
        return  # a payload may be any JSON value
    value = getattr(message, field.name)
    other = 7 if isinstance(value, bool) or not isinstance(value, int | float) else "7"
    for wrong in (other, [[None]], {"a": 1} if not isinstance(value, dict) else "a"):
        with pytest.raises(ProtocolError):
            decoded(message, field.name, wrong)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"{}", b"3", b'["ping"]', b'[{"kind": "gossip"}]', b'[{"kind": ["ping"]}]', b"[" * 100_000],
)
def test_what_is_no_list_of_messages_is_refused(content: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(content)


def test_messages_of_one_send_come_as_one_packet(ends: tuple[socket.socket, socket.socket]) -> None:
    odd = RankResult(rank=1, value=[None, 2.5, "ü"])
    send(ends[0], Ping(), odd)
    send(ends[0], StoreDied(attempt=3))
    assert receive(ends[1]) == [Ping(), odd]
    assert receive(ends[1]) == [StoreDied(attempt=3)]


def test_what_is_too_large_for_a_packet_comes_in_several_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    sent = [RankResult(rank=i, value="x" * (MAX_PACKET_BYTES // 5)) for i in range(11)]
    sender = threading.Thread(target=send, args=(ends[0], *sent))  # more than the socket's buffer holds
    sender.start()
    found: list[Message] = []
    packets = 0
    while len(found) < len(sent):
        messages = receive(ends[1])
        assert messages is not None
        found += messages
        packets += 1
    sender.join()
    assert found == sent
    assert 3 <= packets <= 11


def test_a_message_that_fits_no_packet_is_refused_with_its_size(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(ValueError, match=rf"a message of \d+ bytes does not fit a packet of {MAX_PACKET_BYTES}"):
        send(ends[0], RankResult(rank=0, value="x" * MAX_PACKET_BYTES))


def test_the_largest_packet_arrives_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    empty = encode([RankResult(rank=0, value="")])
    message = RankResult(rank=0, value="x" * (MAX_PACKET_BYTES - len(empty)))
    send(ends[0], message)
    assert receive(ends[1]) == [message]


def test_none_says_that_every_writer_is_gone(ends: tuple[socket.socket, socket.socket]) -> None:
    other = ends[0].dup()
    send(ends[0], Ping())
    ends[0].close()
    assert receive(ends[1]) == [Ping()]
    other.close()
    assert receive(ends[1]) is None


def test_drain_takes_what_lies_there_and_does_not_wait(ends: tuple[socket.socket, socket.socket]) -> None:
    assert list(drain(ends[1])) == []
    first, second, third = (StoreDied(attempt=number) for number in range(3))
    send(ends[0], first, second)
    send(ends[0], third)
    assert list(drain(ends[1])) == [first, second, third]


def test_what_is_no_message_comes_as_a_warning_and_the_others_as_they_are(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ends[0].send(b'[{"kind": "ping"}, {"kind": "store_died"}, 3, {"kind": "gossip"}, {"kind": "ping"}]')
    first, *others, last = receive(ends[1]) or []
    assert (first, last) == (Ping(), Ping())
    assert [type(message) for message in others] == [RunWarning] * 3
    assert getattr(others[0], "text", "").endswith("not an event of this version: {'kind': 'store_died'}")
