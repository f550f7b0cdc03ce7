"""Replicas that are sharded sum their gradients once a step, whatever each micro-batch uses of the model."""

from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from phalanx.errors import RecipeError
from phalanx.recipe.schema import Layout
from phalanx.train.gradients import DividedGradients
from phalanx.train.parallel.mesh import build_mesh
from phalanx.train.parallel.parallelize import Choices, divide
from phalanx.train.place import Place
from worlds import World

MICRO_BATCHES = 16


class Block(nn.Module):
    """Two layers of one size, of which a forward uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, number: int, both: bool) -> Tensor:
        x = x + torch.tanh(self.even(x)) if both or number % 2 == 0 else x
        return x + torch.tanh(self.odd(x)) if both or number % 2 else x


class Model(nn.Module):
    """What a micro-batch uses depends on its number, where `varied`: the first block not in the last one."""

    def __init__(self, varied: bool):
        super().__init__()
        self.varied = varied
        self.first = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, leaf: int) -> Tensor:
        number = leaf % (MICRO_BATCHES // 4)
        x = self.first(torch.randn(5, 3, generator=torch.Generator().manual_seed(leaf)))
        for index, block in enumerate(self.blocks):
            if not self.varied or number in ((0, 1), (2, 3), (1, 3))[index]:
                x = block(x, number, not self.varied)
        return x.square().sum()


def summed(rank: int, world: int, *, varied: bool) -> dict[str, Any]:
    """The gradients of two steps, and how often replicas were summed in each."""
    layout = Layout(replicate=2, shard=2)
    mesh = build_mesh(layout, Place(rank, world, rank))
    torch.manual_seed(0)
    model, plain = Model(varied), Model(varied)
    plain.load_state_dict(model.state_dict())
    divided, _ = divide(model, model, mesh, Choices())
    own = mesh.own(MICRO_BATCHES)
    gradients = DividedGradients(divided, None, last=own[-1])
    sums: list[int] = []
    all_reduce = dist.all_reduce

    def counting(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        sums[-1] += dist.get_world_size(options.get("group")) == 2
        return all_reduce(tensor, *arguments, **options)

    for leaf in range(MICRO_BATCHES):
        plain(leaf).backward()
    expected = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in plain.named_parameters()}
    differ: list[str] = []
    for _ in range(2):
        sums.append(0)
        model.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", counting)
            for leaf in own:
                gradients.begin(leaf)
                model(leaf).backward()
                gradients.end()
            gradients.finish()
        for name, parameter in model.named_parameters():
            whole = parameter.grad.full_tensor()  # type: ignore[union-attr]
            if not torch.allclose(whole, expected[name], rtol=1e-5, atol=1e-6):
                differ.append(name)
    groups = sum(isinstance(module, FSDPModule) for module in model.modules())
    return {"differ": differ, "sums": sums, "groups": groups}


@pytest.mark.parametrize("varied", [False, True], ids=["the same in each", "something else in each"])
def test_sums_over_replicas_travel_once_a_step(world: World, varied: bool) -> None:
    for found in world.run(4, summed, varied=varied):
        assert found["differ"] == []
        assert found["sums"] == [found["groups"]] * 2
        assert found["groups"] == 4


class Writing(Model):
    """A model whose forward bounds a weight before it is used."""

    def forward(self, leaf: int) -> Tensor:
        self.first.weight.data.clamp_(-0.01, 0.01)
        return super().forward(leaf)


def written(rank: int, world: int) -> list[str]:
    """What is said of models whose forwards write to a parameter of the root, in evaluation and in training, and of one
    that does not, with state in a buffer."""
    said = []
    for build in (Writing, Model):
        mesh = build_mesh(Layout(shard=2), Place(rank, world, rank))
        model = build(False)
        divide(model, model, mesh, Choices())
        for training in (False, True, True):
            model.train(training)
            try:
                model(1).backward()
            except RecipeError as error:
                said.append(f"{training}: {error}")
                break
    return said


def test_a_forward_that_writes_to_a_sharded_parameter_is_refused_at_once(world: World) -> None:
    for said in world.run(2, written):
        (one,) = said
        assert one.startswith("True: layout.shard: the forward of the model changes parameter 'first.weight'")


def connections_of_layouts(rank: int, world: int, *, layouts: list[dict[str, int]]) -> list[int]:
    """Connections that this worker opens for the groups of each layout."""
    found = []
    for layout in layouts:
        before = connections()
        mesh = build_mesh(Layout(**layout), Place(rank, world, rank))
        dist.barrier()
        found.append(len(connections() - before))
        assert mesh.fsdp is not None
        for each in (mesh.fsdp, mesh.expert_fsdp):
            if each is not None:
                own = each.get_coordinate()
                assert own is not None
                assert int(each.mesh[tuple(own)]) == rank
    return found


def connections() -> set[int]:
    """Those of this process, by descriptor."""
    found = psutil.Process().net_connections("tcp")
    return {each.fd for each in found if each.status == psutil.CONN_ESTABLISHED}


def test_sharding_takes_the_groups_that_there_are_instead_of_connecting_again(world: World) -> None:
    layouts = [{"shard": 4}, {"replicate": 2, "shard": 2}, {"shard": 2, "context": 2, "expert": 2}]
    shard, replicate, context, owners, expert, same = 3, 1, 1, 3, 1, 1
    expected = [shard, replicate + replicate, context + context + owners + expert + same]
    assert world.run(4, connections_of_layouts, layouts=layouts) == [expected] * 4
