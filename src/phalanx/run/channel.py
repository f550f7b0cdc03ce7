"""Messages between agent, nursery and workers: JSON objects over local packet sockets.

A packet is whole or not there, from any number of writers, so workers share one socket without locks. A packet that
is a list carries several messages.
"""

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]
PACKET = 128 * 1024
"""Largest packet, in bytes; well below the kernel's default send buffer of 208 KiB."""
_TIME = struct.Struct("@ll")  # the kernel's struct timeval


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends. Both are inheritable only where they are passed on by number."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class TakesNothingError(ConnectionError):
    """The other end is there, and does not read."""


def bounded(sock: socket.socket, seconds: float) -> socket.socket:
    """The socket, over which nothing is sent for longer than that: who should read it may be held still."""
    whole = int(seconds)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(whole, int((seconds - whole) * 1e6)))
    return sock


def send(sock: socket.socket, *messages: Message) -> None:
    """Send messages in one packet, or in several when they are too large for one. TakesNothingError where the other
    end takes nothing for as long as the socket waits (`bounded`)."""
    packet = json.dumps(messages).encode()
    if len(packet) <= PACKET:
        try:
            sock.send(packet)
        except BlockingIOError:
            raise TakesNothingError("the other end takes nothing") from None
    elif len(messages) > 1:
        half = len(messages) // 2
        send(sock, *messages[:half])
        send(sock, *messages[half:])
    else:
        raise ValueError(f"a message of {len(packet)} bytes does not fit a packet of {PACKET}")


def _packet(sock: socket.socket, flags: int = 0) -> bytes:
    try:
        return sock.recv(PACKET + 1, flags)
    except ConnectionResetError:  # a writer ended with something unread; said once, before what it had written
        return sock.recv(PACKET + 1, flags)


def receive(sock: socket.socket) -> list[Message] | None:
    """The messages of the next packet; None when every writer is gone."""
    packet = _packet(sock)
    if not packet:
        return None
    messages: list[Message] = json.loads(packet)
    return messages


def drain(sock: socket.socket) -> Iterator[Message]:
    """Messages that lie in a socket right now, without waiting for more."""
    while True:
        try:
            packet = _packet(sock, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not packet:
            return
        yield from json.loads(packet)
