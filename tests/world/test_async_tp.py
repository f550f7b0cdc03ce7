"""Products that travel in chunks while they are computed, on 2 and 3 ranks, against a product and then a sum."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phalanx.train.distributed.async_tp import ASYNC_TP_CHUNKS, can_chunk, linear_reduce_scatter
from phalanx.train.ops.collectives import reduce_scatter_to_group
from process_worlds import ProcessWorlds

BATCH, INPUTS, OUTPUTS = 3, 5, 7


def compared(rank: int, world: int, *, low: bool = False, frozen: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Output and gradients in chunks, each beside what comes out without."""
    group: Any = dist.group.WORLD
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(BATCH, 2 * ASYNC_TP_CHUNKS * world, INPUTS, generator=generator)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator)
    upstream = torch.randn(BATCH, 2 * ASYNC_TP_CHUNKS, OUTPUTS, generator=generator)
    assert can_chunk(x, group)
    results = []
    for overlapping in (True, False):
        inputs, matrix = x.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            if overlapping:
                out = linear_reduce_scatter(inputs, matrix, group)
            else:
                out = reduce_scatter_to_group(F.linear(inputs, matrix), group, 1)
        out.backward(upstream.to(out.dtype))
        results.append([one for one in (out.detach(), inputs.grad, matrix.grad) if one is not None])
    return list(zip(*results, strict=True))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
def test_output_and_gradients_are_those_of_a_product_and_a_sum(world: ProcessWorlds, ranks: int, low: bool) -> None:
    for pairs in world.run(ranks, compared, low=low):
        assert len(pairs) == 3
        for found, expected in pairs:
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, rtol=1e-2 if low else 1e-6, atol=1e-1 if low else 1e-5)


def test_a_frozen_weight_gets_no_gradient(world: ProcessWorlds) -> None:
    for pairs in world.run(2, compared, frozen=True):
        assert len(pairs) == 2


def too_short(rank: int, world: int) -> bool:
    group: Any = dist.group.WORLD
    return can_chunk(torch.zeros(1, world * ASYNC_TP_CHUNKS - 1, 4), group)


def test_a_sequence_that_cannot_be_cut_so_is_known(world: ProcessWorlds) -> None:
    assert world.run(2, too_short) == [False, False]
