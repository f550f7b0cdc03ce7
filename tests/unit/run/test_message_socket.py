"""Messages between processes: whole packets, in order, and an end that can be told."""

import socket
import threading
from collections.abc import Iterator

import pytest

from phalanx.run.event_types import RunWarning
from phalanx.run.message_socket import MAX_PACKET_BYTES, drain, make_socket_pair, receive, send
from phalanx.run.messages import Message, ProtocolError, encode
from phalanx.run.node_messages import Ping, StopRequested
from phalanx.run.process_messages import RankResult, StoreDied


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = make_socket_pair()
    yield near, far
    near.close()
    far.close()


def test_messages_of_one_send_come_as_one_packet(ends: tuple[socket.socket, socket.socket]) -> None:
    odd = RankResult(rank=1, value=[None, 2.5, "ü"])
    send(ends[0], Ping(), odd)
    send(ends[0], StoreDied(attempt=3))
    assert receive(ends[1]) == [Ping(), odd]
    assert receive(ends[1]) == [StoreDied(attempt=3)]


def test_both_directions_work(ends: tuple[socket.socket, socket.socket]) -> None:
    send(ends[0], Ping())
    send(ends[1], StopRequested())
    assert (receive(ends[0]), receive(ends[1])) == ([StopRequested()], [Ping()])


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


def test_drain_ends_where_every_writer_is_gone(ends: tuple[socket.socket, socket.socket]) -> None:
    send(ends[0], Ping())
    ends[0].close()
    assert list(drain(ends[1])) == [Ping()]


def test_packets_of_several_writers_do_not_mix(ends: tuple[socket.socket, socket.socket]) -> None:
    def write(writer: int) -> None:
        for number in range(50):
            send(ends[0], RankResult(rank=writer, value=[number, "x" * 500]))

    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
    for thread in writers:
        thread.start()
    found: list[RankResult] = []
    while len(found) < 150:
        found += [message for message in receive(ends[1]) or () if isinstance(message, RankResult)]
    for thread in writers:
        thread.join()
    for writer in range(3):
        assert [message.value[0] for message in found if message.rank == writer] == list(range(50))


def test_what_is_no_message_comes_as_a_warning_and_the_others_as_they_are(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ends[0].send(b'[{"kind": "ping"}, {"kind": "store_died"}, 3, {"kind": "gossip"}, {"kind": "ping"}]')
    first, *others, last = receive(ends[1]) or []
    assert (first, last) == (Ping(), Ping())
    assert [type(message) for message in others] == [RunWarning] * 3
    assert getattr(others[0], "text", "").endswith("not an event of this version: {'kind': 'store_died'}")


@pytest.mark.parametrize("packet", [b"{", b"{}", b"3", b"[" * 100_000])
def test_a_packet_that_is_no_list_of_messages_is_an_error(
    ends: tuple[socket.socket, socket.socket], packet: bytes
) -> None:
    ends[0].send(packet)
    with pytest.raises(ProtocolError):
        receive(ends[1])
