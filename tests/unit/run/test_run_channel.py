"""Messages between processes: whole packets, in order, and an end that can be told."""

import socket
import threading
from collections.abc import Iterator

import pytest

from phalanx.run.channel import PACKET, Message, drain, pair, receive, send


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = pair()
    yield near, far
    near.close()
    far.close()


def test_messages_of_one_send_come_as_one_packet(ends: tuple[socket.socket, socket.socket]) -> None:
    send(ends[0], {"a": 1}, {"b": [None, 2.5, "ü"]})
    send(ends[0], {"c": 3})
    assert receive(ends[1]) == [{"a": 1}, {"b": [None, 2.5, "ü"]}]
    assert receive(ends[1]) == [{"c": 3}]


def test_both_directions_work(ends: tuple[socket.socket, socket.socket]) -> None:
    send(ends[0], {"to": "far"})
    send(ends[1], {"to": "near"})
    assert (receive(ends[0]), receive(ends[1])) == ([{"to": "near"}], [{"to": "far"}])


def test_what_is_too_large_for_a_packet_comes_in_several_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    sent = [{"number": i, "text": "x" * (PACKET // 5)} for i in range(11)]
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
    with pytest.raises(ValueError, match=rf"a message of \d+ bytes does not fit a packet of {PACKET}"):
        send(ends[0], {"text": "x" * PACKET})


def test_the_largest_packet_arrives_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    message = {"text": "x" * (PACKET - len('[{"text": ""}]'))}
    send(ends[0], message)
    assert receive(ends[1]) == [message]


def test_none_says_that_every_writer_is_gone(ends: tuple[socket.socket, socket.socket]) -> None:
    other = ends[0].dup()
    send(ends[0], {"last": True})
    ends[0].close()
    assert receive(ends[1]) == [{"last": True}]
    other.close()
    assert receive(ends[1]) is None


def test_drain_takes_what_lies_there_and_does_not_wait(ends: tuple[socket.socket, socket.socket]) -> None:
    assert list(drain(ends[1])) == []
    send(ends[0], {"a": 1}, {"b": 2})
    send(ends[0], {"c": 3})
    assert list(drain(ends[1])) == [{"a": 1}, {"b": 2}, {"c": 3}]


def test_drain_ends_where_every_writer_is_gone(ends: tuple[socket.socket, socket.socket]) -> None:
    send(ends[0], {"a": 1})
    ends[0].close()
    assert list(drain(ends[1])) == [{"a": 1}]


def test_packets_of_several_writers_do_not_mix(ends: tuple[socket.socket, socket.socket]) -> None:
    def write(writer: int) -> None:
        for number in range(50):
            send(ends[0], {"writer": writer, "number": number, "text": "x" * 500})

    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
    for thread in writers:
        thread.start()
    found: list[Message] = []
    while len(found) < 150:
        found += receive(ends[1]) or []
    for thread in writers:
        thread.join()
    for writer in range(3):
        assert [message["number"] for message in found if message["writer"] == writer] == list(range(50))
