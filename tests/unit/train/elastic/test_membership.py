"""Orders of the agent to a worker, and connections that are closed under a process group."""

import socket
import threading
from collections.abc import Iterator

import pytest

from phalanx.run.message_socket import make_socket_pair, send
from phalanx.run.process_messages import MembershipUpdate
from phalanx.train.elastic.membership import MembershipUpdates, SocketRegistry


@pytest.fixture
def agent_and_worker() -> Iterator[tuple[socket.socket, socket.socket]]:
    agent, worker = make_socket_pair()
    with worker:
        with agent:
            yield agent, worker
        for thread in threading.enumerate():  # who reads from it finds that nobody writes any more
            if thread.name == "orders":
                thread.join(10)
                assert not thread.is_alive()


def told(attempt: int, lost: bool) -> MembershipUpdate:
    return MembershipUpdate(attempt=attempt, active_ranks=(0, 2), last_reported_step=7, worker_lost=lost)


def test_the_newest_order_counts_and_is_obeyed_once(agent_and_worker: tuple[socket.socket, socket.socket]) -> None:
    agent, worker = agent_and_worker
    orders = MembershipUpdates(worker, lambda: None)
    assert not orders.has_update
    send(agent, told(4, lost=False), told(5, lost=True))
    order = orders.take_update()
    while order.attempt != 5:
        order = orders.take_update()
    assert order == told(5, lost=True)
    assert not orders.has_update


def test_only_a_loss_tears_a_worker_out_of_what_it_waits_for(
    agent_and_worker: tuple[socket.socket, socket.socket],
) -> None:
    agent, worker = agent_and_worker
    cut: list[int] = []
    orders = MembershipUpdates(worker, lambda: cut.append(1))
    send(agent, told(4, lost=False))
    orders.take_update()
    assert cut == []
    send(agent, told(5, lost=True))
    orders.take_update()
    send(agent, told(6, lost=False))  # the thread cuts before it reads on
    orders.take_update()
    assert cut == [1]


def test_connections_are_cut_before_a_loss_is_told(agent_and_worker: tuple[socket.socket, socket.socket]) -> None:
    """Who obeys at once might have opened those of the next group by then."""
    agent, worker = agent_and_worker
    waiting: list[bool] = []
    orders = MembershipUpdates(worker, lambda: waiting.append(orders.has_update))
    send(agent, told(5, lost=True))
    orders.take_update()
    assert waiting == [False]


def connected(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    near = socket.create_connection(server.getsockname(), 5)
    far, _ = server.accept()
    far.settimeout(5)
    return near, far


def test_only_connections_that_were_opened_meanwhile_are_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        before, before_far = connected(server)
        connections = SocketRegistry()
        with connections:
            during, during_far = connected(server)
        after, after_far = connected(server)
        with before, before_far, during, during_far, after, after_far:
            connections.shut_down()
            assert during_far.recv(1) == b""
            for near, far in ((before, before_far), (after, after_far)):
                near.sendall(b"x")
                assert far.recv(1) == b"x"


def test_the_connections_of_several_groups_are_cut_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = SocketRegistry()
        with connections:
            one, one_far = connected(server)
        with connections:
            two, two_far = connected(server)
        with one, one_far, two, two_far:
            connections.shut_down()
            assert one_far.recv(1) == two_far.recv(1) == b""
        with connections:
            next_one, next_far = connected(server)
        with next_one, next_far:
            next_one.sendall(b"x")
            assert next_far.recv(1) == b"x"


def test_who_listens_goes_on_listening() -> None:
    connections = SocketRegistry()
    with connections, socket.create_server(("127.0.0.1", 0)) as server:
        pass
    connections.shut_down()
    with connections:
        server = socket.create_server(("127.0.0.1", 0))
    with server:
        connections.shut_down()
        near, far = connected(server)
        near.close()
        far.close()


def test_another_socket_with_the_number_of_one_that_was_closed_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = SocketRegistry()
        with connections:
            near, far = connected(server)
        number = near.fileno()
        near.close()
        far.close()
        near, far = connected(server)
        with near, far:
            assert number in (near.fileno(), far.fileno())
            connections.shut_down()
            near.sendall(b"x")
            assert far.recv(1) == b"x"
