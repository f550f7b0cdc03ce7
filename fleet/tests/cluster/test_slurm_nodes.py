"""Nodes of a real Slurm: drained, no job starts there; undrained, one does."""

import sys
from pathlib import Path

import pytest

from node_contract import NodeContract
from phalanx.errors import UsageError
from phalanx.jobs.backends.slurm.backend import SlurmBackend
from phalanx.jobs.spec import Job, JobState
from phalanx.run import Run
from phalanx_fleet.node_list import FleetReader, FleetSources, drain_node, undrain_node
from phalanx_fleet.node_states import NodeState, NodeStates
from slurm_cluster import NODES, SlurmCluster


class TestContract(NodeContract):
    @pytest.fixture
    def engine(self, rig: SlurmCluster, slurm: SlurmBackend) -> SlurmBackend:
        rig.wait_for(lambda: set(rig.states().values()) == {"idle"}, "all nodes idle")
        return slurm

    @pytest.fixture
    def node(self) -> str:
        return "n2"


def test_no_job_starts_on_a_drained_node_until_it_is_undrained(
    rig: SlurmCluster, slurm: SlurmBackend, tmp_path: Path
) -> None:
    rig.wait_for(lambda: set(rig.states().values()) == {"idle"}, "all nodes idle")
    with NodeStates(tmp_path / "nodes.db") as states:
        drain_node(slurm, states, "n3", "fan is loud", "ada")
        with pytest.raises(UsageError, match=r"n3: is drained already: fan is loud \(ada\)"):
            drain_node(slurm, states, "n3", "again", "ada")
        listed = {node.name: node for node in FleetReader(FleetSources(slurm), states).read().nodes}
        assert (listed["n3"].state, listed["n3"].reason) == (NodeState.DRAINED, "fan is loud (ada)")
        assert [listed[name].state for name in NODES if name != "n3"] == [NodeState.HEALTHY] * 3

        wide = slurm.submit(slurm.render(Job("wide", ("hostname",), tmp_path, num_nodes=4)))
        narrow = slurm.submit(slurm.render(Job("narrow", ("hostname",), tmp_path, num_nodes=3)))
        rig.wait_for(lambda: slurm.poll(narrow).state.is_final, "the job of three nodes to end")
        assert sorted(slurm.poll(narrow).nodes) == ["n1", "n2", "n4"]
        assert slurm.poll(wide).state is JobState.QUEUED

        undrain_node(slurm, states, "n3", "fan was replaced", "ada")
        rig.wait_for(lambda: slurm.poll(wide).state.is_final, "the job of four nodes to end")
        assert sorted(slurm.poll(wide).nodes) == list(NODES)
        assert [(each.state, each.actor) for each in states.history("n3")] == [("drained", "ada"), ("healthy", "ada")]


def test_a_user_without_the_right_may_not_drain(rig: SlurmCluster, tmp_path: Path) -> None:
    unprivileged = ["setpriv", "--reuid=65534", "--clear-groups"]
    slurm = SlurmBackend(lambda argv: rig.run([*unprivileged, *argv]), tmp_path)
    with NodeStates(tmp_path / "nodes.db") as states:
        with pytest.raises(UsageError, match=r"n1: Slurm refuses it to your user; it takes root, SlurmUser, or"):
            drain_node(slurm, states, "n1", "hot", "eve")
        assert states.history("n1") == []
    assert rig.states()["n1"] == "idle"


WRITE_MINUTE = """
import os, sys, time
import sys
from pathlib import Path
from phalanx.run.telemetry_minutes import NodeMinute, Rollups, ValueRollup
node, run = os.uname().nodename, Path(sys.argv[1])
host = Rollups({"cpu_power_w": ValueRollup(100.0, 100.0, 100.0, 60)})
devices = {"GPU-a": Rollups({"power_mean_w": ValueRollup(300.0, 300.0, 300.0, 60)}, {}, (79,))}
minute = NodeMinute(time.time() - 60, 60.0, 60, node, host, devices)
(run / "telemetry" / f"{node}.jsonl").write_bytes(minute.to_line())
"""


def test_what_a_job_writes_on_its_node_is_its_reading_and_makes_it_suspect(
    rig: SlurmCluster, slurm: SlurmBackend, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    run.create()
    run.telemetry.mkdir()
    command = (sys.executable, "-c", WRITE_MINUTE, str(run.path))
    job = slurm.submit(slurm.render(Job("errors", command, tmp_path, num_nodes=2, run_dir=run.path)))
    rig.wait_for(lambda: slurm.poll(job).state.is_final, "the job to end")
    with NodeStates(tmp_path / "nodes.db") as states:
        view = FleetReader(FleetSources(slurm), states).read()
    used = {node.name: node for node in view.nodes if node.name in slurm.poll(job).nodes}
    assert len(used) == 2, list(slurm.read_logs(job))
    for node in used.values():
        assert node.state is NodeState.SUSPECT
        assert str(node.reason).startswith("Xid 79 on GPU-a (GPU fell off the bus)")
        assert node.reading is not None
        assert (node.reading.draw_w, node.reading.parts) == (400.0, "CPU and accelerators")
    assert [node.state for node in view.nodes if node.name not in used] == [NodeState.HEALTHY] * 2
