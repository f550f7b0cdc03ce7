"""The moving average of the weights: as torch's, in the state that is saved, and swapped in for an evaluation."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from phalanx.recipe.schema import OptimizerConfig
from phalanx.train.optim.container import OptimizerContainer


def train(optimizer, model, steps, update=lambda: None):
    for step in range(steps):
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step(0.1)
        update()


def make(seed=0, decay=0.9):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return model, OptimizerContainer(model, OptimizerConfig(ema_decay=decay))


def test_the_average_is_that_of_torch():
    model, optimizer = make()
    peer = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    train(optimizer, model, 5, lambda: peer.update_parameters(model))
    for own, expected in zip(optimizer.ema.values(), peer.module.parameters(), strict=True):
        torch.testing.assert_close(own, expected.data, rtol=1e-6, atol=1e-7)


def test_a_restored_average_continues_with_the_same_bits():
    model, optimizer = make()
    train(optimizer, model, 3)
    other, restored = make(seed=1)
    other.load_state_dict(model.state_dict())
    restored.load({name: value.clone() for name, value in optimizer.state().items()}, "here")
    for each, trained in ((optimizer, model), (restored, other)):
        train(each, trained, 2)
    assert all(map(torch.equal, restored.ema.values(), optimizer.ema.values()))
    assert not torch.equal(next(iter(restored.ema.values())), other.weight)


def test_an_average_of_an_earlier_recipe_does_not_cost_the_optimizer_its_state():
    model, optimizer = make()
    train(optimizer, model, 2)
    _, without = make(decay=None)
    without.load(optimizer.state(), "here")
    assert not without.ema
    assert not without.unused_state
    assert set(without.state()) == {name for name in optimizer.state() if not name.endswith("/ema")}


def test_weights_and_averages_have_their_bits_back_after_an_evaluation():
    model, optimizer = make()
    train(optimizer, model, 3)
    before = [tensor.detach().clone() for tensor in (*model.parameters(), *optimizer.ema.values())]
    with optimizer.use_ema():
        assert torch.equal(model.weight.detach(), before[2])
    assert all(map(torch.equal, (*model.parameters(), *optimizer.ema.values()), before))
