"""The rig itself: it is a cluster that can be broken, and nothing of it outlives its holder."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from network_namespaces import list_processes_in
from slurm_cluster import NODES, SlurmCluster, login_files

HOLDER = """
import sys
from slurm_cluster import SlurmCluster
with SlurmCluster() as rig:
    code, out, err = rig.run(["srun", "--nodes=4", "readlink", "/proc/self/ns/net"])
    print(out.replace("\\n", " "), rig.files, flush=True)
    sys.stdin.read()
"""


def test_nothing_is_left_when_the_holder_is_killed(rig: SlurmCluster) -> None:
    links, mounts = os.listdir("/sys/class/net"), Path("/proc/mounts").read_text()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "helpers")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER], env=environment, text=True, **pipes) as holder:
        assert holder.stdout is not None
        *spaces, files = holder.stdout.readline().split()
        assert len(set(spaces)) == 4
        assert all(list_processes_in(space) for space in spaces)
        assert Path(files).exists()
        holder.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20
    while any(list_processes_in(space) for space in spaces):
        assert time.monotonic() < end, "processes outlived the holder of their cluster"
        time.sleep(0.05)
    assert not Path(files).exists()
    assert os.listdir("/sys/class/net") == links
    assert Path("/proc/mounts").read_text() == mounts


def test_nodes_have_names_and_addresses_of_their_own(rig: SlurmCluster) -> None:
    code, out, err = rig.run(["srun", "--nodes=4", "--label", "hostname", "--all-ip-addresses"])
    assert code == 0, err
    assert sorted(out.split()) == sorted(
        word for number in range(4) for word in (f"{number}:", f"10.77.0.{number + 1}")
    )


def test_a_login_on_a_node_runs_nothing_of_this_machines_user(rig: SlurmCluster) -> None:
    files = login_files()
    if not files:
        pytest.skip("root has no such files here")
    code, out, err = rig.run(["srun", "--nodes=1", "wc", "-c", *map(str, files)])
    assert code == 0, err
    assert {line.split()[0] for line in out.splitlines()} == {"0"}


def seconds_to_send(rig: SlurmCluster, tmp_path: Path, size: int) -> float:
    """How long n1 takes to send bytes to n2."""
    script = tmp_path / "send.py"
    script.write_text(
        "import os, socket, sys, time\n"
        "size = int(sys.argv[1])\n"
        "if os.environ['SLURM_PROCID'] == '1':\n"
        "    with socket.create_server(('', 19000)) as server, server.accept()[0] as far:\n"
        "        got = 0\n"
        "        while got < size: got += len(far.recv(1 << 20))\n"
        "        far.sendall(b'x')\n"
        "else:\n"
        "    while True:\n"
        "        try: near = socket.create_connection(('n2', 19000)); break\n"
        "        except ConnectionRefusedError: time.sleep(0.05)\n"
        "    start = time.monotonic()\n"
        "    near.sendall(bytes(size)); near.recv(1)\n"
        "    print(time.monotonic() - start)\n"
    )
    code, out, err = rig.run(["srun", "--nodelist=n1,n2", "--nodes=2", sys.executable, str(script), str(size)])
    assert code == 0, err
    return float(out)


def test_a_link_can_be_slowed_down_and_is_fast_again(rig: SlurmCluster, tmp_path: Path) -> None:
    size = 2_000_000
    rig.limit("n2", "10mbit")
    slow = seconds_to_send(rig, tmp_path, size)
    rig.limit("n2", None)
    fast = seconds_to_send(rig, tmp_path, size)
    assert slow > 0.8 * (size - 256_000) * 8 / 10e6 > fast


@pytest.mark.parametrize("harm", ["cut", "kill_node"])
def test_a_node_that_is_lost_is_noticed_and_can_be_revived(rig: SlurmCluster, harm: str) -> None:
    getattr(rig, harm)("n4")
    rig.wait_for(lambda: rig.states()["n4"] == "down*", "n4 is missed")
    rig.revive("n4")
    code, out, err = rig.run(["srun", "--nodelist=n4", "hostname"])
    assert (code, out) == (0, "n4\n"), err
    assert set(rig.states()) == set(NODES)
