"""The messages between processes, as bytes: one frozen dataclass for each kind.

They travel as lists of JSON objects, over local packet sockets (`message_socket.py`: between an agent, its fork server
and its workers, and to processes that answer calls) and over the control channel (`control_channel.py`: between the
agents of a run, which pass on what their fork servers and workers say). The events of a run travel among them, as their
own classes.
"""

import json
from collections.abc import Sequence
from typing import Any, get_args

from phalanx.run.event_types import Event, RunWarning
from phalanx.run.fields import read_fields, to_fields
from phalanx.run.node_messages import BetweenAgents, BetweenLinkTests
from phalanx.run.process_messages import CallProgress, FromForkServer, FromWorker, MembershipUpdate, ToForkServer

Message = (
    ToForkServer
    | MembershipUpdate
    | FromForkServer
    | CallProgress
    | FromWorker
    | BetweenAgents
    | BetweenLinkTests
    | Event
)
"""Any message."""
MESSAGE_TYPES: dict[str, type[Message]] = {each.kind: each for each in get_args(Message)}
"""Message types by kind."""
MAX_SHOWN_CHARS = 200
"""Characters of something that is no message, in an error."""


class ProtocolError(Exception):
    """The bytes are no messages of this Phalanx."""


def encode(messages: Sequence[Message]) -> bytes:
    """Write messages as one JSON text."""
    return json.dumps([to_fields(message) for message in messages]).encode()


def decode(content: bytes) -> list[Message]:
    """Read the messages that `encode` wrote. ProtocolError where any of them has an unknown kind, lacks a field or has
    one of the wrong type. The carriers limit the number of bytes."""
    return [to_message(found) for found in decode_list(content)]


def decode_list(content: bytes) -> list[Any]:
    """Read the JSON values of messages, unchecked. ProtocolError where the bytes are no JSON list."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise ProtocolError(f"no list of messages: {content[:MAX_SHOWN_CHARS]!r}")
    return found


def to_message(found: Any) -> Message:
    """Read one message of its JSON values. ProtocolError as of `decode`."""
    try:
        message: Message = read_fields(found, MESSAGE_TYPES)
    except (ValueError, OverflowError):
        raise ProtocolError(f"not a message of this version: {_shown(found)}") from None
    return message


def warning_of(found: Any) -> RunWarning:
    """Return a warning that a worker sent something that is none of its messages."""
    return RunWarning(text=f"a worker sent a message that is not an event of this version: {_shown(found)}")


def _shown(found: Any) -> str:
    try:
        return str(found)[:MAX_SHOWN_CHARS]
    except RecursionError:
        return "nested too deeply"
