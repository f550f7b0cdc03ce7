"""Jobs on a real Ray of two machines, both of them this one: started once, in about 10 s, for all tests here."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from backend_contract import BackendContract
from phalanx.errors import UsageError
from phalanx.jobs.backends.base import NodeService
from phalanx.jobs.backends.ray.backend import RayBackend
from phalanx.jobs.spec import Job, JobState, JobStatus
from phalanx.run.event_types import AttemptStarted
from train_harness import HarnessRun, TrainHarness, count_steps, plan_fault, write_faults

pytest.importorskip("ray", reason="Ray is not installed: pip install 'phalanx[ray]'")
pytestmark = pytest.mark.filterwarnings("default")  # of Ray's client

PATIENCE = 120.0


def free_ports(count: int) -> list[int]:
    """Below those that Ray gives to its workers and the kernel to connections."""
    found: list[int] = []
    for port in range(7000 + os.getpid() % 1000, 9900):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("there are no free ports")


def start(machine: str, *words: str) -> subprocess.Popen[bytes]:
    """A machine of Ray's; what runs there finds its name in MACHINE."""
    program = shutil.which("ray", path=str(Path(sys.executable).parent)) or "ray"
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
    flags = ("--block", "--disable-usage-stats", "--num-cpus=8", "--object-store-memory=80000000")
    environment = {**os.environ, "MACHINE": machine}
    return subprocess.Popen([program, "start", *flags, *words], **quiet, env=environment, start_new_session=True)


def end(machine: subprocess.Popen[bytes]) -> None:
    """Wait for a machine that was told to end. On a busy host Ray may need more than its own patience, and none is to
    be left behind: what still runs goes with its session."""
    try:
        machine.wait(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        for pid in members(machine.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        machine.wait()


def members(session: int) -> list[int]:
    """The processes of a session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(entry.name)) == session:
                found.append(int(entry.name))
    return found


def find_processes(variable: str) -> list[int]:
    """The processes with this variable in their environment, such as NAME=value."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if variable.encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


def until(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    deadline = time.monotonic() + patience
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.2)
    return found


def machines(address: str) -> int:
    """How many a cluster has; 0 while it does not answer."""
    try:
        with urllib.request.urlopen(f"{address}/nodes?view=summary", timeout=5) as answer:
            nodes = json.load(answer)["data"]["summary"]
    except OSError:
        return 0
    return sum(node["raylet"].get("state") == "ALIVE" for node in nodes)


@pytest.fixture(scope="module")
def ports() -> list[int]:
    """Where the machines listen. The first two: where they join, and the dashboard."""
    return free_ports(6)


@pytest.fixture(scope="module")
def engine(ports: list[int]) -> Iterator[RayBackend]:
    gcs, dashboard, agent, client, second, _ = ports
    folder = Path("/tmp") / f"phalanx-ray-{os.getpid()}"  # short: it holds sockets
    address = f"http://127.0.0.1:{dashboard}"
    head = (f"--port={gcs}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}")
    nodes = [start("first", "--head", *head, f"--ray-client-server-port={client}", f"--temp-dir={folder}")]
    try:
        until(lambda: machines(address) == 1, "Ray's dashboard did not come up")
        nodes.append(start("second", f"--address=127.0.0.1:{gcs}", f"--dashboard-agent-listen-port={second}"))
        until(lambda: machines(address) == 2, "the second machine did not join")
        yield RayBackend(address)
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            end(node)
        shutil.rmtree(folder, ignore_errors=True)


def job(folder: Path, script: str, *words: str, **fields: Any) -> Job:
    """A job whose command is a few lines of Python."""
    options = {"python": sys.executable} | fields.pop("backend_options", {})
    command = (sys.executable, "-u", "-c", script, *words)
    return Job(
        **{"name": "try", "command": command, "working_dir": folder, "backend_options": options, "warning_s": 10.0}
        | fields
    )


def submit(engine: RayBackend, *words: Any, **fields: Any) -> str:
    return engine.submit(engine.render(job(*words, **fields)))


def ended(engine: RayBackend, name: str) -> JobStatus:
    def over() -> JobStatus | None:
        status = engine.poll(name)
        return status if status.state.is_final else None

    status = until(over, "the job did not end")
    assert isinstance(status, JobStatus)
    return status


MEET = """
import os, socket, stat
node, (host, port) = int(os.environ["PHALANX_NODE_RANK"]), os.environ["PHALANX_LEADER_ADDR"].split(":")
file = os.environ["PHALANX_TOKEN_FILE"]
assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
token = open(file).read()
if node == 0:
    with socket.create_server(("", int(port))) as server:
        server.settimeout(30)
        told, machine = server.accept()[0].makefile().readline().split()
        print("met", told == token, machine != os.environ["MACHINE"], os.environ["PHALANX_NUM_NODES"])
else:
    for _ in range(300):
        try:
            peer = socket.create_connection((host, int(port)), 30)
            break
        except ConnectionRefusedError:
            __import__("time").sleep(0.1)
    peer.sendall(f"{token} {os.environ['MACHINE']}".encode())
"""


UNFIT = """
import os, pathlib, sys
machine = pathlib.Path("machine")
first = not machine.exists()
if not first and machine.read_text() != os.environ["MACHINE"]:
    print("another")
machine.write_text(os.environ["MACHINE"])
sys.exit(77 if first else 0)
"""


SAVE = """
import signal, sys, time
def save(*_):
    time.sleep(4)
    print("saved")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("ready")
while True:
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def names(engine: RayBackend, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Jobs that run at the same time, and their ids: starting one takes Ray some seconds."""
    wanted: dict[str, tuple[str, dict[str, Any]]] = {
        "meet": (MEET, {"num_nodes": 2}),
        "unfit": (UNFIT, {}),
        "both-unfit": ("raise SystemExit(77)", {"num_nodes": 2}),
        "late": (SAVE, {"time_limit_s": 20.0}),
    }
    found = {}
    for name, (script, fields) in wanted.items():
        found[name] = submit(engine, tmp_path_factory.mktemp(name), script, name=name, **fields)
    return found


def test_two_nodes_on_two_machines_meet(engine: RayBackend, names: dict[str, str]) -> None:
    status, lines = ended(engine, names["meet"]), list(engine.read_logs(names["meet"]))
    assert status.state is JobState.DONE, lines
    assert "[node 0] met True True 2" in lines


def test_who_finds_its_machine_unfit_is_started_on_another(engine: RayBackend, names: dict[str, str]) -> None:
    status, lines = ended(engine, names["unfit"]), list(engine.read_logs(names["unfit"]))
    assert (status.state, status.num_attempts) == (JobState.DONE, 2), lines
    assert "another" in lines


def test_where_there_is_no_other_machine_it_ends(engine: RayBackend, names: dict[str, str]) -> None:
    status = ended(engine, names["both-unfit"])
    assert (status.state, status.exit_code, status.num_attempts) == (JobState.INTERRUPTED, 77, 1), status.reason
    assert "no place for the job" in str(status.reason)


def test_a_job_saves_before_its_time_is_over(engine: RayBackend, names: dict[str, str]) -> None:
    status, lines = ended(engine, names["late"]), list(engine.read_logs(names["late"]))
    assert (status.state, status.exit_code) == (JobState.INTERRUPTED, 75), lines
    assert "saved" in lines
    assert "time limit" in str(status.reason)


def test_a_cancelled_job_may_save_for_longer_than_ray_waits_of_itself(engine: RayBackend, tmp_path: Path) -> None:
    name = submit(engine, tmp_path, SAVE, name="cancelled")
    until(lambda: "ready" in engine.read_logs(name), "it did not start")
    assert engine.poll(name).state is JobState.RUNNING
    engine.cancel(name)
    assert ended(engine, name).state is JobState.CANCELLED
    assert "saved" in engine.read_logs(name)
    with pytest.raises(UsageError, match="does not run"):
        engine.send_signal(name, signal.SIGUSR1)


def test_machines_are_listed_and_a_drain_is_refused(engine: RayBackend) -> None:
    nodes = engine.list_nodes()
    assert [(node.state, node.service) for node in nodes] == [("alive", NodeService.OPEN)] * 2
    with pytest.raises(UsageError, match="a drain in Ray cannot be undone"):
        engine.drain_node(nodes[0].name, "hot", "ada")


def test_a_job_that_may_run_on_fewer_nodes_trains_on_when_a_machine_is_lost(
    engine: RayBackend, ports: list[int], lab: TrainHarness
) -> None:
    run, changes = lab.new_run(), {"determinism": "elastic", "steps": 60}
    write_faults(run, [plan_fault(1, "slow", attempt=0, delay=0.3)])
    third = start("third", f"--address=127.0.0.1:{ports[0]}", f"--dashboard-agent-listen-port={ports[5]}")
    try:
        until(lambda: machines(f"http://127.0.0.1:{ports[1]}") == 3, "the third machine did not join")
        words = ("train", lab.recipe_file(changes), "--run", run.path, "--nproc-per-node", "1")
        command = (sys.executable, "-m", "phalanx", *map(str, words))
        fields = {"command": command, "num_nodes": 3, "min_nodes": 2, "environment": lab.variables()}
        ident = submit(engine, lab.folder, "", **fields)
        until(lambda: count_steps(run) >= 3, "the run did not start")
        for pid in find_processes("MACHINE=third"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        status = ended(engine, ident)
    finally:
        third.kill()
        end(third)
    found = HarnessRun(run, 0, None)
    assert (status.state, status.num_attempts) == (JobState.DONE, 1), list(engine.read_logs(ident))
    assert [event.world_size for event in found.events_of_kind(AttemptStarted)] == [3, 2]
    assert found.digest == lab.train_reference(changes, 3).digest


class TestContract(BackendContract):
    """What every engine must do."""

    options: ClassVar[dict[str, str]] = {"python": sys.executable}
    timeout_s = PATIENCE
