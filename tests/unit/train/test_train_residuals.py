"""What workers have not sent yet moves between worlds of any size without being lost."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from phalanx.recipe.schema import Parallelism
from phalanx.train.checkpoint import Manifest
from phalanx.train.parallel.divided import Divided
from phalanx.train.parallel.mesh import Mesh, coordinates
from phalanx.train.residuals import BASIS, PREFIX, Residuals


def residuals(rank: int, world: int) -> Residuals:
    layout = Parallelism(replicate=world)
    model = nn.Linear(3, 2, bias=False)
    divided = Divided(Mesh(layout, coordinates(layout, rank)), (model,))
    basis = torch.full((3, 1), float(rank))
    return Residuals.of(divided, {model.weight: torch.full((2, 3), float(10**rank))}, {model.weight: basis})


def saved(world: int) -> torch.Tensor:
    """The logical tensor of a checkpoint."""
    whole = torch.full((world, 2, 3), torch.nan)
    for rank in range(world):
        held = residuals(rank, world).held()[PREFIX + "weight"]
        assert held.holding.shape == (world, 2, 3)
        for block in held.holding.blocks:
            place = tuple(slice(at, at + n) for at, n in zip(block.offset, block.extent, strict=True))
            whole[place] = block.of(held.tensor)
    return whole


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (4, 2), (3, 2), (2, 3), (1, 4)])
def test_their_sum_stays_in_a_world_of_another_size(before: int, after: int) -> None:
    whole = saved(before)
    manifest = cast(Manifest, SimpleNamespace(tensors={PREFIX + "weight": SimpleNamespace(shape=whole.shape)}))
    found = []
    for rank in range(after):
        mine = residuals(rank, after)
        wanted, settle = mine.wanted(manifest)
        for key, offset, tensor in wanted:
            assert key == PREFIX + "weight"
            tensor.copy_(whole[tuple(slice(at, at + n) for at, n in zip(offset, tensor.shape, strict=True))])
        settle()
        found.append(mine.tensors["weight"].clone())
    assert torch.stack(found).sum(0).equal(whole.sum(0))
    if before == after:
        assert torch.stack(found).equal(whole)


def test_a_checkpoint_that_has_none_leaves_none() -> None:
    mine = residuals(0, 2)
    wanted, settle = mine.wanted(cast(Manifest, SimpleNamespace(tensors={})))
    assert wanted == []
    settle()
    assert not cast(Any, mine.tensors["weight"]).any()


@pytest.mark.parametrize(("shape", "expected"), [((3, 1), 7.0), ((3, 2), 1.0)])
def test_a_basis_is_taken_over_where_it_is_of_the_same_rank(shape: tuple[int, int], expected: float) -> None:
    mine = residuals(1, 2)
    manifest = cast(Manifest, SimpleNamespace(tensors={BASIS + "weight": SimpleNamespace(shape=shape)}))
    wanted, settle = mine.wanted(manifest)
    for key, offset, tensor in wanted:
        assert (key, offset) == (BASIS + "weight", (0, 0))
        tensor.fill_(7.0)
    settle()
    assert mine.bases["weight"].tolist() == [[expected]] * 3
    assert mine.held()[BASIS + "weight"].holding.shape == (3, 1)


class Now:
    """Holds something back when it is asked to."""

    def __init__(self, weight: nn.Parameter):
        self.weight, self.found = weight, cast(dict[nn.Parameter, torch.Tensor], {})

    def residuals(self) -> dict[nn.Parameter, torch.Tensor]:
        return self.found

    def hold_back(self) -> None:
        self.found = {self.weight: torch.zeros(2, 3)}


@pytest.mark.parametrize("has", [True, False])
def test_room_is_made_for_those_of_a_checkpoint_only(has: bool) -> None:
    layout, model = Parallelism(replicate=2), nn.Linear(3, 2, bias=False)
    holder = Now(model.weight)
    mine = Residuals.held_by(Divided(Mesh(layout, coordinates(layout, 0)), (model,)), holder)
    assert mine.held() == {}
    tensors = {PREFIX + "weight": SimpleNamespace(shape=(2, 2, 3))} if has else {}
    wanted, settle = mine.wanted(cast(Manifest, SimpleNamespace(tensors=tensors)))
    assert len(wanted) == has
    assert mine.held() == {}
    settle()
    assert set(mine.held()) == ({PREFIX + "weight"} if has else set())
