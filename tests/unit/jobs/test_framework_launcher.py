"""How the nodes of a program of any framework come together: every wait has an end and a message."""

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from phalanx.deadline import Deadline
from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.agent.node_group import make_hello
from phalanx.jobs.frameworks import launcher
from phalanx.jobs.frameworks.launcher import RendezvousError, join_nodes
from phalanx.jobs.frameworks.process_env import (
    check_framework,
    make_process_variables,
    select_visible_devices,
)
from phalanx.run.authentication import reserve_port
from phalanx.run.control_channel import TCP_KEEPALIVE_OPTIONS, ControlServer, connect_to_leader
from phalanx.run.messages import Message
from phalanx.run.node_env import NodeEnv
from phalanx.run.process_messages import Leave, Ping, Topology

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TOKEN", TOKEN)
    monkeypatch.delenv("PHALANX_TOKEN_FILE", raising=False)
    monkeypatch.setattr(launcher, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(launcher, "JOIN_TIMEOUT_S", 0.5)
    monkeypatch.setattr(launcher, "Deadline", partial(Deadline, report_interval_s=0.2))


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    with reserve_port() as reserved:
        yield reserved.getsockname()


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_nodes_that_do_not_come_are_named_and_may_be_started_again(
    address: tuple[str, int], stack: contextlib.ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RendezvousError, match=r"^nodes 1, 2 did not come within 0 s$") as unmet:
        join_nodes(NodeEnv(0, 3, address), 1, stack)
    assert unmet.value.code is ExitCode.UNFINISHED
    assert capsys.readouterr().err.startswith("still waiting for nodes 1, 2 after 0 s")


def test_a_leader_that_does_not_come_is_reported(address: tuple[str, int], stack: contextlib.ExitStack) -> None:
    with pytest.raises(RendezvousError, match=f"^node 0 cannot be reached at 127.0.0.1:{address[1]}: "):
        join_nodes(NodeEnv(1, 2, address), 1, stack)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_is_stopped_while_it_waits_for_others_may_be_started_again(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    monkeypatch.setattr(launcher, "JOIN_TIMEOUT_S", 60.0)
    values = {"NUM_NODES": "2", "NODE_RANK": str(rank), "LEADER_ADDR": f"{address[0]}:{address[1]}"}
    for name, value in values.items():
        monkeypatch.setenv(f"PHALANX_{name}", value)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    assert launcher.main(["torch", "1", "--", "true"]) == ExitCode.UNFINISHED
    assert capsys.readouterr().err.endswith("error: asked to stop before all nodes had come\n")


def test_a_leader_that_never_says_who_all_are_is_not_waited_for_without_end(
    address: tuple[str, int], stack: contextlib.ExitStack
) -> None:
    with (
        ControlServer(address, TOKEN.encode()),
        pytest.raises(RendezvousError, match=r"^not all nodes came within 0 s$"),
    ):
        join_nodes(NodeEnv(1, 2, address), 1, stack)


def test_a_node_that_is_sent_away_is_reported_on_both_sides(
    address: tuple[str, int], stack: contextlib.ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[Exception] = []

    def lead() -> None:
        with contextlib.ExitStack() as own:
            try:
                join_nodes(NodeEnv(0, 2, address), 2, own)
            except RendezvousError as error:
                said.append(error)

    leader = threading.Thread(target=lead)
    leader.start()
    with pytest.raises(UsageError, match=r"^it starts 1 processes, and the leading node 2$"):
        join_nodes(NodeEnv(1, 2, address), 1, stack)
    leader.join(20)
    assert [str(error) for error in said] == ["node 1 did not come within 0 s"]
    assert f"node 1 ({socket.gethostname()}) was sent away: it starts 1 processes" in capsys.readouterr().err


def test_an_agent_that_launches_nothing_is_sent_away_in_a_sentence(
    address: tuple[str, int], stack: contextlib.ExitStack
) -> None:
    """As where one node was started with `phalanx train`."""

    def come() -> None:
        wire = connect_to_leader(address, TOKEN.encode())
        wire.send(make_hello(1, 2))
        wire.receive()
        wire.close()

    threading.Timer(0.1, come).start()
    with pytest.raises(RendezvousError, match=r"^node 1 did not come"):
        join_nodes(NodeEnv(0, 2, address), 1, stack)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (Leave(exit_code=64, message="it starts 1 processes"), "it starts 1 processes"),
        (Leave(exit_code=77, message="it starts a program"), "it starts a program"),
        (Ping(), "node 0 runs something else than this node"),
    ],
    ids=["rejected", "a leader that trains", "anything else"],
)
def test_a_node_that_is_not_wanted_says_why(
    address: tuple[str, int], stack: contextlib.ExitStack, said: Message, why: str
) -> None:
    with ControlServer(address, TOKEN.encode()) as door:

        def reject() -> None:
            wire, _ = door.joins.get(timeout=5)
            wire.send(said)
            wire.close()

        thread = threading.Thread(target=reject)
        thread.start()
        with pytest.raises(UsageError, match=f"^{why}$"):
            join_nodes(NodeEnv(1, 2, address), 1, stack)
        thread.join()


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="this system has no such options")
def test_a_machine_that_vanishes_is_noticed_where_nothing_is_sent(address: tuple[str, int]) -> None:
    with ControlServer(address, TOKEN.encode()):
        wire = connect_to_leader(address, TOKEN.encode())
        assert wire.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        found = {
            name: wire.sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in TCP_KEEPALIVE_OPTIONS
        }
        wire.close()
    assert found == TCP_KEEPALIVE_OPTIONS


WORLD = Topology(hosts=("10.0.0.1", "10.0.0.2"), nproc_per_node=2, ports=((5001, 5002, 5003), (6001, 6002, 6003)))


def test_torch_gets_what_torchrun_gives() -> None:
    found = make_process_variables("torch", WORLD, 3)
    wanted = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    assert wanted.items() <= found.items()
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "5003")


def test_jax_gets_its_coordinator() -> None:
    found = make_process_variables("jax", WORLD, 2)
    assert found["JAX_COORDINATOR_ADDRESS"] == "10.0.0.1:5003"
    assert (found["JAX_NUM_PROCESSES"], found["JAX_PROCESS_ID"]) == ("4", "2")


def test_tensorflow_gets_every_worker_and_its_own_index() -> None:
    config = json.loads(make_process_variables("tensorflow", WORLD, 2)["TF_CONFIG"])
    assert config["cluster"]["worker"] == ["10.0.0.1:5001", "10.0.0.1:5002", "10.0.0.2:6001", "10.0.0.2:6002"]
    assert config["task"] == {"type": "worker", "index": 2}


def test_an_address_of_the_sixth_version_is_put_into_brackets() -> None:
    world = Topology(hosts=("fe80::1",), nproc_per_node=1, ports=((1, 2),))
    assert make_process_variables("jax", world, 0)["JAX_COORDINATOR_ADDRESS"] == "[fe80::1]:2"


def test_every_process_of_a_plain_program_knows_its_rank() -> None:
    assert make_process_variables("plain", WORLD, 1) == {"PHALANX_RANK": "1", "PHALANX_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("visible", "local", "found"),
    [("0,1,2,3", 1, "2,3"), ("GPU-a,GPU-b", 0, "GPU-a"), ("0", 0, None), ("", 0, None), (None, 1, None)],
)
def test_processes_of_a_node_share_its_devices(visible: str | None, local: int, found: str | None) -> None:
    assert select_visible_devices(visible, 2, local) == found


def test_a_framework_that_is_not_in_the_table_is_told_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="torch, jax, tensorflow, mpi, plain"):
        check_framework("pytroch")
