"""Power off through a real Slurm with power saving: SuspendProgram gets the node, and no job powers it up again."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.jobs.backends.slurm.backend import SlurmBackend
from phalanx.jobs.spec import Job, JobState
from slurm_cluster import SlurmCluster, find_obstacle

POWER_SAVING = """\
SuspendProgram={folder}/suspend
ResumeProgram={folder}/resume
SuspendTime=604800
SuspendTimeout=3
ResumeTimeout=60
"""
IGNORE_SIGTERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SuspendProgram and ResumeProgram, which write the nodes that they get to files."""
    folder = tmp_path_factory.mktemp("power")
    for name in ("suspend", "resume"):
        (folder / f"{name}.nodes").touch()
        (folder / name).write_text(f'#!/bin/sh\necho "$1" >>{folder}/{name}.nodes\n')
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def rig(programs: Path) -> Iterator[SlurmCluster]:
    why = find_obstacle()
    if why is not None:
        pytest.skip(f"NOTHING IS TESTED ON A REAL SLURM: {why}")
    with SlurmCluster(more=POWER_SAVING.format(folder=programs)) as rig:
        yield rig


def test_a_node_with_a_job_is_powered_off_and_stays_off(rig: SlurmCluster, programs: Path, tmp_path: Path) -> None:
    slurm = SlurmBackend(rig.run, tmp_path / "state")
    assert slurm.check_power_off(["n1", "n2"]) == []
    job = slurm.submit(
        slurm.render(Job("long", (sys.executable, "-c", IGNORE_SIGTERM), tmp_path, backend_options={"nodelist": "n2"}))
    )
    rig.wait_for(lambda: slurm.poll(job).state is JobState.RUNNING, "the job to run")
    rig.kill_node("n1")  # its daemon answers no more
    slurm.drain_node("n1", "leak", "ada")
    slurm.drain_node("n2", "leak", "ada")

    assert slurm.power_off_nodes(["n1", "n2"], "leak") == {}
    assert slurm.finish_power_off(["n1", "n2"], "leak") == {}
    assert (programs / "suspend.nodes").read_text() == "n[1-2]\n"
    nodes = {node.name: node for node in slurm.list_nodes()}
    assert {str(nodes[name].service) for name in ("n1", "n2")} == {"drained"}
    assert nodes["n2"].reason == "leak (root)"

    rig.wait_for(lambda: rig.states()["n2"] == "drained~", "SuspendTimeout to pass")
    rig.wait_for(lambda: slurm.poll(job).state is JobState.QUEUED, "the job to be requeued")
    other = slurm.submit(slurm.render(Job("other", ("hostname",), tmp_path, num_nodes=2)))  # scheduled after the first
    rig.wait_for(lambda: slurm.poll(other).state.is_final, "another job to end")
    assert sorted(slurm.poll(other).nodes) == ["n3", "n4"]
    assert slurm.poll(job).state is JobState.QUEUED
    assert (programs / "resume.nodes").read_text() == ""

    slurm.undrain_node("n2")
    rig.wait_for(lambda: (programs / "resume.nodes").read_text() == "n2\n", "the job to power n2 up")
    slurm.cancel(job)


def test_who_may_not_power_off_is_said_before(rig: SlurmCluster, tmp_path: Path) -> None:
    unprivileged = ["setpriv", "--reuid=65534", "--clear-groups"]
    slurm = SlurmBackend(lambda argv: rig.run([*unprivileged, *argv]), tmp_path)
    found = slurm.check_power_off(["n3", "n9"])
    assert found[0].startswith("Slurm refuses it to your user; it takes root, SlurmUser, or")
    assert found[1:] == ["n9: slurm has no such node"]
    assert slurm.power_off_nodes(["n3"], "leak") == {"n3": found[0]}
    assert rig.states()["n3"] == "idle"


def test_a_slurm_without_power_saving_says_so(tmp_path: Path) -> None:
    with SlurmCluster() as rig:
        found = SlurmBackend(rig.run, tmp_path).check_power_off(["n1"])
        settings = ("SuspendProgram", "ResumeProgram", "SuspendTime")
        assert found == [f"{each} of slurm.conf is not set, so Slurm powers no node off" for each in settings]
        assert set(rig.states().values()) == {"idle"}
