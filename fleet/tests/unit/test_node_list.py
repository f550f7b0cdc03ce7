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
from phalanx_fleet import nodes_file
from phalanx_fleet.node_list import FleetReader, FleetSources, drain_node, undrain_node
from phalanx_fleet.node_states import NodeState, NodeStates
from phalanx_fleet.telemetry.prometheus import PrometheusSource

NOW = 1000.0
HERE = os.uname().nodename


class Fleet:
    """A backend with three nodes, their states, and a folder for runs."""

    def __init__(self, folder: Path, states: NodeStates):
        self.folder, self.states, self.backend = folder, states, FakeNodeBackend()

    def reader(self, *files: Path, **more: Any) -> FleetReader:
        def read_here() -> NodeSample:
            raise AssertionError("this machine is no node here")

        sources = FleetSources(self.backend, *files)  # type: ignore[arg-type]  # it runs no jobs
        return FleetReader(sources, self.states, **{"read_here": read_here, "now": lambda: NOW, **more})

    def drain(self, node: str, reason: str, actor: str = "ada") -> None:
        drain_node(self.backend, self.states, node, reason, actor)  # type: ignore[arg-type]

    def undrain(self, node: str, reason: str, actor: str = "ada") -> None:
        undrain_node(self.backend, self.states, node, reason, actor)  # type: ignore[arg-type]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with NodeStates(tmp_path / "nodes.db") as states:
        yield Fleet(tmp_path, states)


def run_job(folder: Path, state: JobState = JobState.RUNNING, ended_at: float | None = None) -> JobStatus:
    return JobStatus("7", "gpt", state, run_dir=str(folder), ended_at=ended_at)


def draws(reader: FleetReader) -> dict[str, float | None]:
    return {node.name: None if node.reading is None else node.reading.draw_w for node in reader.read().nodes}


def test_readings_come_from_the_runs_of_the_backends_jobs(fleet: Fleet) -> None:
    add_minute(fleet.folder / "gpt", "n1", 840.0, 90.0)
    add_minute(fleet.folder / "gpt", "n1", 900.0, 100.0)
    add_minute(fleet.folder / "old", "n2", 900.0, 100.0)
    fleet.backend.jobs = [run_job(fleet.folder / "gpt"), run_job(fleet.folder / "old", JobState.DONE, NOW - 90_000.0)]
    assert draws(fleet.reader()) == {"n1": 100.0, "n2": None, "n3": None}


def test_runs_of_a_given_directory_are_read_instead(fleet: Fleet) -> None:
    add_minute(fleet.folder / "runs" / "a", "n1", 900.0, 100.0)
    add_minute(fleet.folder / "runs" / "b", "n2", 900.0, 200.0)
    (fleet.folder / "runs" / "no-run").mkdir()
    sources = FleetSources(fleet.backend, runs=fleet.folder / "runs")  # type: ignore[arg-type]
    assert draws(FleetReader(sources, fleet.states, now=lambda: NOW)) == {"n1": 100.0, "n2": 200.0, "n3": None}
    with pytest.raises(UsageError, match=r"--runs .*nowhere: no such directory"):
        FleetReader(FleetSources(None, runs=fleet.folder / "nowhere"), fleet.states)


def test_a_pods_minutes_are_its_nodes(fleet: Fleet) -> None:
    fleet.backend.nodes["n1"] = replace(fleet.backend.nodes["n1"], host_names=("gpt-workers-0-0",))
    add_minute(fleet.folder / "gpt", "gpt-workers-0-0", 900.0, 100.0)
    fleet.backend.jobs = [run_job(fleet.folder / "gpt")]
    assert draws(fleet.reader())["n1"] == 100.0


def test_this_machine_is_read_where_no_agent_records_it(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.backend = FakeNodeBackend(0)
    fleet.backend.nodes[HERE] = BackendNode(HERE, "idle", NodeService.OPEN)
    sample = NodeSample(NOW, HostSample(cpu_power_w=42.0))
    assert draws(fleet.reader(read_here=lambda: sample)) == {HERE: 42.0}


def test_nodes_of_a_file_come_after_the_backends_and_have_their_own_sources(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {"http://n2/": 'DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-a"} 300\n'}

    def fetch(url: str) -> str:
        if url not in pages:
            raise ConnectionRefusedError(111, "Connection refused")
        return pages[url]

    monkeypatch.setattr(nodes_file, "PrometheusSource", lambda url: PrometheusSource(url, lambda: NOW, fetch))
    file = fleet.folder / "nodes.yaml"
    file.write_text("nodes: [{name: n2, prometheus: 'http://n2/'}, {name: x1, prometheus: 'http://x1/'}]\n")
    view = fleet.reader(file).read()
    assert [node.name for node in view.nodes] == ["n1", "n2", "n3", "x1"]
    found = {node.name: node.reading for node in view.nodes}
    assert (found["n2"] is not None and found["n2"].draw_w, found["x1"]) == (300.0, None)
    assert view.problems == ["x1: http://x1/: Connection refused; is the exporter running?"]


def test_a_node_is_drained_by_its_backend_and_in_the_table(fleet: Fleet) -> None:
    fleet.drain("n2", "fan is loud")
    assert fleet.backend.nodes["n2"].service is NodeService.DRAINED
    (change,) = fleet.states.history("n2")
    assert (change.state, change.reason, change.actor) == (NodeState.DRAINED, "fan is loud", "ada")
    fleet.undrain("n2", "fan replaced", "bob")
    assert fleet.backend.nodes["n2"].service is NodeService.OPEN
    assert [(each.state, each.actor) for each in fleet.states.history("n2")][1:] == [(NodeState.HEALTHY, "bob")]


def test_where_the_backend_refuses_nothing_is_recorded(fleet: Fleet) -> None:
    fleet.backend.may_drain = False
    with pytest.raises(UsageError, match="Slurm refuses"):
        fleet.drain("n2", "hot", "eve")
    assert fleet.states.history("n2") == []


def test_a_node_that_was_drained_elsewhere_gets_the_reason_and_a_history(fleet: Fleet) -> None:
    fleet.backend.drain_node("n2", "by hand", "root")
    fleet.drain("n2", "fan is loud")
    assert (fleet.backend.nodes["n2"].reason, len(fleet.states.history("n2"))) == ("fan is loud", 1)


def test_a_node_that_was_undrained_elsewhere_can_be_drained_and_taken_back(fleet: Fleet) -> None:
    fleet.drain("n2", "hot")
    fleet.backend.undrain_node("n2")
    fleet.drain("n2", "still hot")
    assert fleet.backend.nodes["n2"].reason == "still hot"
    fleet.backend.undrain_node("n2")
    fleet.undrain("n2", "cooled down")
    assert fleet.states.newest()["n2"].state is NodeState.HEALTHY


def test_a_suspect_node_is_taken_back(fleet: Fleet) -> None:
    fleet.states.change("n1", NodeState.SUSPECT, "Xid 79", "agent")
    fleet.undrain("n1", "it was the program")
    assert fleet.states.newest()["n1"].state is NodeState.HEALTHY


@pytest.mark.parametrize("do", [Fleet.drain, Fleet.undrain])
def test_a_node_that_is_not_there_is_said_with_the_nearest_names(fleet: Fleet, do: Any) -> None:
    with pytest.raises(UsageError, match=r"n22: slurm has no such node; nearest are n2"):
        do(fleet, "n22", "hot")


def test_what_is_drained_is_not_drained_again_and_what_is_healthy_not_taken_back(fleet: Fleet) -> None:
    with pytest.raises(UsageError, match="n1: is neither drained nor suspect; slurm calls it idle"):
        fleet.undrain("n1", "why")
    fleet.drain("n1", "hot")
    with pytest.raises(UsageError, match=r"n1: is drained already: hot \(ada\); `phalanx nodes undrain n1`"):
        fleet.drain("n1", "again")


def test_a_node_with_evidence_in_a_run_is_listed_as_suspect(fleet: Fleet) -> None:
    fleet.backend.nodes["n2"] = replace(fleet.backend.nodes["n2"], host_names=("gpt-workers-0-0",))
    add_minute(fleet.folder / "gpt", "gpt-workers-0-0", 900.0, 100.0, xids=(79,))
    add_minute(fleet.folder / "gpt", "elsewhere", 900.0, 100.0, xids=(79,))
    log = EventLog(fleet.folder / "gpt" / "events.jsonl")
    log.write(WorkerStarted(pid=1, rank=0, host="n1", attempt=0))
    log.write(WorkerFailure(time=950.0, rank=0, cause="exit_code", exit_code=77, message="no GPU"))
    log.close()
    fleet.backend.jobs = [run_job(fleet.folder / "gpt", JobState.INTERRUPTED, NOW - 60.0)]
    reader = fleet.reader()
    view = reader.read()
    assert [(node.name, node.state) for node in view.nodes] == [("n1", "suspect"), ("n2", "suspect"), ("n3", "healthy")]
    assert str(view.nodes[0].reason).startswith("a run left it as unfit (no GPU): drain and test the node")
    assert {change.node for change in view.new_suspects} == {"n1", "n2"}
    assert reader.read().new_suspects == []
    assert sorted(fleet.states.newest()) == ["n1", "n2"]


def test_evidence_that_is_written_later_is_found_by_the_next_read(fleet: Fleet) -> None:
    add_minute(fleet.folder / "gpt", "n1", 840.0, 100.0)
    fleet.backend.jobs = [run_job(fleet.folder / "gpt")]
    reader = fleet.reader()
    assert reader.read().new_suspects == []
    add_minute(fleet.folder / "gpt", "n1", 900.0, 100.0, xids=(79,))
    (change,) = reader.read().new_suspects
    assert change.node == "n1"


def test_a_run_that_vanishes_or_may_not_be_read_leaves_the_others(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, node in (("a", "n1"), ("b", "n2"), ("c", "n3")):
        add_minute(fleet.folder / name, node, 900.0, 100.0)
    fleet.backend.jobs = [run_job(fleet.folder / name) for name in ("a", "b", "c", "nowhere")]
    stat = Path.stat

    def refuse(path: Path, **more: Any) -> os.stat_result:
        if fleet.folder / "b" in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", refuse)
    reader = fleet.reader()
    assert draws(reader) == {"n1": 100.0, "n2": None, "n3": 100.0}
    shutil.rmtree(fleet.folder / "a")
    assert draws(reader) == {"n1": 100.0, "n2": None, "n3": 100.0}


def test_where_jobs_cannot_be_listed_nodes_are_and_it_is_said(fleet: Fleet) -> None:
    def fail(array: str | None = None) -> list[JobStatus]:
        raise UsageError("JobSet is not installed")

    fleet.backend.list_jobs = fail  # type: ignore[method-assign]
    view = fleet.reader().read()
    assert [node.name for node in view.nodes] == ["n1", "n2", "n3"]
    assert view.problems == ["readings of runs are missing: JobSet is not installed"]


def test_evidence_of_a_clock_that_is_ahead_waits(fleet: Fleet) -> None:
    add_minute(fleet.folder / "gpt", "n1", 5000.0, 100.0, xids=(79,))
    fleet.backend.jobs = [run_job(fleet.folder / "gpt")]
    clock = [NOW]
    reader = fleet.reader(now=lambda: clock[0])
    assert reader.read().new_suspects == []
    clock[0] = 5001.0
    assert len(reader.read().new_suspects) == 1
