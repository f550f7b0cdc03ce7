"""This machine as a node: drained, the local queue starts no job."""

import os
from pathlib import Path

import pytest

from node_contract import NodeContract
from phalanx.cluster import Machine, discover_machine
from phalanx.jobs.backends.local import LocalBackend
from phalanx.jobs.local_queue.daemon import QueueDaemon
from phalanx.jobs.local_queue.database import Resources
from phalanx.jobs.pause_file import DRAIN_FILE
from phalanx.jobs.spec import Job

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
