"""What comes over the agents' control channel in other bytes: the messages that were sent, up to where they were
changed, or the end of the connection."""

import json
import queue
import socket
from typing import Any, get_args

import pytest

from made_messages import signed_frame
from mutations import STRANGE, flipped, hand, spliced, strange
from phalanx.jobs.agent.node_group import NodeGroup, make_hello
from phalanx.run.authentication import AuthenticationError
from phalanx.run.control_channel import AuthConnection, accept_agent
from phalanx.run.fields import to_fields
from phalanx.run.messages import Message, ProtocolError, to_message
from phalanx.run.process_messages import HeartbeatEntry, Heartbeats, Ping, WorkerExited

TRIED = 200
KEY, TOKEN = b"k" * 32, b"0123456789abcdef"
MESSAGES: list[Message] = [
    Ping(),
    Heartbeats(
        entries=(HeartbeatEntry(rank=0, pid=1, num_beats=2, step=3, phase="step", age_s=0.5, busy_s=1.0),),
        stopped_ranks=(0,),
    ),
    WorkerExited(rank=0, exit_status=1),
    make_hello(1, 2),
]


def wires() -> tuple[AuthConnection, socket.socket]:
    """The leader's end, and the raw socket of a member's."""
    near, far = socket.socketpair()
    far.settimeout(5)
    return AuthConnection(near, KEY, is_leader=True), far


def frames(*payloads: Any) -> bytes:
    """What a member that knows the key sends, whatever JSON is in its frames."""
    near, far = socket.socketpair()
    member = AuthConnection(near, KEY, is_leader=False)
    with near, far:
        return b"".join(signed_frame(member, payload, number) for number, payload in enumerate(payloads))


def heard(content: bytes) -> list[Message]:
    """What the leader makes of it."""
    wire, far = wires()
    with wire.sock, far:
        far.sendall(content)
        far.shutdown(socket.SHUT_WR)
        found: list[Message] = []
        while (messages := wire.receive()) is not None:
            found += messages
        return found


def test_a_changed_stream_gives_the_messages_before_the_change_and_nothing_else() -> None:
    rng = hand("wire")
    whole = frames(*([to_fields(message)] for message in MESSAGES))
    assert heard(whole) == MESSAGES
    for _ in range(TRIED):
        bad = rng.choice([flipped, spliced])(whole, rng)
        found = heard(bad)
        assert found == MESSAGES[: len(found)], bad
        assert len(found) < len(MESSAGES) or bad.startswith(whole), bad


def test_frames_of_anything_but_messages_end_the_connection() -> None:
    ping = [{"kind": "ping"}]
    others = [each for each in STRANGE if each != []]
    others += [[[]], [{}], [{"kind": 1}], ["kind"], {"kind": "ping"}, [ping], [{"kind": "gossip"}]]
    others += [[{"kind": "worker_exited", "rank": 0}], [{"kind": "leave", "exit_code": "0"}]]
    for payload in others:
        assert heard(frames(ping, payload, ping)) in ([], [Ping()]), payload


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_a_message_with_anything_in_its_fields_is_that_message_or_ends_the_connection(message: Message) -> None:
    rng = hand(message.kind)
    for _ in range(TRIED):
        payload = strange(json.loads(json.dumps(to_fields(message))), rng)
        found = heard(frames([payload]))
        assert len(found) <= 1, payload
        assert all(isinstance(each, get_args(Message)) for each in found), payload


def test_an_agent_that_introduces_itself_as_anything_is_sent_away_or_is_that_node() -> None:
    rng = hand("hello")
    own = make_hello(1, 2)
    for _ in range(TRIED):
        said = strange(to_fields(own), rng)
        try:
            hello = to_message(said)
        except ProtocolError:
            continue  # the door keeps it out
        near, far = socket.socketpair()
        door = Doorstep()
        door.joins.put((AuthConnection(near, KEY, is_leader=True), hello))
        crew = NodeGroup(None, 2)  # type: ignore[arg-type]
        crew.server = door  # type: ignore[assignment]
        came = crew.accept_joins()
        assert [node.node_rank for node, _ in came] in ([], [1]), said
        assert not came or {**said, "host": ""} == {**to_fields(own), "host": ""}, said
        near.close()
        far.close()


class Doorstep:
    """A door at which somebody stands."""

    def __init__(self) -> None:
        self.joins: queue.SimpleQueue[Any] = queue.SimpleQueue()


@pytest.mark.timeout(60)
def test_a_stranger_that_says_anything_is_refused() -> None:
    rng = hand("stranger")
    for _ in range(TRIED):
        near, far = socket.socketpair()
        with near, far:
            far.sendall(rng.randbytes(rng.randrange(200)))
            far.shutdown(socket.SHUT_WR)
            with pytest.raises(AuthenticationError):
                accept_agent(near, TOKEN, 1.0)
