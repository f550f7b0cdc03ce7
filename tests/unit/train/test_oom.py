"""Out of memory is told as the micro-batch that would fit."""

import pytest
import torch

from phalanx.errors import RecipeError
from phalanx.train.distributed.oom import (
    OutOfMemory,
    explain_out_of_memory,
    find_fitting_micro_size,
    format_oom_advice,
    is_out_of_memory,
)

PLAN = {"trainable_parameters": 1_000_000, "activation_bytes_per_sample": 1_000_000}


def test_what_fits_is_the_memory_beside_the_training_state_by_the_bytes_of_a_sample() -> None:
    assert find_fitting_micro_size(PLAN, 16_000_000 + 5_900_000) == 5


def test_nothing_fits_beside_a_model_that_is_too_large() -> None:
    assert find_fitting_micro_size(PLAN, 1000) == 0


@pytest.mark.parametrize("plan", [None, {}, {"trainable_parameters": 1, "activation_bytes_per_sample": 0}])
def test_a_plan_that_does_not_tell_gives_no_number(plan: dict[str, int] | None) -> None:
    assert find_fitting_micro_size(plan, 10**9) is None


def test_advice_names_the_largest_micro_batch_that_the_plan_predicts_to_fit() -> None:
    assert format_oom_advice(64, PLAN, 16_000_000 + 9_000_000).endswith("; 8 would fit: batch.micro_size=8")


def test_advice_is_half_of_what_failed_when_the_plan_says_that_it_would_have_fitted() -> None:
    assert format_oom_advice(16, PLAN, 10**12).endswith("; 8 would fit: batch.micro_size=8")


def test_advice_without_a_plan_is_half_of_what_failed() -> None:
    assert format_oom_advice(16, None, 0).endswith("batch.micro_size=8")


@pytest.mark.parametrize(("micro", "advised"), [(10, 5), (6, 3), (15, 5), (7, 1), (9, 3)])
def test_advice_divides_what_was_given_so_that_the_recipe_takes_it(micro: int, advised: int) -> None:
    assert format_oom_advice(micro, None, 0).endswith(f"batch.micro_size={advised}")


def test_with_a_single_sample_there_is_nothing_smaller() -> None:
    text = format_oom_advice(1, PLAN, 10**12)
    assert text.startswith("batch.micro_size: out of memory with micro-batches of 1; not even one sample fits")
    assert "use a smaller model or sequence" in text


def test_a_failed_allocation_becomes_an_error_of_the_recipe() -> None:
    with pytest.raises(RecipeError, match="out of memory with micro-batches of 8"), explain_out_of_memory(8, None):
        torch.empty(2**48)


def test_a_devices_own_error_becomes_an_error_of_the_recipe() -> None:
    with pytest.raises(OutOfMemory, match=r"batch.micro_size=4"), explain_out_of_memory(8, None):
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_running_out_of_memory_is_recognised(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_any_other_error_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes do not match"), explain_out_of_memory(8, None):
        raise RuntimeError("shapes do not match")


def test_a_library_of_a_gpu_that_cannot_allocate_is_out_of_memory() -> None:
    words = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert is_out_of_memory(RuntimeError(words))


@pytest.mark.parametrize(
    ("error", "micro"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), 4),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), 4),
        (RuntimeError("CUDA driver error: out of memory"), 4),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes"), 32),
        (MemoryError(), 32),
    ],
)
def test_advice_is_for_the_memory_that_ran_out_the_gpus_or_the_hosts(
    error: Exception, micro: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gpu:
        @staticmethod
        def mem_get_info() -> tuple[int, int]:
            return 0, 22_500_000

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", Gpu)
    with pytest.raises(OutOfMemory, match=rf"; {micro} would fit"), explain_out_of_memory(64, PLAN):
        raise error
