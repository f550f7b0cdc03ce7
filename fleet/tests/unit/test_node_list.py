"""The nodes of a fleet with their newest readings; drained and undrained with their history."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_nodes import FakeNodeBackend, add_minute
from phalanx.errors import UsageError
from phalanx.jobs.backends.base import BackendNode, NodeService
from phalanx.jobs.spec import JobState, JobStatus
from phalanx.run.event_types import WorkerFailure, WorkerStarted
from phalanx.run.events import EventLog
from phalanx.telemetry.sample import HostSample, NodeSample
from phalanx_fleet.node_list import FleetReader, FleetSources, drain_node, undrain_node
from phalanx_fleet.node_services import ServiceOpeners
from phalanx_fleet.node_states import NodeState, NodeStates
from phalanx_fleet.telemetry.prometheus import PrometheusSource

NOW = 1000.0
HERE = os.uname().nodename


@pytest.fixture
def states(tmp_path: Path) -> Iterator[NodeStates]:
    with NodeStates(tmp_path / "nodes.db") as states:
        yield states


@pytest.fixture
def backend() -> FakeNodeBackend:
    return FakeNodeBackend()


def make_reader(states: NodeStates, backend: FakeNodeBackend | None, *files: Path, **more: Any) -> FleetReader:
    sources = FleetSources(backend, *files)  # type: ignore[arg-type]  # it runs no jobs

    def read_here() -> NodeSample:
        raise AssertionError("this machine is no node here")

    return FleetReader(sources, states, **{"read_here": read_here, "now": lambda: NOW, **more})


def run_job(folder: Path, state: JobState = JobState.RUNNING, ended_at: float | None = None) -> JobStatus:
    return JobStatus("7", "gpt", state, run_dir=str(folder), ended_at=ended_at)


def draws(reader: FleetReader) -> dict[str, float | None]:
    return {node.name: None if node.reading is None else node.reading.draw_w for node in reader.read().nodes}


def test_readings_come_from_the_runs_of_the_backends_jobs(
    states: NodeStates, backend: FakeNodeBackend, tmp_path: Path
) -> None:
    add_minute(tmp_path / "gpt", "n1", 840.0, 90.0)
    add_minute(tmp_path / "gpt", "n1", 900.0, 100.0)
    add_minute(tmp_path / "old", "n2", 900.0, 100.0)
    backend.jobs = [run_job(tmp_path / "gpt"), run_job(tmp_path / "old", JobState.DONE, NOW - 90_000.0)]
    assert draws(make_reader(states, backend)) == {"n1": 100.0, "n2": None, "n3": None}


def test_runs_of_a_given_directory_are_read_instead(
    states: NodeStates, backend: FakeNodeBackend, tmp_path: Path
) -> None:
    add_minute(tmp_path / "runs" / "a", "n1", 900.0, 100.0)
    add_minute(tmp_path / "runs" / "b", "n2", 900.0, 200.0)
    (tmp_path / "runs" / "no-run").mkdir()
    sources = FleetSources(backend, runs=tmp_path / "runs")  # type: ignore[arg-type]
    assert draws(FleetReader(sources, states, now=lambda: NOW)) == {"n1": 100.0, "n2": 200.0, "n3": None}
    with pytest.raises(UsageError, match=r"--runs .*nowhere: no such directory"):
        FleetReader(FleetSources(None, runs=tmp_path / "nowhere"), states)


def test_a_pods_minutes_are_its_nodes(states: NodeStates, backend: FakeNodeBackend, tmp_path: Path) -> None:
    backend.nodes["n1"] = replace(backend.nodes["n1"], host_names=("gpt-workers-0-0",))
    add_minute(tmp_path / "gpt", "gpt-workers-0-0", 900.0, 100.0)
    backend.jobs = [run_job(tmp_path / "gpt")]
    assert draws(make_reader(states, backend))["n1"] == 100.0


def test_this_machine_is_read_where_no_agent_records_it(
    states: NodeStates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FakeNodeBackend(0)
    backend.nodes[HERE] = BackendNode(HERE, "idle", NodeService.OPEN)
    sample = NodeSample(NOW, HostSample(cpu_power_w=42.0))
    assert draws(make_reader(states, backend, read_here=lambda: sample)) == {HERE: 42.0}


def test_nodes_of_a_file_come_after_the_backends_and_have_their_own_sources(
    states: NodeStates, backend: FakeNodeBackend, tmp_path: Path
) -> None:
    pages = {"http://n2/": 'DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-a"} 300\n'}

    def fetch(url: str) -> str:
        if url not in pages:
            raise ConnectionRefusedError(111, "Connection refused")
        return pages[url]

    openers = ServiceOpeners(prometheus=lambda options: PrometheusSource(options.url, lambda: NOW, fetch))
    file = tmp_path / "nodes.yaml"
    file.write_text("nodes: [{name: n2, prometheus: 'http://n2/'}, {name: x1, prometheus: 'http://x1/'}]\n")
    view = make_reader(states, backend, file, openers=openers).read()
    assert [node.name for node in view.nodes] == ["n1", "n2", "n3", "x1"]
    found = {node.name: node.reading for node in view.nodes}
    assert (found["n2"] is not None and found["n2"].draw_w, found["x1"]) == (300.0, None)
    assert view.problems == ["x1: http://x1/: Connection refused; is the exporter running?"]


def test_a_node_is_drained_by_its_backend_and_in_the_table(states: NodeStates, backend: FakeNodeBackend) -> None:
    drain_node(backend, states, "n2", "fan is loud", "ada")  # type: ignore[arg-type]
    assert backend.nodes["n2"].service is NodeService.DRAINED
    (change,) = states.history("n2")
    assert (change.state, change.reason, change.actor) == (NodeState.DRAINED, "fan is loud", "ada")
    undrain_node(backend, states, "n2", "fan replaced", "bob")  # type: ignore[arg-type]
    assert backend.nodes["n2"].service is NodeService.OPEN
    assert [(each.state, each.actor) for each in states.history("n2")][1:] == [(NodeState.HEALTHY, "bob")]


def test_where_the_backend_refuses_nothing_is_recorded(states: NodeStates, backend: FakeNodeBackend) -> None:
    backend.may_drain = False
    with pytest.raises(UsageError, match="Slurm refuses"):
        drain_node(backend, states, "n2", "hot", "eve")  # type: ignore[arg-type]
    assert states.history("n2") == []


def test_a_node_that_was_drained_elsewhere_gets_the_reason_and_a_history(
    states: NodeStates, backend: FakeNodeBackend
) -> None:
    backend.drain_node("n2", "by hand", "root")
    drain_node(backend, states, "n2", "fan is loud", "ada")  # type: ignore[arg-type]
    assert (backend.nodes["n2"].reason, len(states.history("n2"))) == ("fan is loud", 1)


def test_a_node_that_was_undrained_elsewhere_can_be_drained_and_taken_back(
    states: NodeStates, backend: FakeNodeBackend
) -> None:
    drain_node(backend, states, "n2", "hot", "ada")  # type: ignore[arg-type]
    backend.undrain_node("n2")
    drain_node(backend, states, "n2", "still hot", "ada")  # type: ignore[arg-type]
    assert backend.nodes["n2"].reason == "still hot"
    backend.undrain_node("n2")
    undrain_node(backend, states, "n2", "cooled down", "ada")  # type: ignore[arg-type]
    assert states.newest()["n2"].state is NodeState.HEALTHY


def test_a_suspect_node_is_taken_back(states: NodeStates, backend: FakeNodeBackend) -> None:
    states.change("n1", NodeState.SUSPECT, "Xid 79", "agent")
    undrain_node(backend, states, "n1", "it was the program", "ada")  # type: ignore[arg-type]
    assert states.newest()["n1"].state is NodeState.HEALTHY


@pytest.mark.parametrize("do", [drain_node, undrain_node])
def test_a_node_that_is_not_there_is_said_with_the_nearest_names(
    states: NodeStates, backend: FakeNodeBackend, do: Any
) -> None:
    with pytest.raises(UsageError, match=r"n22: slurm has no such node; nearest are n2"):
        do(backend, states, "n22", "hot", "ada")


def test_what_is_drained_is_not_drained_again_and_what_is_healthy_not_taken_back(
    states: NodeStates, backend: FakeNodeBackend
) -> None:
    with pytest.raises(UsageError, match="n1: is neither drained nor suspect; slurm calls it idle"):
        undrain_node(backend, states, "n1", "why", "ada")  # type: ignore[arg-type]
    drain_node(backend, states, "n1", "hot", "ada")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"n1: is drained already: hot \(ada\); `phalanx nodes undrain n1`"):
        drain_node(backend, states, "n1", "again", "ada")  # type: ignore[arg-type]


def test_a_node_with_evidence_in_a_run_is_listed_as_suspect(
    states: NodeStates, backend: FakeNodeBackend, tmp_path: Path
) -> None:
    backend.nodes["n2"] = replace(backend.nodes["n2"], host_names=("gpt-workers-0-0",))
    add_minute(tmp_path / "gpt", "gpt-workers-0-0", 900.0, 100.0, xids=(79,))
    add_minute(tmp_path / "gpt", "elsewhere", 900.0, 100.0, xids=(79,))
    log = EventLog(tmp_path / "gpt" / "events.jsonl")
    log.write(WorkerStarted(pid=1, rank=0, host="n1", attempt=0))
    log.write(WorkerFailure(time=950.0, rank=0, cause="exit_code", exit_code=77, message="no GPU"))
    log.close()
    backend.jobs = [run_job(tmp_path / "gpt", JobState.INTERRUPTED, NOW - 60.0)]
    reader = make_reader(states, backend)
    view = reader.read()
    assert [(node.name, node.state) for node in view.nodes] == [("n1", "suspect"), ("n2", "suspect"), ("n3", "healthy")]
    assert str(view.nodes[0].reason).startswith("a run left it as unfit (no GPU): drain and test the node")
    assert {change.node for change in view.new_suspects} == {"n1", "n2"}
    assert reader.read().new_suspects == []
    assert sorted(states.newest()) == ["n1", "n2"]


def test_evidence_that_is_written_later_is_found_by_the_next_read(
    states: NodeStates, backend: FakeNodeBackend, tmp_path: Path
) -> None:
    add_minute(tmp_path / "gpt", "n1", 840.0, 100.0)
    backend.jobs = [run_job(tmp_path / "gpt")]
    reader = make_reader(states, backend)
    assert reader.read().new_suspects == []
    add_minute(tmp_path / "gpt", "n1", 900.0, 100.0, xids=(79,))
    (change,) = reader.read().new_suspects
    assert change.node == "n1"


def test_a_run_that_vanishes_or_may_not_be_read_leaves_the_others(
    states: NodeStates, backend: FakeNodeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, node in (("a", "n1"), ("b", "n2"), ("c", "n3")):
        add_minute(tmp_path / name, node, 900.0, 100.0)
    backend.jobs = [run_job(tmp_path / name) for name in ("a", "b", "c", "nowhere")]
    stat = Path.stat

    def refuse(path: Path, **more: Any) -> os.stat_result:
        if tmp_path / "b" in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", refuse)
    reader = make_reader(states, backend)
    assert draws(reader) == {"n1": 100.0, "n2": None, "n3": 100.0}
    shutil.rmtree(tmp_path / "a")
    assert draws(reader) == {"n1": 100.0, "n2": None, "n3": 100.0}


def test_where_jobs_cannot_be_listed_nodes_are_and_it_is_said(states: NodeStates, backend: FakeNodeBackend) -> None:
    def fail(array: str | None = None) -> list[JobStatus]:
        raise UsageError("JobSet is not installed")

    backend.list_jobs = fail  # type: ignore[method-assign]
    view = make_reader(states, backend).read()
    assert [node.name for node in view.nodes] == ["n1", "n2", "n3"]
    assert view.problems == ["readings of runs are missing: JobSet is not installed"]


def test_evidence_of_a_clock_that_is_ahead_waits(states: NodeStates, backend: FakeNodeBackend, tmp_path: Path) -> None:
    add_minute(tmp_path / "gpt", "n1", 5000.0, 100.0, xids=(79,))
    backend.jobs = [run_job(tmp_path / "gpt")]
    clock = [NOW]
    reader = make_reader(states, backend, now=lambda: clock[0])
    assert reader.read().new_suspects == []
    clock[0] = 5001.0
    assert len(reader.read().new_suspects) == 1
