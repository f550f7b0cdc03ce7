"""Messages between processes: whole packets, in order, and an end that can be told."""

import socket
import threading

import pytest

from phalanx.run.event_types import RunWarning
from phalanx.run.messages import MAX_PACKET_BYTES, Message, drain, encode, receive, send
from phalanx.run.process_messages import Ping, RankResult, StoreDied


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
