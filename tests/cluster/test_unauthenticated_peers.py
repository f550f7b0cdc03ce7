"""Who does not belong to a run does not reach its workers: another host, or another user of this machine."""

import os
import re
import socket
import subprocess
from collections.abc import Container, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from phalanx.errors import ExitCode
from phalanx.run import Run
from phalanx.run.event_types import AttemptStarted, StepDone, WorkerFailure, WorkerStarted
from phalanx.run.events import read_events
from train_harness import HarnessRun, TrainHarness, plan_fault, wait_until, write_faults

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="another user and a network namespace need root")
SPACE, HERE, THERE = "phalanx-stranger", "10.231.97.1", "10.231.97.2"
NOBODY = 65534
CHANGES = {"steps": 30, "evaluation": {"every": None}}


def listening(root: int, but: Container[int] = ()) -> set[tuple[str, int]]:
    """Where processes below `root`, and it, listen, but for these processes."""
    found = set()
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        for each in (process, *process.children(recursive=True)):
            if each.pid in but:
                continue
            with suppress(psutil.NoSuchProcess):
                for one in each.net_connections():
                    if one.status == psutil.CONN_LISTEN:
                        found.add((one.laddr.ip, one.laddr.port))
    return found


def workers(run: Run, attempt: int) -> list[int]:
    """The processes of an attempt's workers."""
    return [
        event.pid for event in read_events(run.events) if isinstance(event, WorkerStarted) if event.attempt == attempt
    ]


def trains(run: Run, attempt: int) -> bool:
    """Whether a step of the attempt was done: its workers have met."""
    begun = False
    for event in read_events(run.events):
        if isinstance(event, AttemptStarted):
            begun = begun or event.attempt == attempt
        elif isinstance(event, StepDone) and begun:
            return True
    return False


@pytest.fixture
def job_address(request: pytest.FixtureRequest) -> str:
    """Of a network that other hosts reach, where one can be made; the name of this machine need not lead there."""
    if os.geteuid() == 0:
        request.getfixturevalue("space")
        return HERE
    return "127.0.0.1"


@pytest.fixture
def space() -> Iterator[str]:
    """A network namespace from which this machine is reached at HERE."""
    with ExitStack() as stack:
        ip("netns", "add", SPACE)
        stack.callback(ip, "netns", "del", SPACE)
        ip("link", "add", "phx-here", "type", "veth", "peer", "name", "phx-there", "netns", SPACE)
        ip("addr", "add", f"{HERE}/24", "dev", "phx-here")
        ip("link", "set", "phx-here", "up")
        ip("-n", SPACE, "addr", "add", f"{THERE}/24", "dev", "phx-there")
        ip("-n", SPACE, "link", "set", "phx-there", "up")
        yield SPACE


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"namespaces are forbidden here: {done.stderr.strip()}")


def reached(space: str, ports: set[int]) -> str:
    """Which of these ports of this machine answer somebody in the namespace."""
    program = (
        "import socket, sys\n"
        "for port in sys.argv[2:]:\n"
        "    try: socket.create_connection((sys.argv[1], int(port)), 5); print(port)\n"
        "    except OSError: pass\n"
    )
    command = ["ip", "netns", "exec", space, "python3", "-c", program, HERE, *map(str, sorted(ports))]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@NEEDS_ROOT
def test_a_stranger_reaches_no_worker_of_one_machine_neither_at_first_nor_after_a_restart(
    lab: TrainHarness, space: str
) -> None:
    run = lab.new_run()
    write_faults(run, [plan_fault(0, "slow", delay=0.15, attempt=None), plan_fault(15, ranks=[1])])
    with lab.start("train", lab.recipe_file(CHANGES), "--run", run.path, "--nproc-per-node", "2") as process:
        for attempt in (0, 1):
            wait_until(lambda attempt=attempt: trains(run, attempt), 60, "a step")
            found = listening(process.pid)
            assert found, "gloo listens somewhere"
            assert {address for address, _ in found} <= {"127.0.0.1", "::1"}
            assert reached(space, {port for _, port in found}) == ""
            with socket.create_server((HERE, 0)) as control:  # what listens there is reached
                assert reached(space, {control.getsockname()[1]}) != ""
            for pid in workers(run, attempt):
                assert opened_by_nobody(pid) == ""
        process.wait(timeout=60)
    assert process.returncode == ExitCode.DONE


def opened_by_nobody(pid: int) -> str:
    """Which of the worker's files, where it met the others among them, another user can open."""
    program = (
        "import os, sys\n"
        "try: names = os.listdir(f'/proc/{sys.argv[1]}/fd')\n"
        "except PermissionError: names = range(64)\n"
        "for name in names:\n"
        "    try: os.close(os.open(f'/proc/{sys.argv[1]}/fd/{name}', os.O_RDWR)); print(name)\n"
        "    except OSError: pass\n"
    )
    command = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "/usr/bin/python3", "-c"]
    return subprocess.run([*command, program, str(pid)], capture_output=True, text=True, check=True).stdout


def test_of_several_nodes_a_stranger_can_lead_no_worker_to_his_address(
    lab: TrainHarness, tmp_path: Path, job_address: str
) -> None:
    """Store and gloo listen on the job's address only. Who reaches the store nevertheless repeats what workers of the
    first attempt said there, and puts addresses of his own, where those of the next will look."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    run = lab.new_run()
    write_faults(run, [plan_fault(0, "slow", delay=0.1), plan_fault(25, ranks=[1])])
    with socket.create_server((job_address, 0)) as free:
        port = free.getsockname()[1]
    words = ("train", lab.recipe_file(CHANGES), "--run", run.path, "--nproc-per-node", "1")
    variables = {
        "PHALANX_NUM_NODES": "2",
        "PHALANX_LEADER_ADDR": f"{job_address}:{port}",
        "PHALANX_TOKEN_FILE": str(token),
    }
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(lab.start(*words, variables={**variables, "PHALANX_NODE_RANK": str(node)}))
            for node in range(2)
        ]
        wait_until(lambda: trains(run, 0), 60, "a step")
        found = listening(nodes[0].pid)
        assert {address for address, _ in found | listening(nodes[1].pid)} == {job_address}
        trap = stack.enter_context(socket.create_server((job_address, 0)))
        # What agent and workers listen on is no store. gloo answers nobody before the attempt ends, which is too late.
        ((_, store),) = listening(nodes[0].pid, but=[nodes[0].pid, *workers(run, 0)])
        planted = plant(job_address, store, trap.getsockname()[1])
        assert planted > 0, "the stranger found the store"
        ended = [node.wait(timeout=90) for node in nodes]
        trap.setblocking(False)
        with pytest.raises(BlockingIOError):
            trap.accept()
    assert ended == [ExitCode.DONE, ExitCode.DONE]
    assert any(isinstance(event, WorkerFailure) for event in read_events(run.events))
    assert HarnessRun(run, 0, "").digest == lab.train_reference(CHANGES, 2).digest


def plant(address: str, port: int, trap: int) -> int:
    """Say in the store at this port, if it is one, what may lead workers of the next attempt astray; how often."""
    try:
        store = TCPStore(address, port, None, False, timedelta(seconds=1))
        names = store.list_keys()
    except (DistError, RuntimeError):
        return 0
    said = {name: store.get(name) for name in names if name.startswith("attempt0/1/") and store.check([name])}
    here = socket.inet_aton(address)
    own = {
        name: re.sub(rb"..(?=" + re.escape(here) + rb")", trap.to_bytes(2, "big"), value, flags=re.DOTALL)
        for name, value in said.items()
    }
    for name, value in said.items():
        for each in (value, own[name][32:], own[name]):
            store.set(name.replace("attempt0/1/", "attempt1/2/"), each)
    return sum(own[name] != value for name, value in said.items())
