"""`phalanx doctor` on the nodes of a real Slurm: as its prolog and its health check, with the scripts of the doctor's
page."""

import re
import sys
from pathlib import Path

import pytest

from phalanx.jobs.backends.slurm.backend import SlurmBackend
from phalanx.jobs.spec import Job, JobState
from slurm_cluster import NODES, SlurmCluster, find_obstacle

WHY = find_obstacle()
pytestmark = pytest.mark.skipif(WHY is not None, reason=f"NOTHING IS TESTED ON A REAL SLURM: {WHY}")

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "health-checks.md"


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A folder of each node's own: what is mounted there on one node, the others do not see."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def script(mark: str, folder: Path, scratch: Path) -> Path:
    """A script as it stands on the doctor's page, but for the paths and the number of GPUs."""
    (text,) = (found for found in re.findall(r"```sh\n(#!.*?)```", PAGE.read_text(), re.DOTALL) if mark in found)
    for theirs, ours in (
        ("/opt/phalanx/bin/phalanx", str(Path(sys.executable).with_name("phalanx"))),
        ("--expect-gpus 8", "--expect-gpus 0"),
        ("--run /scratch", f"--run {scratch}"),
        ("/var/log/phalanx-doctor.log", f"{folder}/$SLURMD_NODENAME.log"),
    ):
        text = text.replace(theirs, ours)
    file = folder / mark.lower()
    file.write_text(text)
    file.chmod(0o755)
    return file


def fill_disk(rig: SlurmCluster, node: str, scratch: Path) -> None:
    """On this node the run's disk has less room than the doctor lets pass."""
    rig.administer(node, "mount", "-t", "tmpfs", "-o", "size=1m", "small", str(scratch))


def reason(rig: SlurmCluster, node: str) -> str:
    """Why Slurm has a node out of service."""
    code, out, err = rig.run(["sinfo", "--noheader", f"--nodes={node}", "--format=%E"])
    assert code == 0, err
    return out.strip()


def test_as_prolog_the_doctor_drains_an_unfit_node_and_the_job_runs_on_others(tmp_path: Path, scratch: Path) -> None:
    prolog = script("Prolog", tmp_path, scratch)
    with SlurmCluster(more=f"Prolog={prolog}\nPrologFlags=Alloc") as rig:
        fill_disk(rig, "n2", scratch)
        slurm = SlurmBackend(rig.run, tmp_path / "jobs")
        id = slurm.submit(slurm.render(Job("examined", ("hostname",), tmp_path, num_nodes=2)))
        rig.wait_for(lambda: slurm.poll(id).state.is_final, "the job's end", 90)
        status = slurm.poll(id)
        assert (status.state, status.num_attempts) == (JobState.DONE, 2), list(slurm.read_logs(id))
        ran = sorted({*slurm.read_logs(id)} & {*NODES})  # the first attempt may have begun, on one of the others
        assert len(ran) >= 2
        assert "n2" not in ran
        assert [node for node, state in rig.states().items() if state.startswith("drain")] == ["n2"]
        assert "prolog" in reason(rig, "n2").lower()
    said = {node: (tmp_path / f"{node}.log").read_text() for node in ("n2", *ran)}
    assert re.search(rf"FAIL +disk/run +{re.escape(str(scratch))}: 0\.0 of 0\.0 GiB free", said["n2"])
    assert said["n2"].endswith(f"job {id}: exit code 77\n")
    assert all(said[node].endswith(f"job {id}: exit code 0\n") for node in ran)


def test_as_health_check_the_doctor_drains_an_unfit_node_and_says_why(tmp_path: Path, scratch: Path) -> None:
    program = script("HealthCheckProgram", tmp_path, scratch)
    with SlurmCluster(more=f"HealthCheckProgram={program}\nHealthCheckInterval=5\nHealthCheckNodeState=IDLE") as rig:
        fill_disk(rig, "n3", scratch)
        rig.wait_for(lambda: rig.states()["n3"].startswith("drain"), "the sick node to be drained", 90)
        assert re.match(r"phalanx doctor: FAIL +disk/run +.*scratch: 0\.0 of 0\.0 GiB free", reason(rig, "n3"))
        assert [rig.states()[node] for node in NODES if node != "n3"] == ["idle"] * 3
