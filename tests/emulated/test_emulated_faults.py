"""What a run does when its GPU fails: errors that the emulated CUDA runtime gives as planned."""

import pytest
import torch

from phalanx.errors import ExitCode
from phalanx.run.event_types import RunWarning, WorkerFailure
from train_harness import TrainHarness, Values, plan_fault

if not torch.version.cuda:
    pytest.skip("needs torch's CUDA build: make test-emulated", allow_module_level=True)

ILLEGAL_ADDRESS, ECC, OUT_OF_MEMORY = 700, 214, 2
SHORT: Values = {
    "steps": 6,
    "checkpoint": {"every": 3},
    "evaluation": {"every": 6},
    "memory": {"activation_checkpointing": "none", "chunked_loss": False},
}


@pytest.mark.parametrize(
    ("error", "what", "detail"),
    [
        (ILLEGAL_ADDRESS, "exit 1", "exit code 1: AcceleratorError: CUDA error: an illegal memory access"),
        (ECC, "gpu failed", "ended because its GPU failed: AcceleratorError: CUDA error: uncorrectable ECC error"),
    ],
)
def test_a_gpu_that_fails_in_a_step_is_named_and_the_run_goes_on_to_the_same_bits(
    gpus: TrainHarness, error: int, what: str, detail: str
) -> None:
    ended = gpus.train(SHORT, faults=[plan_fault(4, "gpu", error=error, calls=7)])
    (event,) = ended.events_of_kind(WorkerFailure)
    assert event.what == what
    assert detail in event.message
    assert "CUDA_LAUNCH_BLOCKING" not in event.message
    assert ended.digest == gpus.train_reference(SHORT).digest


def test_a_gpu_that_fails_in_every_attempt_makes_the_node_unfit(gpus: TrainHarness) -> None:
    changes: Values = {**SHORT, "fault_tolerance": {"max_restarts": 2}}
    ended = gpus.train(changes, faults=[plan_fault(1, "gpu", error=ECC, attempt=None)])
    assert ended.code == ExitCode.UNFIT_NODE
    assert ended.message is not None
    assert ended.message.endswith("no progress in 2 attempts: train on another machine, or reset the GPU")


LONG: Values = {"data": {"source": {"text": "many.txt"}, "seq_len": 128}}
"""Activations of 12 samples take more than what the allocator holds for small tensors."""


def test_a_micro_batch_without_memory_is_the_recipes_fault_and_a_smaller_one_is_named(gpus: TrainHarness) -> None:
    changes: Values = {**SHORT, **LONG, "batch": {"micro_size": 12}}
    ended = gpus.train(changes, faults=[plan_fault(0, "gpu", error=OUT_OF_MEMORY, when="start")])
    assert ended.code == ExitCode.RECIPE
    assert ended.message is not None
    assert ended.message.startswith("batch.micro_size: out of memory with micro-batches of 12; use batch.micro_size=6")


def test_a_run_that_chose_its_micro_batch_goes_on_with_a_smaller_one(gpus: TrainHarness) -> None:
    changes: Values = {**SHORT, **LONG, "batch": {"micro_size": "auto"}}
    ended = gpus.train(changes, faults=[plan_fault(0, "gpu", error=OUT_OF_MEMORY, when="start")])
    assert ended.digest
    assert any("restarting with micro-batches of" in event.text for event in ended.events_of_kind(RunWarning))


def test_a_gpu_that_fails_before_a_run_begins_is_told_in_a_sentence(gpus: TrainHarness) -> None:
    """In the trials of a model that has not been tried yet, as the environment plans it."""
    recipe = gpus.recipe_file({**SHORT, "model": {"args": {"layers": 1, "hidden_size": 48, "num_heads": 2}}})
    variables = {"NULLGPU_FAIL": f"{ECC},3"}
    with gpus.start("train", recipe, "--run", gpus.new_run().path, variables=variables) as process:
        _, errors = process.communicate(timeout=200)
    assert process.returncode == ExitCode.UNFIT_NODE
    assert "error: a GPU of this machine failed: AcceleratorError: CUDA error: uncorrectable ECC error" in errors
    assert "Traceback" not in errors
