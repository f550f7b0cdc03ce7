"""Kinds, initial values and layers of adapters, compared with their formulas; and modules that are trained in full."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.errors import RecipeError
from phalanx.models import moe, transformer
from phalanx.recipe.schema import AdapterConfig
from phalanx.train.adapters.initial_values import init_from_weights
from phalanx.train.adapters.lora import adapter_scale, add_adapters, merge_adapters
from phalanx.train.adapters.targets import describe_adapters, is_adapter_name, select_adapter_targets

LAYERS = ("embedding", "first", "grouped", "head")


class Mixed(nn.Module):
    """An embedding, a plain and a grouped convolution, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 12)
        self.first = nn.Conv2d(1, 12, 3, stride=2, padding=1)
        self.grouped = nn.Conv1d(12, 16, 3, groups=2, bias=False)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.first(self.embedding(tokens).unsqueeze(1)).flatten(2)
        return self.head(self.grouped(hidden).mT)


class Scaled(nn.Embedding):
    """An embedding with a forward of its own, as Gemma has."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 3


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


def adapted(model: nn.Module, noise: float = 0.0, **spec: Any) -> tuple[nn.Module, float]:
    """The model with adapters, which then change by noise as in training; and their scale."""
    config = AdapterConfig(**{"rank": 2, "alpha": 6, **spec})
    add_adapters(model, config, torch.Generator().manual_seed(0))
    init_from_weights([model], config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter_name(name):
                parameter.add_(noise * torch.randn_like(parameter))
    return model, adapter_scale(config)


def tokens() -> Tensor:
    return torch.randint(0, 30, (2, 16), generator=torch.Generator().manual_seed(2))


def test_the_scale_of_rslora_is_divided_by_the_root_of_the_rank() -> None:
    assert adapter_scale(AdapterConfig(kind="lora", rank=16, alpha=8)) == 8 / 16
    assert adapter_scale(AdapterConfig(kind="rslora", rank=16, alpha=8)) == 8 / math.sqrt(16)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_layer_computes_the_formula_of_its_kind(kind: str) -> None:
    layer, scale = adapted(nn.Sequential(nn.Linear(10, 8)), 0.5, kind=kind, target_modules=["0"])
    p, x = dict(layer.named_parameters()), torch.randn(3, 10)
    weight = p["0.weight"] + scale * p["0.lora_b"] @ p["0.lora_a"]
    if kind == "dora":
        weight = p["0.lora_magnitude"].unsqueeze(1) * weight / weight.norm(dim=1, keepdim=True)
    torch.testing.assert_close(layer(x), x @ weight.T + p["0.bias"])


@pytest.mark.parametrize("spec", [{"kind": "lora"}, {"kind": "dora"}, {"init": "pissa"}], ids=str)
def test_nothing_changes_at_first_and_merged_layers_compute_the_same(spec: dict[str, str]) -> None:
    before = mixed()(tokens())
    fresh, _ = adapted(mixed(), target_modules=list(LAYERS), **spec)
    torch.testing.assert_close(fresh(tokens()), before, rtol=1e-5, atol=1e-5)
    model, scale = adapted(mixed(), 0.1, target_modules=list(LAYERS), **spec)
    output = model(tokens())
    assert (output - before).abs().max() > 0.01
    output.square().mean().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if is_adapter_name(name))
    merged = mixed()
    merged.load_state_dict(merge_adapters(model.state_dict(), scale))
    torch.testing.assert_close(merged(tokens()), output, rtol=1e-5, atol=1e-5)


def test_an_embedding_with_a_forward_of_its_own_uses_the_adapted_weight() -> None:
    model, scale = adapted(nn.Sequential(Scaled(30, 12)), 0.5, target_modules=["0"])
    p = dict(model.named_parameters())
    weight = p["0.weight"] + scale * p["0.lora_a"] @ p["0.lora_b"]
    torch.testing.assert_close(model(tokens()), 3 * weight[tokens()])


def test_pissa_learns_the_principal_singular_vectors_and_freezes_the_rest() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(40, 60)
    u, s, v = torch.linalg.svd(layer.weight.detach())
    best = u[:, :4] * s[:4] @ v[:4]
    rest = layer.weight.detach() - best
    model, scale = adapted(nn.Sequential(layer), init="pissa", rank=4, target_modules=["0"])
    torch.testing.assert_close(model.get_parameter("0.weight"), rest, rtol=0, atol=1e-5)
    torch.testing.assert_close(scale * layer.lora_b @ layer.lora_a, best, rtol=0, atol=1e-5)


def test_modules_to_save_are_trained_in_full_and_get_no_adapter() -> None:
    torch.manual_seed(0)
    model = moe(vocab_size=30, seq_len=16, layers=2, hidden_size=32, num_heads=4, num_experts=4)
    add_adapters(model, AdapterConfig(rank=2, modules_to_save=["embedding", "attention.query", "norm"]))
    trained = {name for name, p in model.named_parameters() if p.requires_grad and not is_adapter_name(name)}
    assert trained == {"embedding.weight", "norm.weight", *(f"blocks.{i}.attention.query.weight" for i in range(2))}
    assert not hasattr(model.get_submodule("blocks.0.attention.query"), "lora_a")
    assert ", 4 tensors trained in full" in describe_adapters(model)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"modules_to_save": ["heads"]}, "modules_to_save: 'heads' fits no module with parameters; there are .*norm"),
        ({"modules_to_save": ["ffn"], "target_modules": ["up"]}, "modules_to_save: blocks.0.ffn.up is trained in full"),
        ({"dropout": 0.1, "target_modules": ["embedding"]}, "dropout: .* embedding"),
    ],
)
def test_what_contradicts_itself_is_refused(spec: dict[str, Any], message: str) -> None:
    model = transformer(vocab_size=64, seq_len=16, layers=2, hidden_size=32, num_heads=4)
    with pytest.raises(RecipeError, match=f"adapter.{message}"):
        select_adapter_targets(model, AdapterConfig(rank=2, **spec))


def test_stacks_of_experts_have_no_magnitudes() -> None:
    model = moe(vocab_size=30, seq_len=16, layers=1, hidden_size=32, num_heads=4, num_experts=4)
    with pytest.raises(RecipeError, match=r"adapter.kind: dora is for layers, and blocks.0.ffn.experts"):
        select_adapter_targets(model, AdapterConfig(rank=2, kind="dora"))
