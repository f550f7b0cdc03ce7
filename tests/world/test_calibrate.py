"""What gives a probe its processes: a real fork server, worlds below it, a checkpoint, and a Ctrl-C in the middle."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from phalanx.app.calibrate import SCRATCH_PREFIX, call_in_subprocess, call_on_ranks, create_scratch_dir
from phalanx.cluster.calibration.runner import MeasurementFailed
from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.agent.fork_server_client import ForkServerClient
from train_harness import TrainHarness, wait_until


@pytest.fixture
def fork_server(lab: TrainHarness) -> ForkServerClient:
    return lab.fork_server


SMALL = {"sizes": [65536], "kinds": ["add"], "shapes": [(64, 64, 64, "nt")]}
ASKED = {"device": "cpu", "threads": 1, "quick": True, "seconds": 5.0, "memory_bytes": 2**34, "processes": 2}


def test_worlds_measure_together_one_after_the_other(fork_server: ForkServerClient, tmp_path: Path) -> None:
    payload = {**ASKED, **SMALL, "seconds": 0.2}
    for _ in range(2):
        value = call_on_ranks(
            fork_server, tmp_path, "phalanx.cluster.calibration.collectives:measure_concurrently", payload, 2
        )
        assert value["collectives"][0]["backend"] == "gloo"
        assert value["products"][0]["processes"] == 2


def test_a_member_that_fails_ends_the_others(fork_server: ForkServerClient, tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(MeasurementFailed, match=r"worker [01] ended with exit code 1: .*has no attribute 'nothing'"):
        call_on_ranks(fork_server, tmp_path, "phalanx.cluster.calibration.collectives:nothing", {"seconds": 1.0}, 2)
    assert time.monotonic() - begun < 30


def test_a_function_that_fails_is_not_measured(fork_server: ForkServerClient) -> None:
    with pytest.raises(MeasurementFailed, match="KeyError"):
        call_in_subprocess(fork_server, "phalanx.cluster.calibration.gemm:measure_gemms", {})


def test_a_folder_of_our_own_is_removed_whatever_happens(tmp_path: Path) -> None:
    def interrupted() -> None:
        with create_scratch_dir(tmp_path) as scratch:
            (scratch / "file").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--dir .*not writable"), create_scratch_dir(tmp_path / "nowhere"):
        pass


def test_an_interrupted_probe_leaves_nothing(tmp_path: Path) -> None:
    out, folder = tmp_path / "cluster.yaml", tmp_path / "folder"
    folder.mkdir()
    command = [sys.executable, "-m", "phalanx", "calibrate", "--quick", "--out", str(out), "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: list(folder.glob(f"{SCRATCH_PREFIX}*")), 60)
    below = psutil.Process(process.pid)
    wait_until(lambda: len(below.children(recursive=True)) > 1, 60, "a measurement below the fork server")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == ExitCode.UNFINISHED
    assert errors == "error: interrupted\n"
    assert list(folder.iterdir()) == []
    assert not out.exists()
