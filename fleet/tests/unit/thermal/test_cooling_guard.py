"""The guard with real sources and backends: a CDU by Modbus, a backend of nodes, runs, management controllers."""

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_nodes import FakeNodeBackend
from phalanx.errors import UsageError
from phalanx.jobs.spec import JobState, JobStatus
from phalanx_fleet import nodes_file
from phalanx_fleet.node_states import NodeState, NodeStates
from phalanx_fleet.telemetry.modbus import ModbusEntry, ModbusSource, PymodbusClient
from phalanx_fleet.thermal.guard import FleetActions, KnownJobs, ResponseEvent, guard_cooling
from settable_clock import SettableClock

pytest.importorskip("pymodbus", reason="pymodbus is not installed: pip install 'phalanx[fleet]'")
from manual_polling import ManualPolling
from modbus_server import ModbusDevice, run_modbus

FLOW, LEAK = 10, 11
COUNT = {"table": "holding", "type": "uint16", "scale": 1}


class SignalBackend(FakeNodeBackend):
    def __init__(self) -> None:
        super().__init__()
        self.signals: list[tuple[str, int]] = []

    def send_signal(self, job_id: str, number: int) -> None:
        self.signals.append((job_id, number))


@pytest.fixture(scope="module")
def server() -> Iterator[ModbusDevice]:
    with run_modbus(ModbusDevice()) as device:
        yield device


@pytest.fixture
def device(server: ModbusDevice) -> ModbusDevice:
    server.put(FLOW, [180, 0])
    return server


@pytest.fixture
def nodes(device: ModbusDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHALANX_STATE_DIR", str(tmp_path / "state"))
    points = {
        "flow_l_per_min": {**COUNT, "address": FLOW, "unit": "L/min"},
        "has_leak": {**COUNT, "address": LEAK, "unit": "1"},
    }
    modbus = {"url": device.url, "device_id": 1, "interval_s": 1.0, "points": points}
    content = {
        "nodes": [{"name": "n1", "rack": "r1"}, {"name": "n2", "rack": "r1"}, {"name": "n3"}],
        "cdus": [{"id": "c1", "racks": ["r1"], "modbus": modbus}],
    }
    path = tmp_path / "nodes.yml"
    path.write_text(json.dumps(content))
    return path


def add_job(backend: SignalBackend) -> None:
    backend.jobs = [JobStatus("7", "gpt", JobState.RUNNING, nodes=("n1", "n3"))]


def run_guard(nodes: Path, backend: SignalBackend, may_act: bool, device: ModbusDevice, words: list[int]) -> list[Any]:
    clock, polling, reports = SettableClock(), ManualPolling(), []

    def open_cdu(id: str, entry: ModbusEntry) -> ModbusSource:
        return ModbusSource(id, entry, PymodbusClient(entry), clock, polling.start)

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now >= 10.0:
            device.put(FLOW, words)
        polling.poll()

    with NodeStates(nodes.parent / "nodes.db") as states, pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes_file, "open_modbus", open_cdu)
        for report in guard_cooling(nodes, lambda: backend, states, may_act, 25.0, sleep, clock):
            reports.append(report)
        assert backend.nodes["n3"].service == "open"
        if may_act:
            assert states.find("n1") is not None
    return reports


def list_events(reports: list[Any]) -> list[tuple[str, str]]:
    return [(str(event.action), event.target) for report in reports for event in report.events]


def test_lost_flow_at_a_cdu_drains_the_nodes_of_its_racks_and_saves(nodes: Path, device: ModbusDevice) -> None:
    backend = SignalBackend()
    add_job(backend)
    reports = run_guard(nodes, backend, True, device, [0, 0])
    assert list_events(reports) == [
        ("report", "CDU c1"),
        ("drain", "n1"),
        ("drain", "n2"),
        ("save checkpoint", "7"),
    ]
    assert [event.problem for report in reports for event in report.events] == [""] * 4
    assert backend.signals == [("7", signal.SIGUSR1)]
    assert backend.nodes["n1"].service == "drained"
    lines = (nodes.parent / "state/thermal/audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["action"] for line in lines] == [str(action) for action, _ in list_events(reports)]


def test_an_audit_log_that_cannot_be_written_ends_no_response(nodes: Path, device: ModbusDevice) -> None:
    (nodes.parent / "state/thermal/audit.jsonl").mkdir(parents=True)
    reports = run_guard(nodes, SignalBackend(), True, device, [0, 0])
    assert ("drain", "n1") in list_events(reports)
    problems = [text for report in reports for text in report.problems if "audit log" in text]
    assert problems[0].endswith("state/thermal/audit.jsonl cannot be written: Is a directory")


def test_without_permission_nothing_is_done(nodes: Path, device: ModbusDevice) -> None:
    backend = SignalBackend()
    add_job(backend)
    reports = run_guard(nodes, backend, False, device, [0, 0])
    assert ("drain", "n1") in list_events(reports)
    assert {event.is_done for report in reports for event in report.events if event.action != "report"} == {False}
    assert (backend.signals, backend.nodes["n1"].service) == ([], "open")


def test_an_action_that_hangs_is_not_waited_for(nodes: Path, tmp_path: Path) -> None:
    is_over = threading.Event()

    class HangingBackend(SignalBackend):
        def drain_node(self, node: str, reason: str, actor: str) -> None:
            if node == "n1":
                is_over.wait(60.0)
            super().drain_node(node, reason, actor)

    with NodeStates(tmp_path / "nodes.db") as states:
        actions = FleetActions(KnownJobs(HangingBackend), states, timeout_s=1.0)
        assert actions.drain(["n1", "n2"], "leak") == {"n1": "no answer within 1 s"}
        is_over.set()
        found = states.find("n2")
        assert found is not None
        assert found.state is NodeState.DRAINED
        actions.close()


def test_a_fleet_without_racks_and_margins_has_nothing_to_guard(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yml"
    path.write_text("nodes: [{name: n1}]\n")
    with NodeStates(tmp_path / "nodes.db") as states, pytest.raises(UsageError, match="nothing to guard"):
        next(guard_cooling(path, None, states, False))


def test_an_event_says_what_would_be_done_and_what_failed() -> None:
    from phalanx_fleet.commands.thermal import format_response
    from phalanx_fleet.thermal.guard import CoolingAction

    text = format_response(ResponseEvent(0.0, CoolingAction.DRAIN, "n1", "no job starts there", is_done=False))
    assert text.endswith("  would drain: n1: no job starts there")
    assert format_response(ResponseEvent(0.0, CoolingAction.DRAIN, "n1", "x", "refused")).endswith(": FAILED: refused")


def test_each_thread_has_a_backend_of_its_own_and_what_fails_there_is_reported(tmp_path: Path) -> None:
    """The database of the local queue belongs to the thread that opened it."""

    class OneThreadBackend(SignalBackend):
        def __init__(self) -> None:
            super().__init__()
            self.thread = threading.get_ident()

        def send_signal(self, job_id: str, number: int) -> None:
            assert threading.get_ident() == self.thread
            if job_id == "bad":
                raise ValueError("an error of a library")

    jobs = KnownJobs(OneThreadBackend)
    assert jobs.backend.name == "slurm"
    with NodeStates(tmp_path / "nodes.db") as states:
        actions = FleetActions(jobs, states)
        assert actions.request_save(["7", "bad"]) == {"bad": "an error of a library"}
        actions.close()


def test_a_backend_that_fails_is_a_problem_and_is_asked_again() -> None:
    class FailingBackend(SignalBackend):
        is_down = True

        def list_jobs(self, array: str | None = None) -> Any:
            if self.is_down:
                raise OSError("connection refused")
            return super().list_jobs(array)

    jobs = KnownJobs(FailingBackend)
    jobs.renew()
    assert jobs.problem == "the jobs are not known: OSError: connection refused"
    FailingBackend.is_down = False
    jobs.renew()
    assert jobs.problem == ""
