"""Optimizers whose parameters FSDP has sharded over 2 ranks (and replicated over 2 more), against one process."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from phalanx.recipe.schema import OptimizerConfig
from phalanx.train.optim.container import OptimizerContainer
from process_worlds import ProcessWorlds

WIDTH, ROWS = 300, 7  # rows divide unevenly, and a row is longer than a block of 8-bit codes
SPECS = {
    "lars": {"name": "lars", "lr": 5.0},
    "lamb": {"name": "lamb", "lr": 1e-2},
    "bf16": {"state_dtype": "bf16"},
    "int8": {"state_dtype": "int8"},
    "adamw": {},
}
EXACT = ("bf16", "int8", "adamw")  # no norm, so no sum in another order


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, ROWS), nn.Linear(ROWS, 1), nn.LayerNorm(1))


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + len(name)))


def give_gradients(model: nn.Module, step: int) -> None:
    for name, parameter in model.named_parameters():
        grad = gradient(name, parameter.shape, step)
        if isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
        else:
            parameter.grad = grad


def spec_of(kind: str) -> OptimizerConfig:
    return OptimizerConfig.model_validate(SPECS[kind])


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def results(model: nn.Module, optimizer: OptimizerContainer) -> dict[str, Tensor]:
    parameters = {name: whole(p) for name, p in model.named_parameters()}
    return parameters | {key: whole(value) for key, value in optimizer.state().items()}


def sharded(world: int) -> nn.Module:
    model = network()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh if world == 4 else mesh["shard"])
    return model


def trained(rank: int, world: int, kind: str, steps: int = 3) -> dict[str, Tensor]:
    model = network() if world == 1 else sharded(world)
    optimizer = OptimizerContainer(model, spec_of(kind), seed=1)
    for step in range(steps):
        give_gradients(model, step)
        optimizer.step(spec_of(kind).lr)
    return results(model, optimizer)


def resumed(rank: int, world: int, kind: str) -> dict[str, Tensor]:
    """As `trained`, with a fresh optimizer after two steps, given DTensors for matrices and local parts for vectors."""
    model = sharded(world)
    optimizer = OptimizerContainer(model, spec_of(kind), seed=1)
    for step in range(2):
        give_gradients(model, step)
        optimizer.step(spec_of(kind).lr)
    copies = {}
    for key, value in optimizer.state().items():
        part = isinstance(value, DTensor) and value.dim() == 1
        copies[key] = value.to_local().clone() if part else value.clone()
    fresh = OptimizerContainer(model, spec_of(kind), seed=1)
    fresh.load(copies, "here")
    give_gradients(model, 2)
    fresh.step(spec_of(kind).lr)
    return results(model, fresh)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("kind", SPECS)
def test_sharded_parameters_take_the_steps_of_whole_ones(world: ProcessWorlds, kind: str, ranks: int) -> None:
    one = trained(0, 1, kind)
    for other in world.run(ranks, trained, kind=kind):
        assert other.keys() == one.keys()
        for name, value in one.items():
            if kind in EXACT:
                assert other[name].equal(value), name
            else:
                torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", SPECS)
def test_sharded_state_goes_on_bit_for_bit(world: ProcessWorlds, kind: str) -> None:
    for one, other in zip(world.run(2, trained, kind=kind), world.run(2, resumed, kind=kind), strict=True):
        assert all(value.equal(other[name]) for name, value in one.items())
