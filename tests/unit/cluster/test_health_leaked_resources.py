"""What dead runs leave behind: on a /proc made of text files."""

import os
import time
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest

from phalanx.cluster.health import CheckContext, HealthVerdict
from phalanx.cluster.health.checks import host
from phalanx.cluster.health.finding import HealthFinding


def check(root: Path) -> HealthFinding:
    (finding,) = host.check_leaked_resources(CheckContext(root, root, root, root))
    return finding


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    directory = tmp_path / "dev/shm"
    directory.mkdir(parents=True)
    return directory


def test_a_clean_machine_is_fine(tmp_path: Path) -> None:
    assert check(tmp_path).verdict is HealthVerdict.PASS


def test_shared_memory_of_dead_workers_is_reported(tmp_path: Path, shm: Path) -> None:
    for name in ("torch_1_2", "nccl-mapped", "nccl-opened", "of-another-program"):
        (shm / name).write_bytes(b"x" * 4)
    process_dir = tmp_path / "proc/50"
    (process_dir / "fd").mkdir(parents=True)
    (process_dir / "maps").write_text("7f00-7f01 rw-s 00000000 00:19 3    /dev/shm/nccl-mapped\n")
    (process_dir / "fd/3").symlink_to("/dev/shm/nccl-opened")
    finding = check(tmp_path)
    assert finding.verdict is HealthVerdict.WARN
    assert finding.values == {"num_files": 1, "size_bytes": 4}
    assert "torch_1_2" in finding.reason


@pytest.mark.parametrize(("idle_s", "verdict"), [(60, HealthVerdict.PASS), (7200, HealthVerdict.WARN)])
def test_in_memory_checkpoints_are_reported_when_no_run_changes_them(
    tmp_path: Path, shm: Path, idle_s: float, verdict: HealthVerdict
) -> None:
    directory = shm / "phalanx-in-memory-0-abc-0"
    directory.mkdir()
    (directory / "shard").write_bytes(b"x" * 4)
    os.utime(directory, (time.time() - idle_s,) * 2)
    assert check(tmp_path).verdict is verdict


def test_shared_memory_that_this_process_has_open_is_in_use(tmp_path: Path) -> None:
    """Its list of open files names the descriptor by which the list is read, which is closed when it is looked at."""
    context = CheckContext(tmp_path, tmp_path, tmp_path)
    with NamedTemporaryFile(dir="/dev/shm", prefix="torch_") as file:
        assert Path(file.name).name not in host.find_abandoned_shm(context)
