"""Norms of long tensors."""

import pytest
import torch

from phalanx.train.distributed.dtensor_utils import FP32_ROW_ELEMENTS, total_norm


def drawn(*sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in sizes]


@pytest.mark.parametrize(
    "sizes", [(3,), (FP32_ROW_ELEMENTS,), (FP32_ROW_ELEMENTS + 1,), (5, 3 * FP32_ROW_ELEMENTS, 7), (2_000_000,)]
)
def test_it_is_right_to_seven_digits(sizes: tuple[int, ...]) -> None:
    tensors = drawn(*sizes)
    exact = torch.cat(tensors).double().norm()
    assert abs(total_norm(tensors) - exact) / exact < 1e-7


def test_the_shape_of_the_tensors_does_not_matter() -> None:
    (flat,) = drawn(4 * FP32_ROW_ELEMENTS)
    exact = flat.double().norm()
    for shaped in (flat.view(4, -1), flat.view(2, 8, 4, -1).permute(0, 3, 1, 2)):
        assert abs(total_norm([shaped]) - exact) / exact < 1e-7


def test_what_is_not_finite_stays_so() -> None:
    (tensor,) = drawn(2 * FP32_ROW_ELEMENTS)
    tensor[FP32_ROW_ELEMENTS + 5] = float("inf")
    assert total_norm([tensor]).isinf()
    tensor[3] = float("nan")
    assert total_norm([tensor]).isnan()
