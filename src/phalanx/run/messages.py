"""The messages between processes, one frozen dataclass for each kind, as lists of JSON objects.

They travel over local packet sockets (here: between an agent, its fork server and its workers, and to processes that
answer calls) and over the control channel (`control_channel.py`: between the agents of a run, which pass on what their
fork servers and workers say). The events of a run travel among them, as their own classes. A packet arrives whole or
not at all, with any number of writers, so workers share one socket without locks. One that is not a valid message of
this version arrives as a warning: it does not end the run of the worker that sent it.
"""

import json
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from phalanx.run.event_types import Event, RunWarning
from phalanx.run.fields import read_fields, to_fields
from phalanx.run.process_messages import BetweenAgents, CallProgress, FromForkServer, FromWorker, ToForkServer

Message = ToForkServer | FromForkServer | CallProgress | FromWorker | BetweenAgents | Event
MESSAGE_TYPES: dict[str, type[Message]] = {each.kind: each for each in get_args(Message)}
MAX_SHOWN_CHARS = 200
"""Characters of something that is no message, in an error."""
MAX_PACKET_BYTES = 128 * 1024
"""Largest packet, in bytes; well below the kernel's default send buffer of 208 KiB."""
_TIMEVAL_STRUCT = struct.Struct("@ll")  # the kernel's struct timeval


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


def make_socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends. Both are inheritable only where they are passed on by number."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class SendTimeoutError(ConnectionError):
    """The other end is there, and does not read."""


def set_send_timeout(sock: socket.socket, timeout_s: float) -> socket.socket:
    """Set the time after which a send on the socket fails, since its reader may hang, and return the socket."""
    whole_seconds = int(timeout_s)
    sock.setsockopt(
        socket.SOL_SOCKET,
        socket.SO_SNDTIMEO,
        _TIMEVAL_STRUCT.pack(whole_seconds, int((timeout_s - whole_seconds) * 1e6)),
    )
    return sock


def send(sock: socket.socket, *messages: Message) -> None:
    """Send messages in one packet, or in several when they are too large for one. TakesNothingError where the other
    end takes nothing for as long as the socket waits (`set_send_timeout`)."""
    packet = encode(messages)
    if len(packet) <= MAX_PACKET_BYTES:
        try:
            sock.send(packet)
        except BlockingIOError:
            raise SendTimeoutError("the other end takes nothing") from None
    elif len(messages) > 1:
        half = len(messages) // 2
        send(sock, *messages[:half])
        send(sock, *messages[half:])
    else:
        raise ValueError(f"a message of {len(packet)} bytes does not fit a packet of {MAX_PACKET_BYTES}")


def _receive_packet(sock: socket.socket, flags: int = 0) -> bytes:
    try:
        return sock.recv(MAX_PACKET_BYTES + 1, flags)
    except ConnectionResetError:  # a writer ended with something unread; said once, before what it had written
        return sock.recv(MAX_PACKET_BYTES + 1, flags)


def receive(sock: socket.socket) -> list[Message] | None:
    """The messages of the next packet; None when every writer is gone. ProtocolError for a packet that is no list."""
    packet = _receive_packet(sock)
    return [_message(found) for found in decode_list(packet)] if packet else None


def drain(sock: socket.socket) -> Iterator[Message]:
    """Messages that lie in a socket right now, without waiting for more."""
    while True:
        try:
            packet = _receive_packet(sock, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not packet:
            return
        yield from map(_message, decode_list(packet))


def _message(found: Any) -> Message:
    try:
        return to_message(found)
    except ProtocolError:
        return warning_of(found)
