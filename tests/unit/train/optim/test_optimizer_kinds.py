"""Every optimizer of the recipe, with every way to keep its state: it learns, and goes on bit for bit."""

import pytest
import torch
from torch import nn

from phalanx.errors import DataError
from phalanx.train.optim.container import STATE_ENTRIES, OptimizerContainer
from small_optim import copied, model, optim, same, train

KINDS = {
    "adamw": (optim(), 3e-3),
    "adamw-bf16": (optim(state_dtype="bf16"), 3e-3),
    "adamw-8bit": (optim(state_dtype="int8"), 3e-3),
    "sgd": (optim("sgd"), 0.3),
    "muon": (optim("muon"), 1e-2),
    "lars": (optim("lars", weight_decay=1e-4), 10.0),
    "lamb": (optim("lamb"), 2e-2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_transformer_learns(kind: str) -> None:
    spec, lr = KINDS[kind]
    network = model()
    losses = train(network, OptimizerContainer(network, spec), range(60), lr)
    assert sum(losses[-5:]) / 5 < 0.7 * losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_optimizer_with_the_state_goes_on_bit_for_bit(kind: str) -> None:
    spec, lr = KINDS[kind]
    network, other = model(), model(seed=1)
    optimizer = OptimizerContainer(network, spec, seed=5)
    train(network, optimizer, range(3), lr)
    other.load_state_dict(network.state_dict())
    fresh = OptimizerContainer(other, spec, seed=5)
    fresh.load(copied(optimizer), "here")
    train(network, optimizer, range(3, 6), lr)
    train(other, fresh, range(3, 6), lr)
    assert same(network, other)
    assert all(value.equal(fresh.state()[key]) for key, value in optimizer.state().items())


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_plain_tensors_of_the_entries_it_declares(kind: str) -> None:
    spec, lr = KINDS[kind]
    network = model()
    optimizer = OptimizerContainer(network, spec)
    train(network, optimizer, range(1), lr)
    state = optimizer.state()
    assert all(type(value) is torch.Tensor for value in state.values())
    declared = set().union(*(STATE_ENTRIES[type(part)] for part in optimizer.optimizers))
    assert {key.rpartition("/")[2] for key in state} == declared


@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16"), ("bf16", "int8"), ("int8", "fp32")])
def test_a_run_may_go_on_with_moments_of_another_precision(before: str, after: str) -> None:
    network = model()
    old = OptimizerContainer(network, optim(state_dtype=before))
    train(network, old, range(30), 1e-3)
    new, kept = (
        OptimizerContainer(network, optim(state_dtype=after)),
        OptimizerContainer(network, optim(state_dtype=after)),
    )
    new.load(copied(old), "here")
    assert {key.rpartition("/")[2] for key in new.state()} == STATE_ENTRIES[type(new.optimizers[0])]
    kept.load(copied(new), "here")
    assert all(value.equal(kept.state()[key]) for key, value in new.state().items())
    # A fresh AdamW moves every weight by the whole rate; one that knows its moments moves most of them by less.
    before_step = [p.detach().clone() for p in network.parameters()]
    train(network, new, range(30, 31), 1e-3)
    moved = torch.cat([(p - q).flatten() for p, q in zip(network.parameters(), before_step, strict=True)])
    assert moved.abs().mean() < 0.6e-3


def test_scales_of_another_shape_are_refused_by_name() -> None:
    optimizer = OptimizerContainer(nn.Linear(300, 4), optim(state_dtype="int8"))
    shapes = r"has shape \[4, 1\], the model's parameter has \[4, 2\]"
    with pytest.raises(DataError, match=f"step-7: optimizer/weight/exp_avg_scale {shapes}"):
        optimizer.load({"optimizer/weight/exp_avg_scale": torch.zeros(4, 1)}, "step-7")
