"""A run directory on a real GlusterFS, over FUSE: three copies of each file, of which some or most are lost."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from phalanx.errors import ExitCode
from phalanx.run import Run
from server_processes import find_free_port, run_server
from train_harness import TrainHarness, plan_fault, wait_until, write_faults

if os.geteuid() != 0 or shutil.which("glusterfsd") is None or not os.path.exists("/dev/fuse"):
    pytest.skip(
        "GlusterFS needs root, /dev/fuse and apt-get install glusterfs-server glusterfs-client",
        allow_module_level=True,
    )

BRICK = """
volume files
  type storage/posix
  option directory {directory}
end-volume
volume locks
  type features/locks
  subvolumes files
end-volume
volume server
  type protocol/server
  option transport-type tcp
  option transport.socket.bind-address 127.0.0.1
  option transport.socket.listen-port {port}
  option auth.addr.locks.allow *
  subvolumes locks
end-volume
"""
CLIENT = """
volume brick{number}
  type protocol/client
  option transport-type tcp
  option remote-host 127.0.0.1
  option remote-port {port}
  option remote-subvolume locks
  option ping-timeout 5
end-volume
"""
REPLICATED = """
volume replicated
  type cluster/replicate
  option afr-pending-xattr brick0,brick1,brick2
  option quorum-type auto
  subvolumes brick0 brick1 brick2
end-volume
"""


class Gluster:
    """A volume of three bricks, mounted at `path`."""

    def __init__(self, folder: Path):
        self._folder, self.path = folder, folder / "mount"
        self._ports = [find_free_port() for _ in range(3)]
        self._bricks = [ExitStack() for _ in range(3)]

    def start_brick(self, number: int) -> None:
        volume, directory = self._folder / f"brick{number}.vol", self._folder / f"brick{number}"
        directory.mkdir(exist_ok=True)
        volume.write_text(BRICK.format(directory=directory, port=self._ports[number]))
        log = self._folder / f"brick{number}.txt"
        command = ["glusterfsd", "-N", f"--volfile={volume}", f"--log-file={log}"]
        self._bricks[number].enter_context(run_server(command, self._ports[number], log))

    def stop_brick(self, number: int) -> None:
        self._bricks[number].close()

    def __enter__(self) -> "Gluster":
        for number in range(3):
            self.start_brick(number)
        self.path.mkdir()
        volume = self._folder / "client.vol"
        bricks = "".join(CLIENT.format(number=number, port=port) for number, port in enumerate(self._ports))
        volume.write_text(bricks + REPLICATED)
        log = f"--log-file={self._folder / 'client.txt'}"
        self._client = subprocess.Popen(["glusterfs", "-N", f"--volfile={volume}", log, str(self.path)])
        wait_until(lambda: os.path.ismount(self.path), 60, "the mount")
        wait_until(self._is_writable, 60, "the bricks")
        return self

    def _is_writable(self) -> bool:
        try:
            (self.path / "probe").write_text("x")
        except OSError:
            time.sleep(0.1)
            return False
        return all((self._folder / f"brick{number}" / "probe").exists() for number in range(3))

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=True)
        self._client.terminate()
        self._client.wait()
        for brick in self._bricks:
            brick.close()


@pytest.fixture
def gluster(tmp_path: Path) -> Iterator[Gluster]:
    with Gluster(tmp_path) as volume:
        yield volume


def train_while(lab: TrainHarness, gluster: Gluster, lost: list[int]) -> tuple[int, str]:
    """Train, and lose bricks after the first save; for two seconds if those that are left are no majority."""
    run = Run(gluster.path / "run")
    write_faults(run, [plan_fault(5, "slow", delay=4.0)])
    with lab.start("train", lab.recipe_file({}), "--run", run.path, "--nproc-per-node", "2") as train:
        wait_until(lambda: any(run.checkpoints.glob("step-*")), 150, "a save")
        for number in lost:
            gluster.stop_brick(number)
        if len(lost) > 1:
            time.sleep(2.0)  # an outage has a length
            for number in lost:
                gluster.start_brick(number)
        _, errors = train.communicate(timeout=200)
    return train.returncode, errors


@pytest.mark.parametrize("lost", [[0], [0, 1]], ids=["one of three copies", "the majority for a while"])
def test_a_run_ends_in_the_digest_of_the_local_run_when_bricks_are_lost(
    lab: TrainHarness, gluster: Gluster, lost: list[int]
) -> None:
    code, errors = train_while(lab, gluster, lost)
    assert code == ExitCode.DONE, errors
    assert "Traceback" not in errors
    assert lab.train_reference({}, 2).digest in errors


def test_a_volume_that_is_gone_is_one_sentence(lab: TrainHarness, gluster: Gluster) -> None:
    for number in range(3):
        gluster.stop_brick(number)
    for words in (("train", lab.recipe_file({}), "--run"), ("report",), ("checkpoint", "ls")):
        ended = lab.command(*words, gluster.path / "run")
        assert ended.returncode != ExitCode.DONE
        assert "storage fails" in ended.stderr.splitlines()[-1], ended.stderr
        assert "Traceback" not in ended.stderr
