"""Repeated blocks are found by themselves: the transformer, convolutional networks, Hugging Face, a user's own."""

import pytest
import torch
from torch import Tensor, nn

from phalanx.models import transformer
from phalanx.models.convnets import ResidualBlock, nin, resnet
from phalanx.train.ops.blocks import find_blocks


class Unit(nn.Module):
    """A block of a user's model, with a width so that its share of the parameters can be set."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.inner(x))


class Other(Unit):
    """A block of another class."""


class Gain(nn.Module):
    """A block that holds its parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Mixture(nn.Module):
    """A block with experts."""

    def __init__(self, experts: int = 4):
        super().__init__()
        self.router = nn.Linear(4, experts)
        self.experts = nn.ModuleList(Unit() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Model(nn.Module):
    """Whatever children are given."""

    def __init__(self, **children: nn.Module):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        return x


def units(count: int, width: int = 4, kind: type[Unit] = Unit) -> list[Unit]:
    return [kind(width) for _ in range(count)]


def test_the_transformers_blocks_are_its_layers() -> None:
    model = transformer(vocab_size=11, seq_len=4, layers=3, hidden_size=8, num_heads=2)
    assert find_blocks(model) == ["blocks.0", "blocks.1", "blocks.2"]


def test_the_blocks_of_a_mixed_sequential_are_what_repeats_in_it_and_not_its_stem_or_classifier() -> None:
    model = resnet(blocks=(2, 1, 1), base_channels=8)
    assert find_blocks(model) == ["1", "2", "3", "4"]
    assert all(isinstance(model.get_submodule(name), ResidualBlock) for name in find_blocks(model))


def test_plain_sequentials_are_blocks_where_nothing_else_repeats() -> None:
    model = nin(num_classes=10)
    assert [str(i) for i, child in enumerate(model) if type(child) is nn.Sequential] == find_blocks(model)
    assert len(find_blocks(model)) == 12


def test_stages_that_are_plain_containers_give_one_row_of_blocks_even_where_a_stage_has_only_one() -> None:
    model = Model(
        stem=nn.Conv2d(3, 4, 3),
        layer1=nn.Sequential(*units(2)),
        layer2=nn.Sequential(*units(3, width=16)),
        layer3=nn.Sequential(*units(1, width=64)),
    )
    assert find_blocks(model) == ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer2.2", "layer3.0"]


def test_the_kind_with_most_parameters_comes_first_and_each_kind_keeps_the_models_order() -> None:
    model = Model(encoder=nn.ModuleList(units(3)), decoder=nn.ModuleList(units(2, width=16, kind=Other)))
    assert find_blocks(model) == ["decoder.0", "decoder.1", "encoder.0", "encoder.1", "encoder.2"]


def test_experts_inside_a_block_are_not_blocks() -> None:
    assert find_blocks(Model(layers=nn.ModuleList([Mixture(), Mixture()]))) == ["layers.0", "layers.1"]


def test_what_stands_alone_in_its_container_is_no_block_but_may_hold_some() -> None:
    inner = Model(layers=nn.ModuleList(units(2)))
    assert find_blocks(Model(towers=nn.ModuleList([inner]))) == ["towers.0.layers.0", "towers.0.layers.1"]


def test_blocks_may_hold_their_parameters_themselves() -> None:
    assert find_blocks(nn.Sequential(Gain(), Gain())) == ["0", "1"]


def test_repeated_modules_without_parameters_are_no_blocks() -> None:
    assert find_blocks(nn.Sequential(Model(), Model(), nn.Linear(2, 2))) == []


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(3, 3),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)),
        Model(layers=nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])),
        Model(first=Unit(), second=Unit()),
        Model(layers=nn.ModuleList([Unit()])),
    ],
    ids=["a layer", "a stack of layers", "a list of layers", "attributes", "a single block"],
)
def test_a_model_without_repeated_blocks_has_none(model: nn.Module) -> None:
    assert find_blocks(model) == []


def test_layers_with_parametrizations_are_still_layers() -> None:
    layers = [nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)) for _ in range(2)]
    assert find_blocks(nn.Sequential(*layers)) == []


def test_blocks_of_hugging_face_models_are_their_layers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 11}
    llama = transformers.LlamaConfig(
        **sizes, num_key_value_heads=1, num_hidden_layers=3, intermediate_size=32, max_position_embeddings=8
    )
    gpt2 = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=11, n_positions=8)
    with torch.device("meta"):
        assert find_blocks(transformers.LlamaForCausalLM(llama)) == [f"model.layers.{i}" for i in range(3)]
        assert find_blocks(transformers.GPT2LMHeadModel(gpt2)) == [f"transformer.h.{i}" for i in range(2)]
