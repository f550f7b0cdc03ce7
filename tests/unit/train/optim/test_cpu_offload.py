"""Optimizer state in host memory: what holds on the CPU, and on a GPU where there is one."""

import pytest
import torch
from torch import nn

from phalanx.recipe.schema import OptimizerConfig
from phalanx.train.optim.container import OptimizerContainer
from phalanx.train.optim.cpu_offload import OffloadedOptimizer
from small_optim import copied, model, optim, same, train


def matrices() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 70)), nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3, 2))]


def adamw(groups: list[dict[str, object]], of: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.1, fused=True)


def run(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int, lr: float = 0.05) -> None:
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.sin(3 * parameter.detach())
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()


@pytest.mark.parametrize("spec", [optim(), optim("sgd"), optim(state_dtype="int8")])
def test_without_a_gpu_it_is_the_same_optimizer(spec: OptimizerConfig) -> None:
    one, other = model(), model()
    plain, offloaded = OptimizerContainer(one, spec), OptimizerContainer(other, spec, offload=True)
    train(one, plain, range(3), 1e-2)
    train(other, offloaded, range(3), 1e-2)
    assert type(offloaded.optimizers[0]) is type(plain.optimizers[0])
    assert same(one, other)


def test_weights_that_something_else_changed_count() -> None:
    parameters = matrices()
    optimizer = OffloadedOptimizer([{"params": parameters}], adamw)
    run(parameters, optimizer, 1)
    with torch.no_grad():
        parameters[0].fill_(7.0)
    run(parameters, optimizer, 1, lr=0.0)
    assert (parameters[0] == 7.0).all()


def test_a_parameter_without_a_gradient_stays_and_has_no_state() -> None:
    parameters = matrices()
    before = parameters[1].detach().clone()
    optimizer = OffloadedOptimizer([{"params": parameters}], adamw)
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer.step()
    assert parameters[1].equal(before)
    assert not optimizer.state[parameters[1]]


def on_the_host(network: nn.Module, spec: OptimizerConfig, monkeypatch: pytest.MonkeyPatch) -> OptimizerContainer:
    """An optimizer that offloads although the parameters are on the CPU."""
    with monkeypatch.context() as patch:
        patch.setattr("phalanx.train.optim.container._needs_offload", lambda parameters: True)
        return OptimizerContainer(network, spec, offload=True)


@pytest.mark.parametrize("state", ["fp32", "bf16", "int8"])
def test_state_in_host_memory_goes_on_bit_for_bit(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, other, plain = model(), model(seed=1), model()
    optimizer = on_the_host(network, optim(state_dtype=state), monkeypatch)
    train(plain, OptimizerContainer(plain, optim(state_dtype=state)), range(3), 1e-2)
    assert isinstance(optimizer.optimizers[0], OffloadedOptimizer)
    train(network, optimizer, range(3), 1e-2)
    assert same(network, plain)
    other.load_state_dict(network.state_dict())
    fresh = on_the_host(other, optim(state_dtype=state), monkeypatch)
    train(other, fresh, range(1), 0.0)  # a state that loading replaces
    other.load_state_dict(network.state_dict())
    fresh.load(copied(optimizer), "here")
    train(network, optimizer, range(3, 6), 1e-2)
    train(other, fresh, range(3, 6), 1e-2)
    assert same(network, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("spec", [optim(), optim("sgd"), optim(state_dtype="bf16")])
def test_on_a_gpu_the_state_is_in_host_memory_and_the_steps_are_those_of_the_cpu(spec: OptimizerConfig) -> None:
    here, there = matrices(), [nn.Parameter(p.detach().cuda()) for p in matrices()]
    plain = OptimizerContainer(nn.ParameterList(here), spec)
    offloaded = OptimizerContainer(nn.ParameterList(there), spec, offload=True)
    for _ in range(4):
        for a, b in zip(here, there, strict=True):
            a.grad = torch.sin(a.detach())
            b.grad = a.grad.cuda()
        plain.step(0.05)
        offloaded.step(0.05)
    assert all(value.device.type == "cpu" for value in offloaded.state().values())
    assert all(a.equal(b.cpu()) for a, b in zip(here, there, strict=True))
