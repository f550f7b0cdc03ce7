"""Messages between agent, fork server and workers over local packet sockets. The kinds: `messages.py`.

A packet arrives whole or not at all, with any number of writers, so workers share one socket without locks. It carries
a list of messages. A packet that is not a valid message of this version, such as an event with a number that no event
may have, arrives as a warning: it does not end the run of the worker that sent it.
"""

import socket
import struct
from collections.abc import Iterator
from typing import Any

from phalanx.run.messages import Message, ProtocolError, decode_list, encode, to_message, warning_of

MAX_PACKET_BYTES = 128 * 1024
"""Largest packet, in bytes; well below the kernel's default send buffer of 208 KiB."""
_TIMEVAL_STRUCT = struct.Struct("@ll")  # the kernel's struct timeval


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
