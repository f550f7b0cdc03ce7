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
from phalanx.jobs.backends.nodes import NodeService
from phalanx.jobs.backends.ray.backend import RayBackend
from phalanx.jobs.snapshot import snapshot_folder
from phalanx.jobs.spec import Job, JobState, JobStatus

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
def engine() -> Iterator[RayBackend]:
    gcs, dashboard, agent, client, second = free_ports(5)
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
    one_ends_badly = "import os, time; os.environ['PHALANX_NODE_RANK'] == '1' and exit(93); time.sleep(600)"
    wanted: dict[str, tuple[str, dict[str, Any]]] = {
        "meet": (MEET, {"num_nodes": 2}),
        "unfit": (UNFIT, {}),
        "both-unfit": ("raise SystemExit(77)", {"num_nodes": 2}),
        "one-ends-badly": (one_ends_badly, {"num_nodes": 2}),
        "late": (SAVE, {"time_limit_s": 20.0}),
        "large": ("pass", {"num_nodes": 3, "backend_options": {"patience": "2"}}),
        "travels": ("import os; print(open('data.txt').read(), os.getcwd())", {"snapshot": True}),
    }
    found = {}
    for name, (script, fields) in wanted.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "data.txt").write_text("carried")
        if fields.pop("snapshot", False):
            fields["snapshot"] = snapshot_folder(folder)
        found[name] = submit(engine, folder, script, name=name, **fields)
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


def test_a_bad_end_takes_the_other_node_along(engine: RayBackend, names: dict[str, str]) -> None:
    status = ended(engine, names["one-ends-badly"])
    assert (status.state, status.exit_code, status.num_attempts) == (JobState.FAILED, 93, 1), status.reason


def test_a_job_saves_before_its_time_is_over(engine: RayBackend, names: dict[str, str]) -> None:
    status, lines = ended(engine, names["late"]), list(engine.read_logs(names["late"]))
    assert (status.state, status.exit_code) == (JobState.INTERRUPTED, 75), lines
    assert "saved" in lines
    assert "time limit" in str(status.reason)


def test_a_job_for_which_there_is_no_room_says_so(engine: RayBackend, names: dict[str, str]) -> None:
    status = ended(engine, names["large"])
    assert (status.state, status.num_attempts) == (JobState.INTERRUPTED, 0)
    assert "the job needs 3 nodes with 1 CPU, each on a separate machine; " in str(status.reason)
    assert "fit on 2 machines" in str(status.reason)


def test_the_folder_travels_when_it_is_asked_to(
    engine: RayBackend, names: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert ended(engine, names["travels"]).state is JobState.DONE
    (line,) = [line for line in engine.read_logs(names["travels"]) if line.startswith("carried")]
    assert str(tmp_path_factory.getbasetemp()) not in line


def test_a_cancelled_job_may_save_for_longer_than_ray_waits_of_itself(engine: RayBackend, tmp_path: Path) -> None:
    name = submit(engine, tmp_path, SAVE, name="cancelled")
    until(lambda: "ready" in engine.read_logs(name), "it did not start")
    assert engine.poll(name).state is JobState.RUNNING
    engine.cancel(name)
    assert ended(engine, name).state is JobState.CANCELLED
    assert "saved" in engine.read_logs(name)
    with pytest.raises(UsageError, match="does not run"):
        engine.send_signal(name, signal.SIGUSR1)


COUNT = """
import os, pathlib, signal, sys, time
state = pathlib.Path(f"steps-{os.environ['PHALANX_NODE_RANK']}")
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
first = int(state.read_text()) if state.exists() else 0
last = first + 10 if first else 10**9  # it ends after a resume only, however slow the machine is
for step in range(first + 1, last + 1):
    time.sleep(0.1)
    state.write_text(str(step))
    if asked:
        print("saved", step)
        sys.exit(75)
print("done after", first)
"""


def test_a_paused_job_saves_waits_without_machines_and_resumes(engine: RayBackend, tmp_path: Path) -> None:
    ident = submit(engine, tmp_path, COUNT, name="paused", num_nodes=2, backend_options={"max-restarts": "0"})
    until(lambda: engine.poll(ident).state is JobState.RUNNING, "it did not start")
    until(lambda: all((tmp_path / f"steps-{node}").exists() for node in range(2)), "a node did no step")
    assert not engine.resume(ident)
    engine.pause(ident, "for power")
    until(lambda: engine.poll(ident).state is JobState.QUEUED, "it did not stop")
    assert engine.poll(ident).reason == "paused: for power"
    saved = [(tmp_path / f"steps-{node}").read_text() for node in range(2)]
    time.sleep(3)
    assert engine.poll(ident).state is JobState.QUEUED
    assert engine.resume(ident)
    status = ended(engine, ident)
    assert (status.state, status.num_attempts) == (JobState.DONE, 2)
    lines = list(engine.read_logs(ident))
    assert all(any(f"done after {step}" in line for line in lines) for step in saved)
    with pytest.raises(UsageError, match="it has ended: there is nothing to pause"):
        engine.pause(ident, "again")
    assert not engine.resume(ident)


def test_a_paused_job_can_be_cancelled(engine: RayBackend, tmp_path: Path) -> None:
    ident = submit(engine, tmp_path, COUNT, name="paused-and-cancelled")
    until(lambda: engine.poll(ident).state is JobState.RUNNING, "it did not start")
    engine.pause(ident, "for power")
    until(lambda: engine.poll(ident).state is JobState.QUEUED, "it did not stop")
    engine.cancel(ident)
    assert ended(engine, ident).state is JobState.CANCELLED


def test_machines_are_listed_and_a_drain_is_refused(engine: RayBackend) -> None:
    nodes = engine.list_nodes()
    assert [(node.state, node.service) for node in nodes] == [("alive", NodeService.OPEN)] * 2
    with pytest.raises(UsageError, match="a drain in Ray cannot be undone"):
        engine.drain_node(nodes[0].name, "hot", "ada")


class TestContract(BackendContract):
    """What every engine must do."""

    options: ClassVar[dict[str, str]] = {"python": sys.executable}
    timeout_s = PATIENCE
