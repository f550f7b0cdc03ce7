"""The links that benchmarks/grad_sync measures over: their speed, what the kernel counts, and that nothing is left."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "grad_sync"))
from links import Links, address, find_obstacle
from network_namespaces import list_processes_in
from node_processes import NodeProcesses, TurnFailed
from rate_limited import ComputeTiming, GradientArrival

SIZE = 4_000_000
SERVER = """
import socket
with socket.create_server(("", 19000)) as server:
    print("ready", flush=True)
    with server.accept()[0] as far:
        got = 0
        while got < int(input()): got += len(far.recv(1 << 20))
        far.sendall(b"x")
"""
CLIENT = """
import socket, sys, time
near = socket.create_connection((sys.argv[1], 19000))
start = time.monotonic()
near.sendall(bytes(int(sys.argv[2]))); near.recv(1)
print(time.monotonic() - start)
"""


@pytest.fixture
def links() -> Iterator[Links]:
    why = find_obstacle()
    if why is not None:
        pytest.skip(f"NOTHING IS TESTED OVER LIMITED LINKS: {why}")
    with Links(2) as links:
        yield links


def seconds_to_send(links: Links) -> float:
    """How long node 0 takes to send SIZE bytes to node 1."""
    server = links.start(1, [sys.executable, "-c", SERVER.replace("int(input())", str(SIZE))])
    assert server.stdout is not None
    assert server.stdin is not None
    with server.stdout, server.stdin:
        assert server.stdout.readline() == "ready\n"
        client = links.start(0, [sys.executable, "-c", CLIENT, address(1), str(SIZE)])
        out, _ = client.communicate(timeout=60)
        server.wait(timeout=60)
    return float(out)


def test_a_limited_link_has_its_speed_and_the_kernel_counts_what_went_over_it(links: Links) -> None:
    links.limit("50mbit")
    before = [links.counters(node) for node in range(2)]
    slow = seconds_to_send(links)
    moved = [links.counters(node).since(start) for node, start in enumerate(before)]
    links.limit(None)
    fast = seconds_to_send(links)
    least = 8 * (SIZE - 100_000) / 50e6  # but for two bursts
    assert least < slow < 3 * least
    assert fast < least
    for counted in (moved[0].sent, moved[1].received):
        assert SIZE <= counted < 1.1 * SIZE
    assert moved[1].sent < 0.2 * SIZE


def test_nothing_is_left_of_links_and_what_ran_on_them() -> None:
    why = find_obstacle()
    if why is not None:
        pytest.skip(f"NOTHING IS TESTED OVER LIMITED LINKS: {why}")
    before = os.listdir("/sys/class/net")
    with Links(2) as links:
        process = links.start(0, ["bash", "-c", "trap '' TERM HUP; echo $$; sleep 1000 & wait"])
        assert process.stdout is not None
        assert process.stdin is not None
        with process.stdout, process.stdin:
            process.stdout.readline()
            spaces = [os.readlink(f"/proc/{pid}/ns/net") for _, pid in links._spaces.nodes.values()]
            assert any(list_processes_in(space) for space in spaces)
    process.wait(timeout=20)
    end = time.monotonic() + 20
    while any(list_processes_in(space) for space in spaces):
        assert time.monotonic() < end, "processes outlived their links"
        time.sleep(0.05)
    assert os.listdir("/sys/class/net") == before


@pytest.fixture
def team(tmp_path: Path) -> Iterator[NodeProcesses]:
    why = find_obstacle()
    if why is not None:
        pytest.skip(f"NOTHING IS TESTED OVER LIMITED LINKS: {why}")
    pace = ComputeTiming(0.01, (GradientArrival(("b",), 0.01), GradientArrival(("a",), 0.01)))
    with NodeProcesses(2, {"a": (1000, 300), "b": (500, 400)}, pace, tmp_path / "log") as team:
        yield team


def test_a_turn_tells_seconds_bytes_and_whether_the_sum_is_right(team: NodeProcesses) -> None:
    asked = {"turn": 1, "warmup": 2, "steps": 4, "local": 2}
    alone = team.run_turn({"contender": "none", **asked}, 60.0)
    ours = team.run_turn({"contender": "all-reduce", **asked}, 60.0)
    for one, other in zip(alone, ours, strict=True):
        assert len(one["seconds"]) == len(other["seconds"]) == 4
        assert sum(one["seconds"]) > 4 * 0.0299  # one by one they may be shorter: after a wait that was late
        assert one["sent"] < 20_000  # what two barriers need
        assert 4 * 2_000_000 <= other["sent"] < 4 * 2_200_000  # all of the gradients, fp32, between two
        assert other["error"] < 1e-6


def test_a_turn_that_takes_too_long_is_told(team: NodeProcesses) -> None:
    asked = {"turn": 1, "warmup": 1, "steps": 1, "local": 1}
    with pytest.raises(TurnFailed, match=r"^not done after 0 s$"):
        team.run_turn({"contender": "none", **asked, "steps": 1000}, 0.01)


def test_a_contender_that_fails_is_told_with_its_reason(team: NodeProcesses) -> None:
    asked = {"turn": 1, "warmup": 1, "steps": 1, "local": 1}
    with pytest.raises(TurnFailed, match=r"^node \d: TypeError: BF16 all reduce communication hook required"):
        team.run_turn({"contender": "ddp-bf16", **asked}, 60.0)


def test_without_links_the_benchmark_says_why_and_ends() -> None:
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "grad_sync" / "run.py"
    command = [sys.executable, str(script)]
    environment = {**os.environ, "PATH": "/nowhere"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("nothing is measured: ")
    assert len(done.stderr.splitlines()) == 1
