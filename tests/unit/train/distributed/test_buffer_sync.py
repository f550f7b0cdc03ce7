"""What a forward of a model changes is found: whatever kinds of tensors the model holds."""

import pytest
import torch
from torch import Tensor, nn

from phalanx.train.distributed.buffer_sync import find_forward_changes


class Holding(nn.Module):
    """Holds a tensor in three ways and counts its forwards."""

    def __init__(self, held: Tensor, persistent: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("held", held, persistent=persistent)
        self.register_buffer("count", torch.zeros((), dtype=held.dtype if held.is_complex() else torch.int64))
        self.plain = held.clone()

    def forward(self) -> None:
        self.count += 1


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
@pytest.mark.parametrize("kind", [*KINDS, *ODD])
def test_what_changes_is_found_with_tensors_of_any_kind(kind: str) -> None:
    model = Holding((KINDS | ODD)[kind](), persistent=kind in KINDS)
    assert find_forward_changes(model, model) == ["count"]
