"""Models that are built without their random numbers, for who takes over a whole state."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.data import DataInfo
from phalanx.recipe.schema import ModelConfig
from phalanx.train.model_builder import SkipInit, build_model

FACTS = DataInfo("tokens", 64, None, 16, None)


def built(builder: str, folder: Path, draw: bool) -> nn.Module:
    spec = ModelConfig(build=f"{builder}")
    return build_model(spec, FACTS, folder, 0, torch.device("cpu"), init_weights=draw)


def own(source: str, folder: Path) -> str:
    name = f"undrawn_{folder.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(f"import torch\nfrom torch import nn\n{source}\n")
    return f"{name}:Own"


LAYERS = {
    "linear": lambda: nn.Linear(4, 3),
    "convolution": lambda: nn.Conv2d(2, 3, 3),
    "embedding": lambda: nn.Embedding(5, 4),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "recurrent": lambda: nn.LSTM(3, 4),
    "normalised": lambda: nn.BatchNorm1d(4),
    "tied": lambda: tied(),
}


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("name", LAYERS)
def test_what_torch_makes_needs_no_random_numbers(name: str) -> None:
    before = torch.get_rng_state()
    with SkipInit() as undrawn:
        LAYERS[name]()
    assert undrawn.only_parameters_differ
    assert torch.get_rng_state().equal(before)


def test_everything_but_random_parameters_is_as_it_would_be(tmp_path: Path) -> None:
    drawn, undrawn = (built("phalanx.models:transformer", tmp_path, draw) for draw in (True, False))
    assert [(name, p.shape) for name, p in drawn.named_parameters()] == [
        (name, p.shape) for name, p in undrawn.named_parameters()
    ]
    others = dict(undrawn.named_buffers())
    assert all(buffer.equal(others[name]) for name, buffer in drawn.named_buffers())
    ones = dict(undrawn.named_parameters())
    constant = {name: p for name, p in drawn.named_parameters() if p.unique().numel() == 1}
    assert constant
    assert all(p.equal(ones[name]) for name, p in constant.items())


READERS = {
    "a mask": "self.mask = self.layer.weight > 0",
    "a buffer of a parameter": "self.register_buffer('fixed', self.layer.weight.detach(), persistent=False)",
    "a copy of the data": "self.fixed = self.layer.weight.data.clone()",
    "a number": "self.scale = self.layer.weight.abs().max().item()",
    "another parameter's memory": "self.other = torch.zeros(3, 64).copy_(self.layer.weight)",
    "the one that it draws": "nn.init.trunc_normal_(self.layer.weight)",
    "a row that it draws": "self.other = nn.Embedding(5, 4, padding_idx=0)",
    "what it hides": """
        try: self.scale = self.layer.weight.sum().item()
        except: self.scale = 1.0""",
    "a list of tensors": "self.joined = torch.cat([self.layer.weight, torch.zeros(1, 64)])",
    "memory that a parameter has": "w = torch.empty(9); nn.init.normal_(nn.Parameter(w)); self.mask = w > 0",
    "a random buffer": "self.register_buffer('noise', torch.randn(4), persistent=False)",
    "a random number": "self.scale = torch.rand(()).item()",
}


@pytest.mark.parametrize("reads", READERS)
def test_a_model_that_reads_what_it_draws_is_built_with_all_of_it(reads: str, tmp_path: Path) -> None:
    lines = ["super().__init__()", "self.layer = nn.Linear(vocab_size, 3)", READERS[reads]]
    body = "\n".join(f"        {line}" for line in lines)
    name = own(f"class Own(nn.Module):\n    def __init__(self, vocab_size):\n{body}", tmp_path)
    drawn, undrawn = (built(name, tmp_path, draw) for draw in (True, False))
    assert_same(drawn, undrawn)


HIDERS = {
    "in a list": "self.layers = [nn.Linear(vocab_size, 3)]",
    "in a dict": "self.layers = {'teacher': nn.Linear(vocab_size, 3)}",
    "as a plain attribute": "object.__setattr__(self, 'layers', [nn.Linear(vocab_size, 3)])",
    "as a buffer": "self.register_buffer('w', nn.init.normal_(nn.Parameter(torch.empty(3))), persistent=False)",
}


@pytest.mark.parametrize("hides", HIDERS)
def test_what_a_model_keeps_beside_its_parameters_is_drawn(hides: str, tmp_path: Path) -> None:
    body = f"        super().__init__()\n        {HIDERS[hides]}"
    name = own(f"class Own(nn.Module):\n    def __init__(self, vocab_size):\n{body}", tmp_path)
    drawn, undrawn = (built(name, tmp_path, draw) for draw in (True, False))
    for one, other in zip(hidden(drawn), hidden(undrawn), strict=True):
        assert one.equal(other)


def hidden(model: nn.Module) -> list[Tensor]:
    layers = getattr(model, "layers", [])
    kept = layers.values() if isinstance(layers, dict) else layers
    return [tensor for layer in kept for tensor in layer.parameters()] + list(model.buffers())


def test_a_parameter_that_the_builder_drops_need_not_be_drawn() -> None:
    with SkipInit() as undrawn:
        model = tied()
    assert undrawn.only_of(model)


def assert_same(one: nn.Module, other: nn.Module) -> None:
    pairs: list[tuple[Any, Any]] = [
        *zip(one.parameters(), other.parameters(), strict=True),
        *zip(one.buffers(), other.buffers(), strict=True),
        *((value, other.__dict__[name]) for name, value in one.__dict__.items() if isinstance(value, (Tensor, float))),
    ]
    assert all(a.equal(b) if isinstance(a, Tensor) else a == b for a, b in pairs)
