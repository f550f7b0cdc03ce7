"""What a run on several GPUs does when one of them dies, stops or fails within a collective, over an emulated NCCL."""

import signal
from itertools import pairwise

import pytest
import torch

from lab import Lab, Values, alive, fault
from phalanx.errors import ExitCode

if not torch.version.cuda:
    pytest.skip("needs torch's CUDA build: make test-emulated", allow_module_level=True)

SHORT: Values = {
    "steps": 6,
    "checkpoint": {"every": 3},
    "evaluate": {"every": 6},
    "memory": {"recompute": "none", "loss": "whole"},
}
NVLINK, OUT_OF_MEMORY = 220, 2
SOON = 40.0
"""Seconds between any two events of a run, on a machine that does other things as well."""


def in_a_collective(number: signal.Signals, rank: int) -> Values:
    """A signal to a worker that is in the middle of the second collective after step 4."""
    return fault(4, "collective", signal=int(number), calls=1, ranks=[rank])


@pytest.mark.parametrize(
    ("world", "planned", "what"),
    [
        pytest.param(2, in_a_collective(signal.SIGKILL, 1), "SIGKILL", id="killed, of 2"),
        pytest.param(3, in_a_collective(signal.SIGKILL, 0), "SIGKILL", id="killed, of 3"),
        pytest.param(3, in_a_collective(signal.SIGSTOP, 1), "hang", id="stopped, of 3"),
        pytest.param(2, fault(4, "gpu", error=NVLINK, calls=7, ranks=[1]), "gpu", id="a GPU that failed, of 2"),
        pytest.param(2, fault(4, "raise", ranks=[1]), "exit 1", id="an exception of the user's code, of 2"),
    ],
)
def test_a_run_whose_worker_falls_in_a_collective_goes_on_soon_and_to_the_same_bits(
    gpus: Lab, world: int, planned: Values, what: str
) -> None:
    expected = gpus.reference(SHORT, world)
    ended = gpus.train(SHORT, world, faults=[planned])
    (event,) = ended.kind("fault")
    assert (event["rank"], event["what"]) == (planned["ranks"][0], what)
    assert ended.result["restarts"] == 1
    assert ended.digest == expected.digest
    assert ended.losses == expected.losses
    assert max(after["t"] - before["t"] for before, after in pairwise(ended.events)) < SOON
    assert not alive(ended)


def test_a_replica_that_is_lost_restarts_the_attempt_from_the_checkpoint(gpus: Lab) -> None:
    """On CPUs the others would go on from memory; NCCL's communicators cannot be left while a peer is gone."""
    changes: Values = {**SHORT, "exchange": {"exact": "replicas"}}
    ended = gpus.train(changes, 2, faults=[in_a_collective(signal.SIGKILL, 1)])
    assert [(event["from_step"], event["world"]) for event in ended.kind("start")] == [(0, 2), (3, 2)]
    assert ended.digest == gpus.reference(changes, 1).digest


def test_one_gpu_of_two_without_memory_ends_the_run_soon(gpus: Lab) -> None:
    """The other one waits in a collective that will not come."""
    changes: Values = {**SHORT, "data": {"source": {"text": "many.txt"}, "sequence": 128}, "batch": {"micro": 6}}
    planned = fault(0, "gpu", error=OUT_OF_MEMORY, when="start", ranks=[1])
    ended = gpus.train(changes, 2, faults=[planned])
    assert ended.code == ExitCode.RECIPE
    assert ended.message is not None
    assert ended.message.startswith("batch.micro: out of memory with micro-batches of 6; 3 would fit")
    assert max(after["t"] - before["t"] for before, after in pairwise(ended.events)) < SOON
