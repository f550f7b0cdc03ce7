"""The guard with real sources and backends: a CDU by Modbus, a backend of nodes, runs, management controllers."""

import contextlib
import json
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fake_nodes import FakeNodeBackend
from phalanx.app import thermal_guard
from phalanx.app.thermal_guard import FleetActions, KnownJobs, find_backend_nodes, guard_cooling, open_switches
from phalanx.errors import UsageError
from phalanx.fleet.node_states import NodeState, NodeStates
from phalanx.fleet.nodes_file import load_nodes_file
from phalanx.fleet.telemetry.redfish_values import RedfishLayoutError
from phalanx.fleet.thermal.redfish_power import RedfishPowerSwitch
from phalanx.fleet.thermal.response import ResponseEvent
from phalanx.jobs.spec import JobState, JobStatus
from phalanx.run import EventLog, Run
from phalanx.run.event_types import CheckpointSaved
from settable_clock import SettableClock
from train_harness import wait_until

pytest.importorskip("pymodbus", reason="pymodbus is not installed: pip install 'phalanx[fleet]'")
from modbus_server import ModbusDevice, run_modbus

FLOW, LEAK = 10, 11
COUNT = {"table": "holding", "type": "uint16", "scale": 1}


class SignalBackend(FakeNodeBackend):
    def __init__(self) -> None:
        super().__init__()
        self.signals: list[tuple[str, int]] = []

    def send_signal(self, job_id: str, number: int) -> None:
        self.signals.append((job_id, number))


class FakeController:
    """A management controller of one system; `off` once its power is off."""

    def __init__(self, systems: int = 1) -> None:
        self.posts: list[tuple[str, Mapping[str, object]]] = []
        members = [{"@odata.id": f"/redfish/v1/Systems/{number}"} for number in range(systems)]
        action = {"target": "/redfish/v1/reset", "ResetType@Redfish.AllowableValues": ["On", "ForceOff"]}
        self.resources: dict[str, dict[str, Any]] = {
            "/redfish/v1/": {"Systems": {"@odata.id": "/redfish/v1/Systems"}},
            "/redfish/v1/Systems": {"Members": members},
            "/redfish/v1/Systems/0": {"Actions": {"#ComputerSystem.Reset": action}},
        }

    def get(self, path: str) -> dict[str, Any]:
        return self.resources[path]

    def post(self, path: str, body: Mapping[str, object]) -> None:
        self.posts.append((path, body))

    def close(self) -> None:
        pass


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
    modbus = {"url": device.url, "device_id": 1, "interval_s": 0.02, "points": points}
    content = {
        "nodes": [{"name": "n1", "rack": "r1"}, {"name": "n2", "rack": "r1"}, {"name": "n3"}],
        "cdus": [{"id": "c1", "racks": ["r1"], "modbus": modbus}],
    }
    path = tmp_path / "nodes.yml"
    path.write_text(json.dumps(content))
    return path


def add_job(backend: SignalBackend, folder: Path, save_s: float) -> Run:
    run = Run(folder / "run")
    run.create()
    with contextlib.closing(EventLog(run.events)) as log:
        log.write(CheckpointSaved(step=1, path="x", size_bytes=1, duration_s=save_s, stall_s=0.0))
    backend.jobs = [JobStatus("7", "gpt", JobState.RUNNING, nodes=("n1", "n3"), run_dir=str(run.path))]
    return run


def run_guard(nodes: Path, backend: SignalBackend, may_act: bool, device: ModbusDevice, words: list[int]) -> list[Any]:
    clock, reports = SettableClock(), []

    def sleep(seconds: float) -> None:
        clock.now += seconds
        time.sleep(0.01)  # the source polls in a thread
        if clock.now >= 10.0:
            device.put(FLOW, words)

    with NodeStates(nodes.parent / "nodes.db") as states:
        for report in guard_cooling(nodes, lambda: backend, states, may_act, 25.0, sleep, clock):
            reports.append(report)
        assert backend.nodes["n3"].service == "open"
        if may_act:
            assert states.find("n1") is not None
    return reports


def list_events(reports: list[Any]) -> list[tuple[str, str]]:
    return [(str(event.action), event.target) for report in reports for event in report.events]


def test_lost_flow_at_a_cdu_drains_saves_and_powers_off_the_nodes_of_its_racks(
    nodes: Path, device: ModbusDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, controllers = SignalBackend(), {name: FakeController() for name in ("n1", "n2")}
    add_job(backend, tmp_path, 2.0)
    switches = {name: RedfishPowerSwitch(each) for name, each in controllers.items()}
    monkeypatch.setattr(thermal_guard, "open_switches", lambda file: (switches, []))
    reports = run_guard(nodes, backend, True, device, [0, 0])
    assert list_events(reports) == [
        ("report", "CDU c1"),
        ("stop scheduling", "n1"),
        ("stop scheduling", "n2"),
        ("save checkpoint", "7"),
        ("power off", "n2"),  # no job runs there
        ("power off", "n1"),
    ]
    assert [event.problem for report in reports for event in report.events] == [""] * 6
    assert backend.signals == [("7", signal.SIGUSR1)]
    assert [each.posts for each in controllers.values()] == [[("/redfish/v1/reset", {"ResetType": "ForceOff"})]] * 2
    assert backend.nodes["n1"].service == "drained"
    lines = (nodes.parent / "state/thermal/audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["action"] for line in lines] == [str(action) for action, _ in list_events(reports)]


def test_an_audit_log_that_cannot_be_written_ends_no_response(nodes: Path, device: ModbusDevice) -> None:
    (nodes.parent / "state/thermal/audit.jsonl").mkdir(parents=True)
    reports = run_guard(nodes, SignalBackend(), True, device, [0, 0])
    assert ("power off", "n1") in list_events(reports)
    problems = [text for report in reports for text in report.problems if "audit log" in text]
    assert problems[0].endswith("state/thermal/audit.jsonl cannot be written: Is a directory")


def test_without_permission_nothing_is_done(nodes: Path, device: ModbusDevice, tmp_path: Path) -> None:
    backend = SignalBackend()
    add_job(backend, tmp_path, 2.0)
    reports = run_guard(nodes, backend, False, device, [0, 0])
    assert ("power off", "n1") in list_events(reports)
    assert {event.is_done for report in reports for event in report.events if event.action != "report"} == {False}
    assert (backend.signals, backend.nodes["n1"].service) == ([], "open")


def test_a_node_that_may_not_be_powered_off_is_said(nodes: Path, device: ModbusDevice) -> None:
    reports = run_guard(nodes, SignalBackend(), True, device, [0, 0])
    off = [event for report in reports for event in report.events if event.action == "power off"]
    assert {event.problem for event in off} == {
        "it is not powered off: that takes allow_power_off in the nodes file, and redfish or --on slurm"
    }


def test_a_checkpoint_after_the_request_is_a_save_and_one_before_is_none(nodes: Path, tmp_path: Path) -> None:
    backend, now = SignalBackend(), SettableClock()
    run = add_job(backend, tmp_path, 2.0)
    jobs = KnownJobs(lambda: backend)
    jobs.renew()
    assert [(job.id, job.save_s) for job in jobs.by_node["n1"]] == [("7", 2.0)]
    now.now = time.time() + 1.0
    with NodeStates(tmp_path / "nodes.db") as states:
        actions = FleetActions(jobs, states, {}, now=now)
        assert actions.request_save(["7"]) == {}
        assert not actions.is_saved("7")
        with contextlib.closing(EventLog(run.events)) as log:
            log.write(CheckpointSaved(time=now.now + 1.0, step=2, path="y", size_bytes=1, duration_s=2.0, stall_s=0.0))
        assert actions.is_saved("7")
        actions.close()


def test_an_action_that_hangs_is_not_waited_for(nodes: Path, tmp_path: Path) -> None:
    is_over = threading.Event()

    class HangingBackend(SignalBackend):
        def drain_node(self, node: str, reason: str, actor: str) -> None:
            if node == "n1":
                is_over.wait(60.0)
            super().drain_node(node, reason, actor)

    with NodeStates(tmp_path / "nodes.db") as states:
        actions = FleetActions(KnownJobs(HangingBackend), states, {}, timeout_s=1.0)
        assert actions.stop_scheduling(["n1", "n2"], "leak") == {"n1": "no answer within 1 s"}
        is_over.set()
        found = states.find("n2")
        assert found is not None
        assert found.state is NodeState.DRAINED
        actions.close()


def test_a_controller_with_several_systems_powers_none_off() -> None:
    with pytest.raises(RedfishLayoutError, match="has 2 systems"):
        RedfishPowerSwitch(FakeController(2))


def test_a_fleet_without_racks_and_margins_has_nothing_to_guard(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yml"
    path.write_text("nodes: [{name: n1}]\n")
    with NodeStates(tmp_path / "nodes.db") as states, pytest.raises(UsageError, match="nothing to guard"):
        next(guard_cooling(path, None, states, False))


def test_nodes_that_may_not_be_powered_off_are_named_at_the_start(nodes: Path) -> None:
    assert open_switches(load_nodes_file(nodes)) == (
        {},
        ["n1 and 1 more nodes may not be powered off (allow_power_off)"],
    )


class OffBackend(SignalBackend):
    """A backend with power saving. `refused`: why nodes are not powered off; `late`: why the end of it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.refused: dict[str, str] = {}
        self.late: dict[str, str] = {}
        self.off: list[tuple[str, tuple[str, ...], str]] = []

    def check_power_off(self, nodes: Sequence[str]) -> Sequence[str]:
        return self.found

    def power_off_nodes(self, nodes: Sequence[str], reason: str) -> Mapping[str, str]:
        self.off.append(("begun", tuple(nodes), reason))
        return self.refused

    def finish_power_off(self, nodes: Sequence[str], reason: str) -> Mapping[str, str]:
        self.off.append(("finished", tuple(nodes), reason))
        return self.late


def allow_power_off(nodes: Path) -> None:
    content = json.loads(nodes.read_text())
    for node in content["nodes"][:2]:
        node["allow_power_off"] = True
    nodes.write_text(json.dumps(content))


def test_nodes_without_a_controller_are_powered_off_through_the_backend(nodes: Path, device: ModbusDevice) -> None:
    allow_power_off(nodes)
    backend = OffBackend()
    backend.late = {"n2": "Slurm has not begun to power it off within 90 s"}
    reports = run_guard(nodes, backend, True, device, [0, 0])
    off = [event for report in reports for event in report.events if event.action == "power off"]
    assert [(event.target, event.problem) for event in off] == [("n1", ""), ("n2", "")]
    reason = "CDU c1 has 0.0 l/min, 0% of its usual flow"
    assert backend.off == [("begun", ("n1", "n2"), reason), ("finished", ("n1", "n2"), reason)]
    problems = [problem for report in reports for problem in report.problems]
    assert "n2: Slurm has not begun to power it off within 90 s" in problems


def test_a_node_that_the_backend_refuses_to_power_off_has_failed(nodes: Path, tmp_path: Path) -> None:
    backend = OffBackend()
    backend.refused = {"n2": "Slurm refuses it to your user"}
    with NodeStates(tmp_path / "nodes.db") as states:
        actions = FleetActions(KnownJobs(lambda: backend), states, {}, backend_nodes=["n1", "n2"])
        actions.stop_scheduling(["n1", "n2"], "leak")
        assert actions.power_off(["n1", "n2"]) == {"n2": "Slurm refuses it to your user"}
        wait_until(lambda: ("finished", ("n1",), "leak") in backend.off, 10.0, "the end of it for n1")
        actions.close()


def test_a_power_off_that_is_under_way_when_the_guard_ends_is_finished(tmp_path: Path) -> None:
    """Else the next job powers the node up again."""
    backend, may_answer = OffBackend(), threading.Event()

    class SlowBackend(OffBackend):
        def power_off_nodes(self, nodes: Sequence[str], reason: str) -> Mapping[str, str]:
            may_answer.wait(10.0)
            return backend.power_off_nodes(nodes, reason)

        def finish_power_off(self, nodes: Sequence[str], reason: str) -> Mapping[str, str]:
            return backend.finish_power_off(nodes, reason)

    with NodeStates(tmp_path / "nodes.db") as states:
        actions = FleetActions(KnownJobs(SlowBackend), states, {}, backend_nodes=["n1"], timeout_s=0.1)
        assert actions.power_off(["n1"]) == {"n1": "no answer within 0.1 s"}
        actions.close()
    may_answer.set()
    wait_until(lambda: backend.off[-1:] == [("finished", ("n1",), "cooling is lost")], 10.0, "the end of it")


def test_a_controller_comes_before_the_backend(nodes: Path, tmp_path: Path) -> None:
    backend, controller = OffBackend(), FakeController()
    with NodeStates(tmp_path / "nodes.db") as states:
        jobs, switches = KnownJobs(lambda: backend), {"n1": RedfishPowerSwitch(controller)}
        allow_power_off(nodes)
        found, problems = find_backend_nodes(load_nodes_file(nodes), switches, jobs)
        assert (found, problems) == (["n2"], [])
        actions = FleetActions(jobs, states, switches, backend_nodes=found)
        assert actions.power_off(["n1", "n2"]) == {}
        actions.close()
    assert len(controller.posts) == 1
    assert backend.off[0][1] == ("n2",)


def test_where_a_controller_fails_in_the_emergency_the_backend_powers_the_node_off(tmp_path: Path) -> None:
    backend = OffBackend()
    backend.refused = {"n2": "Slurm refuses it to your user"}

    class FailingSwitch(RedfishPowerSwitch):
        def power_off(self) -> None:
            raise UsageError("HTTP 503")

    with NodeStates(tmp_path / "nodes.db") as states:
        switches = {name: FailingSwitch(FakeController()) for name in ("n1", "n2")}
        actions = FleetActions(KnownJobs(lambda: backend), states, switches)
        problems = actions.power_off(["n1", "n2"])
        actions.close()
    assert problems == {"n2": f"HTTP 503; {backend.name}: Slurm refuses it to your user"}
    assert backend.off[0][1] == ("n1", "n2")
    assert f"n1: powered off through {backend.name}: its controller failed: HTTP 503" in actions.problems


def test_what_keeps_a_backend_from_powering_off_is_said_at_the_start(nodes: Path) -> None:
    allow_power_off(nodes)
    file = load_nodes_file(nodes)
    backend = OffBackend()
    backend.found = ["SuspendProgram of slurm.conf is not set, so Slurm powers no node off"]
    assert find_backend_nodes(file, (), KnownJobs(lambda: backend)) == (
        ["n1", "n2"],  # it is tried nevertheless
        ["power off through slurm: SuspendProgram of slurm.conf is not set, so Slurm powers no node off"],
    )
    cannot = "n1 and 1 more nodes cannot be powered off: no redfish that answers, and"
    assert find_backend_nodes(file, (), None) == ([], [f"{cannot} no backend is named (--on)"])
    without = KnownJobs(SignalBackend)
    without.backend.name = "ray"
    assert find_backend_nodes(file, (), without) == ([], [f"{cannot} the backend ray cannot power off a node"])
    assert find_backend_nodes(file, ("n1", "n2"), None) == ([], [])


def test_an_event_says_what_would_be_done_and_what_failed() -> None:
    from phalanx.cli.thermal_output import format_response
    from phalanx.fleet.thermal.flow_loss import CoolingAction

    text = format_response(ResponseEvent(0.0, CoolingAction.POWER_OFF, "n1", "its time is over", is_done=False))
    assert text.endswith("  would power off: n1: its time is over")
    assert format_response(ResponseEvent(0.0, CoolingAction.POWER_OFF, "n1", "x", "refused")).endswith(
        ": FAILED: refused"
    )


@pytest.mark.parametrize(
    ("fault", "words", "code"), [("no-flow", "(60|67|8[0-9]) °C at most", 0), ("leak", "60 °C", 0)]
)
def test_a_rehearsal_prints_what_is_done_in_time(tmp_path: Path, fault: str, words: str, code: int) -> None:
    from phalanx.cli.thermal import app

    path = tmp_path / "nodes.yml"
    path.write_text("nodes: [{name: n1, rack: r1}, {name: n2, rack: r1}, {name: n3, rack: r2}]\n")
    result = CliRunner().invoke(app, ["rehearse", str(path), "--fault", fault, "--save", "3"], standalone_mode=False)
    assert result.return_value == code
    assert re.search(words, result.output)
    order = re.findall(r"^ *[0-9.]+ s  (\w+(?: \w+)?)  ", result.output, re.MULTILINE)
    isolation = ["request isolation"] if fault == "leak" else []
    saves = ["stop scheduling", "stop scheduling", *isolation, "save checkpoint"]
    assert order == ["report", *saves, "power off", "power off"]


def test_a_device_that_gets_too_hot_in_a_rehearsal_is_said(tmp_path: Path) -> None:
    from phalanx.cli.thermal import app

    path = tmp_path / "nodes.yml"
    path.write_text("nodes: [{name: n1, rack: r1}]\ncooling_response: {heat_j_per_k: 50}\n")
    assert CliRunner().invoke(app, ["rehearse", str(path)], standalone_mode=False).return_value == 77


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
        actions = FleetActions(jobs, states, {})
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
