"""Low-rank adapters: nothing changes at first, only they learn, and folded in they compute the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.errors import RecipeError
from phalanx.models import moe, transformer
from phalanx.recipe.schema import AdapterConfig, OptimizerConfig
from phalanx.train.adapters.lora import adapter_scale, add_adapters, merge_adapters
from phalanx.train.adapters.targets import (
    describe_adapters,
    find_uncalled_adapters,
    is_adapter_name,
    select_adapter_targets,
)
from phalanx.train.distributed.activation_checkpoint import ActivationCheckpointing, apply_activation_checkpointing
from phalanx.train.optim.container import OptimizerContainer, trainable_parameters

BLOCK = {
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.out",
    "ffn.gate",
    "ffn.up",
    "ffn.down",
}
SPEC = AdapterConfig(rank=4)


def small() -> nn.Module:
    torch.manual_seed(0)
    return transformer(
        vocab_size=64, seq_len=16, layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_hidden_size=48
    )


def adapted(spec: AdapterConfig = SPEC, model: nn.Module | None = None, seed: int = 0) -> nn.Module:
    model = small() if model is None else model
    add_adapters(model, spec, torch.Generator().manual_seed(seed))
    return model


def disturbed(model: nn.Module) -> nn.Module:
    """With adapters that do something, as after training."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter_name(name):
                parameter.normal_(std=0.3)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(2))


def test_without_a_choice_all_linear_layers_of_the_blocks_are_adapted_and_the_head_is_not() -> None:
    assert select_adapter_targets(small(), SPEC).keys() == {f"blocks.{i}.{name}" for i in range(2) for name in BLOCK}


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ("query", {"blocks.0.attention.query", "blocks.1.attention.query"}),
        ("blocks.0.ffn.*", {"blocks.0.ffn.gate", "blocks.0.ffn.up", "blocks.0.ffn.down"}),
        (["head", "1.ffn.up"], {"head", "blocks.1.ffn.up"}),
    ],
)
def test_patterns_choose_by_the_last_parts_of_a_name(modules: str | list[str], expected: set[str]) -> None:
    assert select_adapter_targets(small(), AdapterConfig(target_modules=modules)).keys() == expected


def mixture() -> nn.Module:
    torch.manual_seed(0)
    return moe(vocab_size=64, seq_len=16, layers=2, hidden_size=32, num_heads=4, num_experts=4)


@pytest.mark.parametrize(
    ("build", "config", "message"),
    [
        (
            small,
            {"target_modules": ["query", "q_proj"]},
            r"target_modules: 'q_proj' fits no layer that can have an adapter; there are em",
        ),
        (small, {"target_modules": ["norm"]}, r"'norm' fits no layer that can have an adapter \(.*norm is a RMSNorm\)"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), {"rank": 4}, r"target_modules: the model has no blocks .* some of 0"),
        (small, {"rank": 16, "target_modules": ["key"]}, r"rank: 16 must be below 16, the smaller side of blocks.0.at"),
        (small, {"rank": 32}, r"rank: 32 must be below"),
        (small, {"target_modules": "head"}, r"target_modules: head shares its weight with embedding"),
        (mixture, {"dropout": 0.1}, r"dropout: is for layers that are called .* blocks.0.ffn.experts"),
    ],
)
def test_adapters_that_a_model_cannot_have_are_refused(
    build: Callable[[], nn.Module], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=f"adapter.*{message}"):
        adapted(AdapterConfig(**{"rank": 4, **config}), build())


def test_without_a_choice_layers_that_are_no_larger_than_the_rank_are_left_out() -> None:
    names = select_adapter_targets(small(), AdapterConfig(rank=16)).keys()
    assert {name.partition(".")[2].partition(".")[2] for name in names} == BLOCK - {"attention.key", "attention.value"}


class Encoder(nn.Module):
    """Torch's own encoder layers: attention uses the weight of its output layer in a function."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
        self.embedding = nn.Embedding(64, 32)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.embedding(tokens))


class Functional(nn.Module):
    """Blocks that use the weight of one of their layers in a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.linear(layer["a"](x), layer["b"].weight)
        return x


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return Encoder()


@pytest.mark.parametrize("build", [small, mixture, encoder])
def test_adapters_of_layers_experts_and_attention_learn_and_are_merged(build: Callable[[], nn.Module]) -> None:
    model = adapted(SPEC, build())
    model(tokens()).square().mean().backward()
    unused = [name for name, p in model.named_parameters() if name.endswith("lora_b") and not p.grad.any()]
    assert unused == []
    disturbed(model)
    merged = build()
    merged.load_state_dict(merge_adapters(model.state_dict(), adapter_scale(SPEC)))
    torch.testing.assert_close(model.eval()(tokens()), merged.eval()(tokens()), rtol=1e-4, atol=1e-4)
    assert model.state_dict().keys() >= merged.state_dict().keys()


def test_the_second_forward_of_activation_checkpointing_has_the_adapters() -> None:
    def gradients(mode: ActivationCheckpointing) -> list[torch.Tensor]:
        model = disturbed(adapted(AdapterConfig(rank=4, target_modules=["experts"]), mixture()))
        apply_activation_checkpointing(model, ["blocks.0.ffn.experts", "blocks.1.ffn.experts"], mode)
        model(tokens()).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(map(torch.equal, gradients("none"), gradients("full")))


def test_torchs_encoder_layers_use_the_adapters_of_attention_also_in_an_evaluation() -> None:
    model = disturbed(adapted(AdapterConfig(rank=4, target_modules=["in_proj_weight"]), encoder()))
    trained = model(tokens())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens()), trained)


def test_experts_are_adapted_and_their_router_is_not() -> None:
    names = {
        name.partition("ffn.")[2] for name in select_adapter_targets(mixture(), AdapterConfig(rank=8)) if "ffn" in name
    }
    assert names == {name for name, p in mixture().blocks[0].ffn.named_parameters() if p.dim() == 3}
    assert select_adapter_targets(mixture(), AdapterConfig(rank=2, target_modules=["score"])).keys() == {
        "blocks.0.ffn.router.score",
        "blocks.1.ffn.router.score",
    }
    assert len(select_adapter_targets(mixture(), AdapterConfig(target_modules=["experts"]))) == 2 * len(names)


def test_an_adapter_that_is_never_called_is_found() -> None:
    model = adapted(SPEC, Functional())
    assert find_uncalled_adapters(model, lambda: model(torch.zeros(1, 8))) == ["layers.0.b", "layers.1.b"]
    called = adapted(SPEC, encoder())
    assert find_uncalled_adapters(called, lambda: called(tokens())) == []


def test_what_stays_frozen_is_counted() -> None:
    assert describe_adapters(adapted()) == "adapters on 14 matrices"
    text = describe_adapters(adapted(AdapterConfig(rank=4, target_modules=["query"]), mixture()))
    assert text.startswith("adapters on 2 matrices; 14 in blocks have none (9")


def test_only_adapters_train() -> None:
    model = adapted()
    assert all(map(is_adapter_name, trainable_parameters(model)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = OptimizerContainer(model, OptimizerConfig())
    for _ in range(2):  # in the first step B is zero, so A has no gradient
        model(tokens()).square().mean().backward()
        optimizer.step(1e-2)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == set(filter(is_adapter_name, before))


def test_adapters_are_drawn_from_their_own_seed() -> None:
    first, again, other = (adapted(seed=seed).state_dict() for seed in (0, 0, 1))
    name = "blocks.0.ffn.up.lora_a"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_dropout_acts_in_training_only() -> None:
    model = disturbed(adapted(AdapterConfig(rank=4, dropout=0.5)))
    assert not torch.equal(model.train()(tokens()), model(tokens()))
    assert torch.equal(model.eval()(tokens()), model(tokens()))


def test_transposed_layers_of_gpt2_are_adapted_alike(tmp_path: Path) -> None:
    tiny = pytest.importorskip("tiny_huggingface")
    model, plain = tiny.save_random_model(tmp_path, "gpt2"), tiny.save_random_model(tmp_path, "gpt2")
    disturbed(adapted(AdapterConfig(rank=4), model))
    plain.load_state_dict(merge_adapters(dict(model.state_dict()), adapter_scale(AdapterConfig(rank=4))))
    with torch.no_grad():
        expected = model(tokens()).logits
        assert (expected - tiny.save_random_model(tmp_path, "gpt2")(tokens()).logits).abs().max() > 0.1
        torch.testing.assert_close(plain(tokens()).logits, expected, rtol=1e-5, atol=1e-5)
