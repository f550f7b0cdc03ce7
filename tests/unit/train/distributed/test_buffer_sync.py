"""What forwards of a model change, found by two of them: whatever kinds of tensors the model holds."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from phalanx.train.distributed.buffer_sync import find_forward_changes


class Holding(nn.Module):
    """Holds a tensor in three ways and counts its forwards in three ways."""

    def __init__(self, held: Tensor, persistent: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("held", held, persistent=persistent)
        self.register_buffer("count", torch.zeros((), dtype=held.dtype if held.is_complex() else torch.int64))
        self.plain, self.number = held.clone(), 0

    def forward(self) -> None:
        self.count += 1
        self.number += 1


KINDS = {
    "fp8": lambda: torch.ones(4).to(torch.float8_e4m3fn),
    "fp8 scales": lambda: torch.ones(4).to(torch.float8_e8m0fnu),
    "unsigned": lambda: torch.ones(4, dtype=torch.uint16),
    "complex": lambda: torch.full((), float("nan"), dtype=torch.complex64),
    "not a number": lambda: torch.full((3,), float("nan")),
    "empty": lambda: torch.zeros(0, 3),
    "bool": lambda: torch.tensor(True),
}
ODD = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "sparse rows": lambda: torch.eye(4).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "without values": lambda: torch.ones(4, device="meta"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_what_changes_is_found_beside_tensors_of_any_dtype(kind: str) -> None:
    model = Holding(KINDS[kind](), persistent=True)
    assert find_forward_changes(model, model) == (["count"], ["number"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_what_changes_is_found_beside_tensors_that_no_checkpoint_holds(kind: str) -> None:
    model = Holding(ODD[kind](), persistent=False)
    assert find_forward_changes(model, model) == (["count"], ["number"])


class Average(nn.Module):
    """A layer of the older spectral norm, and a moving average that no checkpoint holds."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.layer = nn.utils.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("average", torch.zeros(4), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return y


@pytest.mark.parametrize("persistent", [True, False])
def test_what_is_computed_anew_from_what_is_saved_is_no_state(persistent: bool) -> None:
    torch.manual_seed(0)
    model, x = Average(persistent), torch.randn(3, 4)
    changed, lost = find_forward_changes(model, lambda: model(x))
    assert changed == [*(["average"] if persistent else []), "layer.weight_u", "layer.weight_v"]
    assert lost == ([] if persistent else ["average"])


class Drawing(nn.Module):
    """Draws from a generator that is its own, or Python's or numpy's."""

    def __init__(self, generator: object, draw: Callable[[], object]):
        super().__init__()
        self.generator, self.draw = generator, draw

    def forward(self) -> None:
        self.draw()


@pytest.mark.parametrize("kind", ["torch", "python", "numpy", "all of python", "all of numpy"])
def test_random_numbers_that_no_seed_of_a_run_reaches_are_found(kind: str) -> None:
    own, python, numpy = torch.Generator(), random.Random(0), np.random.default_rng(0)
    draws: dict[str, tuple[object, Callable[[], object], str]] = {
        "torch": (own, lambda: torch.rand(2, generator=model.generator), "generator"),
        "python": (python, python.random, "generator"),
        "numpy": (numpy, numpy.random, "generator"),
        "all of python": (None, random.random, "Python's random"),
        "all of numpy": (None, np.random.rand, "numpy.random"),
    }
    generator, draw, name = draws[kind]
    model: Any = Drawing(generator, draw)
    assert find_forward_changes(model, model) == ([], [name])


def test_torchs_own_random_numbers_are_no_state() -> None:
    model = Drawing(None, lambda: torch.rand(2))
    assert find_forward_changes(model, model) == ([], [])
