"""The local queue as an engine, without its daemon."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from node_contract import NodeContract
from phalanx.cluster import Machine, discover_machine
from phalanx.errors import UsageError
from phalanx.jobs.backends.local import LocalBackend
from phalanx.jobs.local_queue.daemon import QueueDaemon
from phalanx.jobs.local_queue.database import JobDatabase, Resources
from phalanx.jobs.pause_file import DRAIN_FILE
from phalanx.jobs.spec import Job, JobState

ASKED: dict[str, Callable[[LocalBackend], object]] = {
    "poll": lambda engine: engine.poll("1"),
    "list_jobs": lambda engine: engine.list_jobs(),
    "an array": lambda engine: engine.list_jobs("sweep"),
    "read_logs": lambda engine: list(engine.read_logs("1")),
    "follow_logs": lambda engine: engine.follow_logs("1")(True),
    "list_ended_before": lambda engine: engine.list_ended_before(0.0),
}


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Each file below a folder, with the time of its last change."""
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("ask", ASKED)
def test_to_ask_changes_no_byte_of_a_queue_without_daemon(tmp_path: Path, ask: str) -> None:
    queue = tmp_path / "queue"
    before = LocalBackend(queue, ensure_daemon=lambda *_: None)
    for name in ("waits", "runs", "ended"):
        before.submit(before.render(Job(name, ("true",), tmp_path)))
    before.database.update_if(2, JobState.QUEUED, state=JobState.RUNNING, attempts=1, runner=2**22 + 1)
    before.cancel("3")
    before.database.close()
    stood = content(queue)
    assert str(queue / "queue.db") in stood

    def start(folder: Path, may_be_idle: bool) -> bool:
        raise AssertionError("a daemon was started")

    engine = LocalBackend(queue, ensure_daemon=start)
    ASKED[ask](engine)
    engine.database.close()
    assert content(queue) == stood


def test_a_job_whose_queue_cannot_be_served_is_not_left_in_it(tmp_path: Path) -> None:
    def refuse(folder: Path, may_be_idle: bool) -> bool:
        raise UsageError("the file system has no locks")

    backend = LocalBackend(tmp_path / "queue", ensure_daemon=refuse)
    with pytest.raises(UsageError, match="no locks"):
        backend.submit(backend.render(Job("a", ("true",), tmp_path)))
    assert backend.database.list_jobs() == []


def test_to_ask_makes_no_queue_where_there_is_none(tmp_path: Path) -> None:
    engine = LocalBackend(tmp_path / "state" / "queue", ensure_daemon=lambda *_: None)
    assert engine.list_jobs() == engine.list_jobs("sweep") == engine.list_ended_before(0.0) == []
    for call in (
        engine.poll,
        engine.cancel,
        engine.follow_logs,
        engine.delete_job,
        lambda id: engine.send_signal(id, 1),
    ):
        with pytest.raises(UsageError, match="1: local has no such job"):
            call("1")
    engine.restart_dead_daemon()
    assert list(tmp_path.iterdir()) == []


def test_a_queue_is_read_while_another_process_writes(tmp_path: Path) -> None:
    engine = LocalBackend(tmp_path / "queue", ensure_daemon=lambda *_: None)
    ident = engine.submit(engine.render(Job("job", ("true",), tmp_path)))
    with engine.database._transaction():  # held while a snapshot is unpacked
        other = JobDatabase(tmp_path / "queue")
        other._db.execute("PRAGMA busy_timeout=0")
        assert [status.id for status in other.list_statuses()] == [ident]
        other.close()
    engine.database.close()


class PausedQueue:
    """A queue with a job, and its daemon, one tick at a time."""

    def __init__(self, folder: Path):
        self.started: list[int] = []
        self.engine = LocalBackend(folder / "queue", ensure_daemon=lambda *_: None)
        self.id = self.engine.submit(self.engine.render(Job("job", ("true",), folder)))
        self.daemon = QueueDaemon(self.engine.database, Resources(0, 64), self.spawn)

    def spawn(self, job_dir: Path, attempt: int) -> int:
        self.started.append(attempt)
        return os.getpid()


@pytest.fixture
def paused_queue(tmp_path: Path) -> Iterator[PausedQueue]:
    queue = PausedQueue(tmp_path)
    yield queue
    queue.engine.database.close()


def test_a_paused_job_waits_until_it_is_resumed(paused_queue: PausedQueue) -> None:
    engine, daemon, id = paused_queue.engine, paused_queue.daemon, paused_queue.id
    engine.pause(id, "for power")
    assert daemon.tick()
    assert (paused_queue.started, engine.poll(id).reason) == ([], "paused: for power")
    assert engine.resume(id)
    daemon.tick()
    assert (paused_queue.started, engine.poll(id).state) == ([1], JobState.RUNNING)
    assert not engine.resume(id)


def test_a_running_job_that_is_paused_gets_a_signal_and_waits_afterwards(
    paused_queue: PausedQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, daemon, id = paused_queue.engine, paused_queue.daemon, paused_queue.id
    daemon.tick()
    signals: list[str] = []
    monkeypatch.setattr(psutil.Process, "terminate", lambda self: signals.append("TERM"))
    engine.pause(id, "for power")
    assert signals == ["TERM"]
    monkeypatch.undo()
    engine.database.update_if(int(id), JobState.RUNNING, state=JobState.QUEUED)  # it has ended with 75
    daemon.tick()
    assert (paused_queue.started, engine.poll(id).state) == ([1], JobState.QUEUED)


def test_a_job_that_has_ended_is_not_paused(paused_queue: PausedQueue) -> None:
    paused_queue.engine.cancel(paused_queue.id)
    with pytest.raises(UsageError, match="nothing to pause"):
        paused_queue.engine.pause(paused_queue.id, "for power")


NODE = os.uname().nodename
UNUSED_PID = 2**22 + 1
"""No process has this number."""


@pytest.fixture(scope="module")
def machine() -> Machine:
    return discover_machine()


@pytest.fixture
def engine(tmp_path: Path, machine: Machine) -> LocalBackend:
    return LocalBackend(tmp_path / "queue", lambda: machine, ensure_daemon=lambda *_: None)


class TestContract(NodeContract):
    @pytest.fixture
    def node(self) -> str:
        return NODE


def test_a_drained_machine_starts_no_job_until_it_is_undrained(
    engine: LocalBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = QueueDaemon(engine.database, Resources(0, 8), lambda home, attempt: UNUSED_PID)
    engine.drain_node(NODE, "loud fan", "ada")
    ident = engine.submit(engine.render(Job("job", ("true",), tmp_path)))
    engine.submit(engine.render(Job("later", ("true",), tmp_path)))
    reason = f"this machine is drained: loud fan (ada); `phalanx nodes undrain {NODE}` starts jobs again"
    assert caplog.messages == [f"queued jobs wait: {reason}"]  # said once
    assert daemon.tick()  # jobs wait, so that the daemon stays
    waiting = engine.poll(ident)
    assert (waiting.state, waiting.num_attempts) == ("queued", 0)
    assert waiting.reason == reason
    assert [each.reason for each in engine.list_jobs()] == [reason, reason]
    engine.undrain_node(NODE)
    daemon.tick()
    assert engine.poll(ident).num_attempts == 1


def test_jobs_that_run_are_the_nodes_and_their_state_is_kept_while_it_drains(
    engine: LocalBackend, tmp_path: Path
) -> None:
    daemon = QueueDaemon(engine.database, Resources(0, 8), lambda home, attempt: os.getpid())
    ident = engine.submit(engine.render(Job("job", ("true",), tmp_path)))
    daemon.tick()
    engine.drain_node(NODE, "loud fan", "ada")
    (node,) = engine.list_nodes()
    assert (node.state, node.jobs) == ("busy", (ident,))
    assert engine.poll(ident).state == "running"


def test_undraining_starts_a_daemon_for_the_jobs_that_waited(tmp_path: Path, machine: Machine) -> None:
    started: list[Path] = []
    engine = LocalBackend(
        tmp_path / "queue", lambda: machine, ensure_daemon=lambda folder, idle: started.append(folder)
    )
    engine.drain_node(NODE, "loud fan", "ada")
    engine.submit(engine.render(Job("job", ("true",), tmp_path)))
    started.clear()
    engine.undrain_node(NODE)
    assert started == [engine.folder]


def test_a_damaged_file_keeps_the_machine_drained(engine: LocalBackend) -> None:
    engine.drain_node(NODE, "loud fan", "ada")
    (engine.folder / DRAIN_FILE).write_text("{")
    (node,) = engine.list_nodes()
    assert (node.service, node.reason) == ("drained", f"{DRAIN_FILE} is damaged")
