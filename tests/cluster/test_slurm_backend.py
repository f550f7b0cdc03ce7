"""The Slurm engine on a real Slurm of four nodes: what jobs get, and what becomes of them."""

import json
import re
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from backend_contract import SHELL_HOSTILE_WORDS
from phalanx.errors import UsageError
from phalanx.jobs.backends.slurm.backend import SlurmBackend
from phalanx.jobs.spec import Job, JobState, JobStatus, make_array
from slurm_cluster import SlurmCluster


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where jobs start."""
    return tmp_path_factory.mktemp("jobs")


def python(source: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", source, *arguments)


def until(slurm: SlurmBackend, id: str, condition: Callable[[JobStatus], bool], seconds: float = 60.0) -> JobStatus:
    """Poll a job until a condition holds."""
    end = time.monotonic() + seconds
    while not condition(status := slurm.poll(id)):
        assert time.monotonic() < end, f"{status}\n" + "\n".join(slurm.read_logs(id))
        time.sleep(0.2)
    return status


def over(status: JobStatus) -> bool:
    return status.state.is_final


@pytest.fixture(scope="module")
def jobs(slurm: SlurmBackend, shared: Path) -> dict[str, str]:
    """Jobs that run beside each other, by name; each test waits for its own."""
    # asked to stop before its limit, it leaves, and says so; started again, it ends
    warned = python(
        "import os, signal, sys, time\n"
        "if os.environ.get('SLURM_RESTART_COUNT', '0') != '0': sys.exit(0)\n"
        # Slurm passes it on by two ways at once, and the second may come while Python ends
        "def leave(number, frame):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "    print('warned', flush=True)\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGUSR1, leave)\n"
        "print('waiting', flush=True)\n"
        "while True: time.sleep(0.1)"
    )
    unfinished = python(
        "import os, sys, time\n"
        "attempt = int(os.environ.get('SLURM_RESTART_COUNT', 0))\n"
        "print('attempt', attempt, flush=True)\n"
        "time.sleep(0 if os.environ['PHALANX_NODE_RANK'] == '1' else 2)\n"  # the other one leaves first
        "print('saved', os.environ['PHALANX_NODE_RANK'], flush=True)\n"
        "sys.exit(75 if attempt < 1 else 0)"
    )
    unfit = python(
        "import os, sys, time\n"
        "print(os.environ['SLURMD_NODENAME'], flush=True)\n"
        "if os.environ.get('SLURM_RESTART_COUNT', '0') != '0': sys.exit(0)\n"
        "if os.environ['PHALANX_NODE_RANK'] == '1': sys.exit(77)\n"
        "time.sleep(60)"
    )
    commands: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
        "warned": (warned, {"time_limit_s": 60.0, "warning_s": 30.0}),
        "unfinished": (unfinished, {"num_nodes": 2}),
        "unfit": (unfit, {"num_nodes": 2}),
    }
    ids = {
        name: slurm.submit(slurm.render(Job(name, command, shared, **more)))  # type: ignore[arg-type]
        for name, (command, more) in commands.items()
    }
    members = make_array("warned-array", [Job("warned", warned, shared, time_limit_s=60.0, warning_s=30.0)])
    return {**ids, "warned-member": slurm.submit_array(slurm.render_array(members))[0]}


PLACE = """
import json, os, pathlib, socket, sys
node, nodes = int(os.environ["PHALANX_NODE_RANK"]), int(os.environ["PHALANX_NUM_NODES"])
host, _, port = os.environ["PHALANX_LEADER_ADDR"].rpartition(":")
token = pathlib.Path(os.environ["PHALANX_TOKEN_FILE"])
said = None
if node == 0:
    with socket.create_server((host, int(port))) as server:
        for _ in range(nodes - 1):
            with server.accept()[0] as far:
                far.sendall(b"welcome")
else:
    for _ in range(300):
        try:
            with socket.create_connection((host, int(port)), timeout=5) as near:
                said = near.recv(100).decode()
            break
        except ConnectionRefusedError:
            __import__("time").sleep(0.1)
found = {
    "nodes": nodes, "said": said, "token": token.read_text(), "mode": token.stat().st_mode,
    "host": socket.gethostname(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "arguments": sys.argv[1:],
    "folder": os.getcwd(), "odd": os.environ["ODD"], "secret": os.environ["SECRET"],
    "name": os.environ["SLURM_JOB_NAME"],
}
pathlib.Path(f"found-{node}").write_text(json.dumps(found))
"""


def test_each_node_gets_its_place_its_words_and_its_secrets(slurm: SlurmBackend, secret: str, tmp_path: Path) -> None:
    folder = tmp_path / "odd $(folder) 'x' \"y\" %j"
    folder.mkdir()
    odd = "a 'b' \"c\" $(d)\ne"
    job = Job(
        "place-1.x_y",
        python(PLACE, *SHELL_HOSTILE_WORDS),
        folder,
        num_nodes=3,
        gpus_per_node=2,
        environment={"ODD": odd},
        secrets=("SECRET",),
        backend_options={"comment": 'it\'s "$(here)" \\ %j'},
    )
    request = slurm.render(job)
    id = slurm.submit(request)
    status = until(slurm, id, over)
    assert status.state is JobState.DONE, list(slurm.read_logs(id))
    assert (status.exit_code, status.num_attempts, len(status.nodes)) == (0, 1, 3)
    found = [json.loads((folder / f"found-{node}").read_text()) for node in range(3)]
    assert [one["host"] for one in found] == list(status.nodes)
    assert [one["said"] for one in found] == [None, "welcome", "welcome"]
    assert len({one["token"] for one in found}) == 1
    assert len(found[0]["token"]) == 64
    for one in found:
        assert stat.S_IMODE(one["mode"]) == 0o600
        assert tuple(one["arguments"]) == SHELL_HOSTILE_WORDS
        assert (one["nodes"], one["folder"], one["odd"], one["gpus"]) == (3, str(folder), odd, "0,1")
        assert (one["secret"], one["name"]) == (secret, "place-1.x_y")
    assert sorted(file.name for file in folder.iterdir()) == ["found-0", "found-1", "found-2"]


def test_no_secret_is_in_scripts_or_what_slurm_shows(slurm: SlurmBackend, rig: SlurmCluster, tmp_path: Path) -> None:
    job = Job("secretive", ("sleep", "60"), tmp_path, secrets=("SECRET",))
    request = slurm.render(job)
    id = slurm.submit(request)
    until(slurm, id, lambda status: status.state is JobState.RUNNING)
    folder = Path(request.commands[0][-1]).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "secrets.sh").stat().st_mode) == 0o600
    shown = (
        rig.run(["scontrol", "show", "job", "--details", id])[1]
        + rig.run(["scontrol", "write", "batch_script", id, "-"])[1]
    )
    shown += rig.run(["ps", "-eww", "-o", "args"])[1] + str(request)
    assert "secretive" in shown
    assert "swordfish" not in shown
    slurm.cancel(id)
    assert until(slurm, id, over).state is JobState.CANCELLED
    assert not (folder / "secrets.sh").exists()


def test_a_partition_that_is_not_there_is_refused_in_slurms_words(slurm: SlurmBackend, tmp_path: Path) -> None:
    request = slurm.render(Job("nowhere", ("true",), tmp_path, backend_options={"partition": "nowhere"}))
    with pytest.raises(UsageError, match="job nowhere: invalid partition specified: nowhere"):
        slurm.submit(request)
    assert not Path(request.commands[0][-1]).parent.exists()


def test_more_nodes_than_there_are_are_refused(slurm: SlurmBackend, tmp_path: Path) -> None:
    request = slurm.render(Job("large", ("true",), tmp_path, num_nodes=5))
    with pytest.raises(UsageError, match="needs 5 nodes, and the default partition has 4 nodes"):
        slurm.submit(request)
    assert not Path(request.commands[0][-1]).parent.exists()
    assert "large" not in [status.name for status in slurm.list_jobs()]


def test_more_gpus_than_a_node_has_are_refused(slurm: SlurmBackend, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Requested node configuration is not available"):
        slurm.submit(slurm.render(Job("greedy", ("true",), tmp_path, gpus_per_node=9)))


def test_an_unfinished_job_is_started_again_and_all_nodes_may_save(slurm: SlurmBackend, jobs: dict[str, str]) -> None:
    status = until(slurm, jobs["unfinished"], over)
    lines = list(slurm.read_logs(jobs["unfinished"]))
    assert (status.state, status.exit_code, status.num_attempts) == (JobState.DONE, 0, 2), lines
    assert [lines.count(line) for line in ("attempt 0", "attempt 1", "saved 0", "saved 1")] == [2, 2, 2, 2]


def test_an_unfit_node_is_avoided_from_then_on(slurm: SlurmBackend, rig: SlurmCluster, jobs: dict[str, str]) -> None:
    until(slurm, jobs["unfit"], lambda status: over(status) or slurm.release(jobs["unfit"]))
    status = until(slurm, jobs["unfit"], over)
    lines = [line for line in slurm.read_logs(jobs["unfit"]) if line in ("n1", "n2", "n3", "n4")]
    assert (status.state, status.exit_code, status.num_attempts) == (JobState.DONE, 0, 2), list(
        slurm.read_logs(jobs["unfit"])
    )
    (bad,) = re.findall(r"ExcNodeList=(n[1-4])\b", rig.run(["scontrol", "show", "job", jobs["unfit"]])[1])
    assert bad in lines[:-2]  # it may have ended the other node before that one has printed its name
    assert bad not in lines[-2:]


@pytest.mark.parametrize("name", ["warned", "warned-member"])
def test_a_job_is_warned_before_its_time_is_over_and_goes_on(
    slurm: SlurmBackend, jobs: dict[str, str], name: str
) -> None:
    status = until(slurm, jobs[name], over, 120)
    lines = list(slurm.read_logs(jobs[name]))
    assert (status.state, status.num_attempts) == (JobState.DONE, 2), lines
    assert lines.count("warned") == 1


def test_a_preempted_job_saves_and_goes_on(slurm: SlurmBackend, rig: SlurmCluster, tmp_path: Path) -> None:
    source = (
        "import os, signal, sys, time\n"
        "if os.environ.get('SLURM_RESTART_COUNT', '0') != '0': sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(75)))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.1)"
    )
    whole = {"exclusive": "yes"}
    id = slurm.submit(slurm.render(Job("yielding", python(source), tmp_path, num_nodes=4, backend_options=whole)))
    until(slurm, id, lambda _: list(slurm.read_logs(id)).count("ready") == 4)
    urgent = Job("urgent", ("hostname",), tmp_path, num_nodes=4, backend_options={**whole, "partition": "urgent"})
    first = slurm.submit(slurm.render(urgent))
    assert until(slurm, first, over).state is JobState.DONE
    status = until(slurm, id, over)
    assert (status.state, status.num_attempts) == (JobState.DONE, 2), list(slurm.read_logs(id))
    assert list(slurm.read_logs(id)).count("saved") == 4


def test_a_job_ends_while_the_controller_is_gone_and_is_started_again(
    slurm: SlurmBackend, rig: SlurmCluster, tmp_path: Path
) -> None:
    source = (
        "import os, pathlib, sys, time\n"
        "if os.environ.get('SLURM_RESTART_COUNT', '0') != '0': sys.exit(0)\n"
        "print('ready', flush=True)\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.1)\n"
        "sys.exit(75)"
    )
    request = slurm.render(Job("patient", python(source), tmp_path))
    id = slurm.submit(request)
    until(slurm, id, lambda _: "ready" in slurm.read_logs(id))
    rig.stop_controller()
    with pytest.raises(UsageError, match=r"slurm does not answer: .*Unable to contact slurm controller"):
        slurm.poll(id)
    (tmp_path / "go").touch()
    rig.wait_for((Path(request.commands[0][-1]).parent / "result").exists, "the attempt's end")
    rig.start_controller()
    rig.wait_for(lambda: rig.run(["scontrol", "ping"])[0] == 0, "the controller")
    status = until(slurm, id, over)
    assert (status.state, status.num_attempts) == (JobState.DONE, 2), list(slurm.read_logs(id))


def test_a_job_waits_for_nodes_that_are_out_of_service(slurm: SlurmBackend, rig: SlurmCluster, tmp_path: Path) -> None:
    assert rig.run(["scontrol", "update", "NodeName=n4", "State=DOWN", "Reason=repair"])[0] == 0
    try:
        id = slurm.submit(slurm.render(Job("whole", ("hostname",), tmp_path, num_nodes=4)))
        status = until(slurm, id, lambda status: status.reason is not None)
        assert status.state is JobState.QUEUED
    finally:
        rig.revive("n4")
    assert until(slurm, id, over).state is JobState.DONE
    assert sorted(slurm.read_logs(id)) == ["n1", "n2", "n3", "n4"]


def test_a_job_that_slurm_has_forgotten_is_still_known(slurm: SlurmBackend, jobs: dict[str, str]) -> None:
    id = jobs["unfinished"]
    until(slurm, id, over)
    forgetful = SlurmBackend(lambda argv: (1, "", "slurm_load_jobs error: Invalid job id specified"), slurm._dirs.root)
    status = forgetful.poll(id)
    assert (status.name, status.state, status.exit_code, status.num_attempts) == ("unfinished", JobState.DONE, 0, 2)
    assert status.nodes == slurm.poll(id).nodes


@pytest.mark.parametrize("which", [0, 1])
def test_a_job_that_loses_a_node_goes_on_elsewhere(
    slurm: SlurmBackend, rig: SlurmCluster, tmp_path: Path, which: int
) -> None:
    source = (
        "import os, signal, sys, time\n"
        "if os.environ.get('SLURM_RESTART_COUNT', '0') != '0': sys.exit(0)\n"
        "print('ready', flush=True)\n"
        "time.sleep(300)"
    )
    id = slurm.submit(slurm.render(Job(f"lost-node-{which}", python(source), tmp_path, num_nodes=2)))
    until(slurm, id, lambda _: list(slurm.read_logs(id)).count("ready") == 2)
    victim = slurm.poll(id).nodes[which]
    rig.kill_node(victim)
    try:
        status = until(slurm, id, over, 120)
        assert (status.state, status.num_attempts) == (JobState.DONE, 2), list(slurm.read_logs(id))
        assert victim not in status.nodes
    finally:
        rig.revive(victim)
