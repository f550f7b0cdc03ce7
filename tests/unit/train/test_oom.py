"""Out of memory is reported with a smaller micro-batch."""

import pytest
import torch

from phalanx.errors import RecipeError
from phalanx.train.distributed.failures import (
    explain_out_of_memory,
    format_oom_advice,
    is_out_of_memory,
)


@pytest.mark.parametrize(("micro", "advised"), [(16, 8), (10, 5), (6, 3), (15, 5), (7, 1), (9, 3)])
def test_advice_divides_what_was_given_so_that_the_recipe_takes_it(micro: int, advised: int) -> None:
    assert format_oom_advice(micro).endswith(f"batch.micro_size={advised}")


def test_with_a_single_sample_there_is_nothing_smaller() -> None:
    text = format_oom_advice(1)
    assert text.startswith("batch.micro_size: out of memory with micro-batches of 1; not even one sample fits")
    assert "use a smaller model or sequence" in text


def test_a_failed_allocation_becomes_an_error_of_the_recipe() -> None:
    with pytest.raises(RecipeError, match="out of memory with micro-batches of 8"), explain_out_of_memory(8):
        torch.empty(2**48)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_running_out_of_memory_is_recognised(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_any_other_error_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes do not match"), explain_out_of_memory(8):
        raise RuntimeError("shapes do not match")
