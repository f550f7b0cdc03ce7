"""What forwards of a model change, found by two of them: whatever kinds of tensors the model holds."""

import pytest
import torch
from torch import Tensor, nn

from phalanx.train.forward_state import what_changes


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
    assert what_changes(model, model) == (["count"], ["number"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_what_changes_is_found_beside_tensors_that_no_checkpoint_holds(kind: str) -> None:
    model = Holding(ODD[kind](), persistent=False)
    assert what_changes(model, model) == (["count"], ["number"])


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
    changed, lost = what_changes(model, lambda: model(x))
    assert changed == [*(["average"] if persistent else []), "layer.weight_u", "layer.weight_v"]
    assert lost == ([] if persistent else ["average"])
