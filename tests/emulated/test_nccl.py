"""What a run on several GPUs does when one of them dies, stops or fails within a collective, over an emulated NCCL."""

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.errors import ExitCode
from phalanx.run.event_types import AttemptStarted, WorkerFailure
from train_harness import TrainHarness, Values, list_live_workers, plan_fault

if not torch.version.cuda:
    pytest.skip("needs torch's CUDA build: make test-emulated", allow_module_level=True)

from emulator import build, environment

SHORT: Values = {
    "steps": 6,
    "checkpoint": {"every": 3},
    "evaluation": {"every": 6},
    "memory": {"activation_checkpointing": "none", "chunked_loss": False},
}
NVLINK, OUT_OF_MEMORY = 220, 2
SOON = 40.0
"""Seconds between any two events of a run, on a machine that does other things as well."""


def in_a_collective(number: signal.Signals, rank: int) -> Values:
    """A signal to a worker that is in the middle of the second collective after step 4."""
    return plan_fault(4, "collective", signal=int(number), calls=1, ranks=[rank])


@pytest.mark.parametrize(
    ("world", "planned", "what"),
    [
        pytest.param(2, in_a_collective(signal.SIGKILL, 1), "SIGKILL", id="killed, of 2"),
        pytest.param(3, in_a_collective(signal.SIGKILL, 0), "SIGKILL", id="killed, of 3", marks=pytest.mark.slow),
        pytest.param(3, in_a_collective(signal.SIGSTOP, 1), "hang", id="stopped, of 3", marks=pytest.mark.slow),
        pytest.param(
            2,
            plan_fault(4, "gpu", error=NVLINK, calls=7, ranks=[1]),
            "gpu failed",
            id="a GPU that failed, of 2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            plan_fault(4, "raise", ranks=[1]),
            "exit 1",
            id="an exception of the user's code, of 2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_whose_worker_falls_in_a_collective_goes_on_soon_and_to_the_same_bits(
    gpus: TrainHarness, world: int, planned: Values, what: str
) -> None:
    expected = gpus.train_reference(SHORT, world)
    ended = gpus.train(SHORT, world, faults=[planned])
    (event,) = ended.events_of_kind(WorkerFailure)
    assert (event.rank, event.what) == (planned["ranks"][0], what)
    assert ended.result["num_restarts"] == 1
    assert ended.digest == expected.digest
    assert ended.losses == expected.losses
    assert max(after.time - before.time for before, after in pairwise(ended.events)) < SOON
    assert not list_live_workers(ended)


@pytest.mark.slow
def test_a_replica_that_is_lost_restarts_the_attempt_from_the_checkpoint(gpus: TrainHarness) -> None:
    changes: Values = {**SHORT, "determinism": "elastic"}
    ended = gpus.train(changes, 2, faults=[in_a_collective(signal.SIGKILL, 1)])
    assert [(event.start_step, event.world_size) for event in ended.events_of_kind(AttemptStarted)] == [(0, 2), (3, 2)]
    assert ended.digest == gpus.train_reference(changes, 1).digest


@pytest.mark.slow
def test_one_gpu_of_two_without_memory_ends_the_run_soon(gpus: TrainHarness) -> None:
    """The other one waits in a collective that will not come."""
    changes: Values = {**SHORT, "data": {"source": {"text": "many.txt"}, "seq_len": 128}, "batch": {"micro_size": 6}}
    planned = plan_fault(0, "gpu", error=OUT_OF_MEMORY, when="start", ranks=[1])
    ended = gpus.train(changes, 2, faults=[planned])
    assert ended.code == ExitCode.RECIPE
    assert ended.message is not None
    assert ended.message.startswith("batch.micro_size: out of memory with micro-batches of 6; use batch.micro_size=3")
    assert max(after.time - before.time for before, after in pairwise(ended.events)) < SOON


def peers(case: str, **variables: str) -> tuple[list[dict[str, Any]], str]:
    """How the processes of `peers.py` that did not fall ended and what they saw; and what torch printed."""
    emulated = {**environment(build(), host=True), "NULLGPU_COUNT": "3", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    command = [sys.executable, str(Path(__file__).with_name("peers.py")), case]
    env = {**os.environ, **emulated, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500", **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found, done.stderr


def test_collectives_of_the_emulated_nccl_compute() -> None:
    found, errors = peers("numbers")
    assert [each["end"] for each in found] == [0, 0, 0], errors[-3000:]
    said = [each["said"] for each in found]
    for rank, mine in enumerate(said):
        for dtype in ("float32", "float64", "bfloat16", "float16", "int64", "uint8"):
            assert mine[f"torch.{dtype}"] == [6] * 6
        assert [mine[name] for name in ("AVG", "MAX", "MIN", "PRODUCT")] == [2, 3, 1, 6]
        assert mine["broadcast"] == 1
        assert mine["gathered"] == [0, 0, 1, 1, 2, 2]
        assert mine["scattered"] == [3 * rank + 3] * 2
        assert mine["swapped"] == [rank, 10 + rank, 20 + rank]
        assert mine["came"] == [(rank - 1) % 3] * 2
    assert said[2]["reduce"] == 6
    assert (said[0]["pair"], said[2]["pair"]) == (4, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "silent", "noticed"), [("killed", False, True), ("killed", True, False), ("stopped", False, False)]
)
def test_a_collective_whose_peer_fell_waits_until_it_is_aborted(case: str, silent: bool, noticed: bool) -> None:
    """Over a network a death is noticed, and still the GPU waits. NVLink tells of none, and nothing of a stop."""
    found, errors = peers(case, **({"NULLNCCL_SILENT": "1"} if silent else {}))
    for each in found:
        assert each["end"] == 0, errors[-3000:]
        assert each["said"]["host"] < 1
        assert each["said"]["ended"] is noticed
        assert not each["said"]["through"]
        assert each["said"]["abort"] < 5
    assert ("ncclRemoteError" in errors) is noticed


@pytest.mark.slow
def test_torchs_watchdog_ends_a_worker_whose_collective_takes_too_long() -> None:
    found, errors = peers("watched")
    assert [each["end"] for each in found] == [-signal.SIGABRT] * 2
    assert "Watchdog caught collective operation timeout" in errors
