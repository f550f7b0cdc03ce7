"""Replicas that are sharded sum their gradients once a step, whatever each micro-batch uses of the model."""

import contextlib
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from phalanx.recipe.schema import Parallelism
from phalanx.train.distributed import fsdp
from phalanx.train.distributed import mesh as mesh_module
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.fsdp import REDUCES_UNUSED
from phalanx.train.distributed.mesh import Mesh, build_mesh
from phalanx.train.distributed.parallelize import ParallelConfig, parallelize
from phalanx.train.distributed.pipeline.build import build_pipeline
from phalanx.train.grad_sync.reducer import ParallelReducer
from phalanx.train.loss import LossFn
from phalanx.train.tasks import TensorBatch
from process_worlds import ProcessWorlds

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
    """What a micro-batch uses depends on its number, where `varied`: the first block not in the last one. Where it is
    `unlike`, what it uses of each block differs from worker to worker."""

    def __init__(self, varied: bool, unlike: bool = False):
        super().__init__()
        self.varied, self.unlike = varied, unlike
        self.first = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, leaf: int) -> Tensor:
        number = leaf // (MICRO_BATCHES // 4) if self.unlike else leaf % (MICRO_BATCHES // 4)
        x = self.first(torch.randn(5, 3, generator=torch.Generator().manual_seed(leaf)))
        for index, block in enumerate(self.blocks):
            if not self.varied or number in ((0, 1), (2, 3), (1, 3))[index]:
                x = block(x, number, not (self.varied or self.unlike))
        return x.square().sum()


@contextlib.contextmanager
def as_before_2_13(old: bool) -> Iterator[None]:
    """FSDP as it is in torch 2.11 and 2.12, where this torch is newer."""
    with pytest.MonkeyPatch.context() as patch:
        if old:
            patch.setattr(mesh_module, "REDUCES_UNUSED", False)
            patch.setattr(fsdp, "REDUCES_UNUSED", False)
        yield


@contextlib.contextmanager
def sums_counted(mesh: Mesh, sums: list[int]) -> Iterator[None]:
    """Adds to `sums` how often replicas are summed meanwhile."""
    sums.append(0)
    all_reduce = dist.all_reduce

    def counting(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        sums[-1] += options.get("group") is mesh.replicate_group
        return all_reduce(tensor, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counting)
        yield


def summed(
    rank: int, world: int, *, replicate: int, varied: bool = False, unlike: bool = False, old: bool = False
) -> dict[str, Any]:
    """The gradients of two steps, and how often replicas were summed in each."""
    torch.manual_seed(0)
    model, plain = Model(varied, unlike), Model(varied, unlike)
    plain.load_state_dict(model.state_dict())
    with as_before_2_13(old):
        mesh = build_mesh(Parallelism(replicate=replicate, shard=2), DistEnv(rank, world, rank))
        divided, _ = parallelize(model, model, mesh, ParallelConfig())
    own = mesh.own_micro_batches(MICRO_BATCHES)
    gradients = ParallelReducer(divided, None, last_micro_batch=own[-1])
    for leaf in range(MICRO_BATCHES):
        plain(leaf).backward()
    expected = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in plain.named_parameters()}
    differ, sums = list[str](), list[int]()
    for _ in range(2):
        model.zero_grad()
        with sums_counted(mesh, sums):
            for leaf in own:
                gradients.begin_backward(leaf)
                model(leaf).backward()
                gradients.end_backward()
            gradients.reduce_gradients()
        for name, parameter in model.named_parameters():
            whole = parameter.grad.full_tensor()  # type: ignore[union-attr]
            if not torch.allclose(whole, expected[name], rtol=1e-5, atol=1e-6):
                differ.append(name)
    groups = sum(isinstance(module, FSDPModule) for module in model.modules())
    return {"differ": differ, "sums": sums, "groups": groups}


@pytest.mark.parametrize("old", [False, True], ids=["this torch", "torch before 2.13"])
@pytest.mark.parametrize("varied", [False, True], ids=["the same in each", "something else in each"])
def test_sums_over_replicas_travel_once_a_step(world: ProcessWorlds, varied: bool, old: bool) -> None:
    for found in world.run(4, summed, replicate=2, varied=varied, old=old):
        assert found["differ"] == []
        assert found["sums"] == [1 if old or not REDUCES_UNUSED else found["groups"]] * 2
        assert found["groups"] == 4


@pytest.mark.parametrize("old", [False, True], ids=["this torch", "torch before 2.13"])
@pytest.mark.parametrize("replicate", [1, 2])
def test_workers_may_use_other_parts_of_what_is_sharded_together(
    world: ProcessWorlds, replicate: int, old: bool
) -> None:
    for found in world.run(2 * replicate, summed, replicate=replicate, unlike=True, old=old):
        assert found["differ"] == []


class Stages(nn.Module):
    """What can be cut into stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, 0, True)
        return x


class Squares:
    """A task: the sum of what comes out, squared."""

    def inputs(self, batch: TensorBatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (batch["x"],), {}

    def loss(self, output: Tensor, batch: TensorBatch) -> tuple[Tensor, int]:
        return output.square().sum(), len(output)


def batch_of(leaf: int) -> TensorBatch:
    return {"x": torch.randn(5, 4, generator=torch.Generator().manual_seed(leaf))}


def staged(rank: int, world: int, *, schedule: str, old: bool) -> dict[str, Any]:
    """As `summed`, with two stages of a pipeline, each replicated and sharded."""
    torch.manual_seed(0)
    model, plain = Stages(), Stages()
    plain.load_state_dict(model.state_dict())
    task, place = Squares(), DistEnv(rank, world, rank)
    layout = Parallelism.model_validate({"pipeline": 2, "replicate": 2, "shard": 2, "pipeline_schedule": schedule})
    with as_before_2_13(old):
        mesh = build_mesh(layout, place)
        own = mesh.own_micro_batches(MICRO_BATCHES)
        scoring = LossFn(task, "fp32", place.device)
        made = (mesh, place, ParallelConfig(), lambda turn: None, None)
        divided, objective = build_pipeline(model, scoring, batch_of(0), *made)
    gradients = ParallelReducer(divided, None)
    for leaf in range(MICRO_BATCHES):
        batch = batch_of(leaf)
        task.loss(plain(batch["x"]), batch)[0].backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    differ, sums = list[str](), list[int]()
    for _ in range(2):
        with sums_counted(mesh, sums):
            objective.step([batch_of(leaf) for leaf in own])
            gradients.reduce_gradients()
        for name, parameter in divided.parameters().items():
            if not torch.allclose(parameter.grad.full_tensor(), expected[name], rtol=1e-4, atol=1e-5):  # type: ignore
                differ.append(name)
            parameter.grad = None
    groups = {name.rpartition(".")[0].removesuffix(".even").removesuffix(".odd") for name in divided.parameters()}
    return {"differ": differ, "sums": sums, "groups": sorted(groups)}


@pytest.mark.parametrize(("schedule", "old"), [("1f1b", False), ("zero-bubble", False), ("1f1b", True)])
def test_stages_of_a_pipeline_sum_over_replicas_once_a_step(world: ProcessWorlds, schedule: str, old: bool) -> None:
    for found in world.run(8, staged, schedule=schedule, old=old):
        assert found["differ"] == []
        assert found["sums"] == [1 if old or not REDUCES_UNUSED else len(found["groups"])] * 2
        assert {"blocks.0", "blocks.2"} & set(found["groups"])


def connections_of_layouts(rank: int, world: int, *, layouts: list[dict[str, int]]) -> list[int]:
    """Connections that this worker opens for the groups of each layout."""
    found = []
    for layout in layouts:
        before = connections()
        mesh = build_mesh(Parallelism(**layout), DistEnv(rank, world, rank))
        dist.barrier()
        found.append(len(connections() - before))
        assert mesh.fsdp_mesh is not None
        for each in (mesh.fsdp_mesh, mesh.expert_fsdp_mesh):
            if each is not None:
                own = each.get_coordinate()
                assert own is not None
                assert int(each.mesh[tuple(own)]) == rank
    return found


def connections() -> set[int]:
    """Those of this process, by descriptor."""
    found = psutil.Process().net_connections("tcp")
    return {each.fd for each in found if each.status == psutil.CONN_ESTABLISHED}


def test_sharding_takes_the_groups_that_there_are_instead_of_connecting_again(world: ProcessWorlds) -> None:
    layouts = [{"shard": 4}, {"replicate": 2, "shard": 2}, {"shard": 2, "context": 2, "expert": 2}]
    shard, replicate, context, owners, expert, same = 3, 1, 1, 3, 1, 1
    expected = [shard, replicate + replicate, context + context + owners + expert + same]
    assert world.run(4, connections_of_layouts, layouts=layouts) == [expected] * 4
