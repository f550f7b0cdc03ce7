"""What comes over the agents' control channel in other bytes: the messages that were sent, up to where they were
changed, or the end of the connection."""

import json
import queue
import socket
import struct
from typing import Any

import pytest
from mutations import STRANGE, flipped, hand, spliced, strange

from phalanx.jobs.nodes import Crew, introduction
from phalanx.run.wire import Refused, Wire, answer

TRIED = 200
KEY, TOKEN = b"k" * 32, b"0123456789abcdef"
MESSAGES: list[Any] = [
    {"kind": "ping"},
    {"kind": "beats", "beats": [[0, 1, 2, 3, "step", 0.5, True]], "held": [0]},
    {"kind": "exited", "rank": 0, "code": 1},
    introduction(1, 2),
]


def wires() -> tuple[Wire, socket.socket]:
    """The leader's end, and the raw socket of a member's."""
    near, far = socket.socketpair()
    far.settimeout(5)
    return Wire(near, KEY, leads=True), far


def frames(*payloads: Any) -> bytes:
    """What a member that knows the key sends, whatever JSON is in its frames."""
    near, far = socket.socketpair()
    member = Wire(near, KEY, leads=False)
    with near, far:
        found = b""
        for number, payload in enumerate(payloads):
            content = json.dumps(payload).encode()
            found += struct.pack("!I", len(content)) + member._sign(b"member", number, content) + content
        return found


def heard(content: bytes) -> list[Any] | None:
    """What the leader makes of it."""
    wire, far = wires()
    with wire.sock, far:
        far.sendall(content)
        far.shutdown(socket.SHUT_WR)
        found: list[Any] = []
        while (messages := wire.receive()) is not None:
            found += messages
        return found


def test_a_changed_stream_gives_the_messages_before_the_change_and_nothing_else() -> None:
    rng = hand("wire")
    whole = frames(*([message] for message in MESSAGES))
    assert heard(whole) == MESSAGES
    for _ in range(TRIED):
        bad = rng.choice([flipped, spliced])(whole, rng)
        found = heard(bad)
        assert found == MESSAGES[: len(found)], bad
        assert len(found) < len(MESSAGES) or bad.startswith(whole), bad


def test_frames_of_anything_but_messages_end_the_connection() -> None:
    ping = [{"kind": "ping"}]
    others = [each for each in STRANGE if each != []]
    for payload in [*others, [[]], [{}], [{"kind": 1}], ["kind"], {"kind": "ping"}, [ping]]:
        assert heard(frames(ping, payload, ping)) in ([], ping), payload


def test_an_agent_that_introduces_itself_as_anything_is_sent_away_or_is_that_node() -> None:
    rng = hand("hello")
    own = introduction(1, 2)
    for _ in range(TRIED):
        hello = strange(own, rng)
        if not isinstance(hello, dict) or hello.get("kind") != "hello":
            continue  # the door keeps it out
        near, far = socket.socketpair()
        door = Doorstep()
        door.arrived.put((Wire(near, KEY, leads=True), hello))
        crew = Crew(None, 2)  # type: ignore[arg-type]
        crew.door = door  # type: ignore[assignment]
        came = crew.admit()
        assert [node.index for node, _ in came] in ([], [1]), hello
        assert not came or {**hello, "host": ""} == {**own, "host": ""}, hello
        near.close()
        far.close()


class Doorstep:
    """A door at which somebody stands."""

    def __init__(self) -> None:
        self.arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()


@pytest.mark.timeout(60)
def test_a_stranger_that_says_anything_is_refused() -> None:
    rng = hand("stranger")
    for _ in range(TRIED):
        near, far = socket.socketpair()
        with near, far:
            far.sendall(rng.randbytes(rng.randrange(200)))
            far.shutdown(socket.SHUT_WR)
            with pytest.raises(Refused):
                answer(near, TOKEN, 1.0)
