"""What workers have not sent yet is restored in a world of the same size."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from phalanx.recipe.schema import Parallelism
from phalanx.train.checkpoint.format import CheckpointManifest
from phalanx.train.distributed.mesh import Mesh, rank_coordinates
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.grad_sync.error_feedback import BASIS_PREFIX, RESIDUAL_PREFIX, ErrorFeedbackState


def residuals(rank: int, world: int) -> ErrorFeedbackState:
    layout = Parallelism(replicate=world)
    model = nn.Linear(3, 2, bias=False)
    divided = ParallelModel(Mesh(layout, rank_coordinates(layout, rank)), (model,))
    basis = torch.full((3, 1), float(rank))
    return ErrorFeedbackState.from_residuals(
        divided, {model.weight: torch.full((2, 3), float(10**rank))}, {model.weight: basis}
    )


def saved(world: int) -> torch.Tensor:
    """The logical tensor of a checkpoint."""
    whole = torch.full((world, 2, 3), torch.nan)
    for rank in range(world):
        held = residuals(rank, world).local_tensors()[RESIDUAL_PREFIX + "weight"]
        assert held.global_blocks.global_shape == (world, 2, 3)
        for block in held.global_blocks.blocks:
            place = tuple(slice(at, at + n) for at, n in zip(block.global_offset, block.extent, strict=True))
            whole[place] = block.slice_local(held.tensor)
    return whole


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (2, 3)])
def test_they_are_restored_in_a_world_of_the_same_size_and_zeros_in_another(before: int, after: int) -> None:
    whole = saved(before)
    manifest = cast(
        CheckpointManifest, SimpleNamespace(tensors={RESIDUAL_PREFIX + "weight": SimpleNamespace(shape=whole.shape)})
    )
    found = []
    for rank in range(after):
        mine = residuals(rank, after)
        wanted, settle = mine.make_load_plan(manifest)
        for key, offset, tensor in wanted:
            assert key == RESIDUAL_PREFIX + "weight"
            tensor.copy_(whole[tuple(slice(at, at + n) for at, n in zip(offset, tensor.shape, strict=True))])
        settle()
        found.append(mine.residuals["weight"].clone())
    assert torch.stack(found).equal(whole if before == after else torch.zeros(after, 2, 3))


def test_a_checkpoint_that_has_none_leaves_none() -> None:
    mine = residuals(0, 2)
    wanted, settle = mine.make_load_plan(cast(CheckpointManifest, SimpleNamespace(tensors={})))
    assert wanted == []
    settle()
    assert not cast(Any, mine.residuals["weight"]).any()


@pytest.mark.parametrize(("shape", "expected"), [((3, 1), 7.0), ((3, 2), 1.0)])
def test_a_basis_is_taken_over_where_it_is_of_the_same_rank(shape: tuple[int, int], expected: float) -> None:
    mine = residuals(1, 2)
    manifest = cast(
        CheckpointManifest, SimpleNamespace(tensors={BASIS_PREFIX + "weight": SimpleNamespace(shape=shape)})
    )
    wanted, settle = mine.make_load_plan(manifest)
    for key, offset, tensor in wanted:
        assert (key, offset) == (BASIS_PREFIX + "weight", (0, 0))
        tensor.fill_(7.0)
    settle()
    assert mine.projection_bases["weight"].tolist() == [[expected]] * 3
    assert mine.local_tensors()[BASIS_PREFIX + "weight"].global_blocks.global_shape == (3, 1)
