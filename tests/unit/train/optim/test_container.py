"""Optimizers: which parameter goes where, and a state that goes on bit for bit."""

import pytest
import torch
from torch import nn

from phalanx.errors import DataError, RecipeError
from phalanx.models import moe, transformer
from phalanx.train.optim.container import (
    OptimizerContainer,
    find_hidden_matrices,
    trainable_parameters,
)
from phalanx.train.optim.muon import Muon, orthogonalize
from small_optim import optim
from small_train import VOCAB, tiny_lm, token_batch

NAMES = ["adamw", "sgd", "muon"]


def train(model: nn.Module, optimizer: OptimizerContainer, steps: range) -> None:
    """Steps whose gradients depend on the weights and on the number of the step only."""
    for step in steps:
        batch = token_batch(4, seed=step)
        model.zero_grad(set_to_none=True)
        logits = model(torch.from_numpy(batch["tokens"]))
        nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch["targets"]).flatten()).backward()
        optimizer.step(1e-2)


def names_in(optimizer: OptimizerContainer, part: int) -> list[str]:
    return [optimizer.parameter_names[p] for group in optimizer.optimizers[part].param_groups for p in group["params"]]


def test_matrices_decay_and_vectors_do_not() -> None:
    optimizer = OptimizerContainer(tiny_lm(), optim(weight_decay=0.3))
    decay = {
        optimizer.parameter_names[p]: g["weight_decay"]
        for g in optimizer.optimizers[0].param_groups
        for p in g["params"]
    }
    assert decay == {
        "embedding.weight": 0.3,
        "hidden.weight": 0.3,
        "head.weight": 0.3,
        "hidden.bias": 0.0,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
    }


def test_muon_takes_hidden_matrices_and_adamw_the_rest() -> None:
    optimizer = OptimizerContainer(tiny_lm(), optim("muon"))
    assert names_in(optimizer, 0) == ["hidden.weight"]
    assert sorted(names_in(optimizer, 1)) == [
        "embedding.weight",
        "head.weight",
        "hidden.bias",
        "norm.bias",
        "norm.weight",
    ]


def test_muon_leaves_a_tied_output_layer_and_all_norms_alone() -> None:
    torch.manual_seed(0)
    model = transformer(vocab_size=VOCAB, seq_len=4, layers=1, hidden_size=16, num_heads=2, tie_embeddings=True)
    assert find_hidden_matrices(model) == {
        n for n, p in model.named_parameters() if n.startswith("blocks.") and p.dim() == 2
    }


def test_muon_takes_fused_experts_and_the_last_layer_where_the_head_is_a_function() -> None:
    model = moe(vocab_size=VOCAB, seq_len=4, layers=2, hidden_size=16, num_heads=2, num_experts=2)
    experts = {name for name, p in model.named_parameters() if p.dim() == 3}
    assert experts
    assert experts <= find_hidden_matrices(model)
    del model.head
    assert "blocks.1.attention.out.weight" in find_hidden_matrices(model)


@pytest.mark.parametrize("shape", [(16, 40), (40, 16)])
def test_a_step_of_muon_is_that_of_torch_but_for_rounding_to_bf16(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(shape))
    theirs.data.copy_(ours)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    optimizers = Muon([ours], **options), torch.optim.Muon([theirs], **options, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = theirs.grad = torch.randn(shape)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-3)


def test_muon_orthogonalizes_each_matrix_of_a_stack() -> None:
    stack = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0))
    assert orthogonalize(stack).allclose(torch.stack([orthogonalize(each) for each in stack]), atol=1e-6)


def test_muon_without_a_hidden_matrix_is_refused() -> None:
    with pytest.raises(RecipeError, match="muon is for hidden matrices, and this model has none to train; use adamw"):
        OptimizerContainer(nn.Sequential(nn.Linear(3, 3)), optim("muon"))


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_parameter_stays_and_has_no_state(name: str) -> None:
    model = tiny_lm()
    model.embedding.weight.requires_grad_(False)
    before = model.embedding.weight.clone()
    optimizer = OptimizerContainer(model, optim(name))
    train(model, optimizer, range(3))
    assert model.embedding.weight.equal(before)
    assert not any("embedding" in key for key in optimizer.state())


def test_state_takes_the_memory_layout_of_its_parameter() -> None:
    weight = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = OptimizerContainer(weight, optim())
    entries = {f"optimizer/weight/{key}": torch.randn(4, 3, 3, 3) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.load(entries | {"optimizer/weight/step": torch.ones(())}, "here")
    state = optimizer.state()
    for key, value in entries.items():
        assert state[key].stride() == weight.weight.stride()
        assert state[key].equal(value)


def test_loading_replaces_all_state_of_before() -> None:
    model = tiny_lm()
    optimizer = OptimizerContainer(model, optim())
    train(model, optimizer, range(2))
    optimizer.load({}, "here")
    assert optimizer.state() == {}


def test_state_of_a_parameter_that_is_not_trained_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="step-7: has optimizer state for 'gone', which this model does not train"):
        OptimizerContainer(tiny_lm(), optim()).load({"optimizer/gone/exp_avg": torch.zeros(1)}, "step-7")


def test_state_of_another_shape_is_refused_by_name() -> None:
    shapes = r"has shape \[2\], the model's parameter has \[8\]"
    with pytest.raises(DataError, match=f"step-7: optimizer/hidden.bias/exp_avg {shapes}"):
        OptimizerContainer(tiny_lm(), optim()).load({"optimizer/hidden.bias/exp_avg": torch.zeros(2)}, "step-7")


@pytest.mark.parametrize(("before", "after"), [("adamw", "sgd"), ("sgd", "adamw")])
def test_after_state_of_another_kind_an_optimizer_starts_afresh(before: str, after: str) -> None:
    model = tiny_lm()
    old = OptimizerContainer(model, optim(before))
    train(model, old, range(2))
    copy = tiny_lm()
    copy.load_state_dict(model.state_dict())
    new, fresh = OptimizerContainer(model, optim(after)), OptimizerContainer(copy, optim(after))
    new.load(old.state(), "here")
    assert new.state() == {}
    assert sorted(new.unused_state) == sorted(name for name, _ in model.named_parameters())
    train(model, new, range(2, 4))
    train(copy, fresh, range(2, 4))
    assert all(a.equal(b) for a, b in zip(model.parameters(), copy.parameters(), strict=True))


def test_one_parameter_with_state_of_another_kind_does_not_lose_that_of_the_others() -> None:
    model = tiny_lm()
    old, new = OptimizerContainer(model, optim("adamw")), OptimizerContainer(model, optim("muon"))
    train(model, old, range(2))
    new.load(old.state(), "here")
    assert new.unused_state == ["hidden.weight"]
    assert new.state().keys() == {key for key in old.state() if "hidden.weight" not in key}


def test_incomplete_state_of_a_parameter_is_not_used() -> None:
    model = tiny_lm()
    old, new = OptimizerContainer(model, optim()), OptimizerContainer(model, optim())
    train(model, old, range(2))
    new.load({key: value for key, value in old.state().items() if key != "optimizer/head.weight/step"}, "here")
    assert new.unused_state == ["head.weight"]


def test_a_parameters_name_may_hold_a_slash() -> None:
    model = nn.Module()
    model.register_module("a/b", nn.Linear(2, 2))
    optimizer = OptimizerContainer(model, optim("sgd"))
    optimizer.load({"optimizer/a/b.weight/momentum_buffer": torch.ones(2, 2)}, "here")
    assert list(optimizer.state()) == ["optimizer/a/b.weight/momentum_buffer"]


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(RecipeError, match="no parameter that requires a gradient"):
        trainable_parameters(nn.ReLU())
