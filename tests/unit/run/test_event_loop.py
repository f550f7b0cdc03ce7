"""The event loop: readers, timers and what removes them."""

import socket
from collections.abc import Iterator

import pytest

from phalanx.run.event_loop import EventLoop


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def test_a_reader_is_called_when_there_is_something_to_read(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    received: list[bytes] = []
    with EventLoop() as loop:
        loop.add_reader(near, lambda: received.append(near.recv(10)))
        assert not loop.run_once(0.0)
        far.send(b"abc")
        assert loop.run_once(5.0)
        far.close()
        assert loop.run_once(5.0)  # the end of a peer is readable, too
    assert received == [b"abc", b""]


def test_a_source_that_was_removed_in_this_round_is_not_read() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    calls: list[int] = []
    with EventLoop() as loop:

        def read(number: int) -> None:
            calls.append(number)
            loop.remove_reader(pairs[1 - number][0])

        for number, (near, far) in enumerate(pairs):
            far.send(b"x")
            loop.add_reader(near, lambda number=number: read(number))  # type: ignore[misc]
        loop.run_once(5.0)
    assert len(calls) == 1
    for near, far in pairs:
        near.close()
        far.close()


def test_a_timer_is_called_once_when_it_is_due() -> None:
    now, calls = [0.0], list[float]()

    def action() -> None:
        calls.append(now[0])

    with EventLoop(lambda: now[0]) as loop:
        loop.set_timer(action, 10.0)
        loop.run_once(0.0)
        assert calls == []
        now[0] = 10.0
        loop.run_once()  # does not wait: the timer is due
        loop.run_once(0.0)
        assert calls == [10.0]


def test_a_timer_can_be_moved_and_cancelled() -> None:
    now, calls = [5.0], list[str]()

    def cancelled() -> None:
        calls.append("cancelled")

    def moved() -> None:
        calls.append("moved")
        loop.set_timer(cancelled, None)

    with EventLoop(lambda: now[0]) as loop:
        loop.set_timer(moved, 100.0)
        loop.set_timer(moved, 1.0)
        loop.set_timer(cancelled, 2.0)
        loop.run_once(0.0)
    assert calls == ["moved"]
