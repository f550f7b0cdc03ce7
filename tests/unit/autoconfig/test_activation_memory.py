"""What a sample takes at the peak of forward and backward, measured for each way of recomputing and of the loss; and
trials that run out of memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.autoconfig.profile_trial import (
    MemoryTrace,
    compute_sample_growth,
    measure_bytes_per_sample,
    profile_model,
    trace_memory,
)
from phalanx.autoconfig.timing_trial import time_precisions
from phalanx.autoconfig.trial_names import OTHER_LOAD_KEY
from phalanx.recipe import Recipe
from small_data import prepare

CPU = torch.device("cpu")
BLOCKS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(nn.functional.gelu(self.up(x))))

class Net(nn.Module):
    def __init__(self, vocab_size, width=32, layers=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

class InPlace(Block):
    def forward(self, x):
        return x + self.down(torch.relu_(self.up(x)))

class Changing(Net):
    def __init__(self, vocab_size):
        super().__init__(vocab_size)
        self.blocks = nn.ModuleList(InPlace(32) for _ in range(4))

class Biased(Net):
    def __init__(self, vocab_size):
        super().__init__(vocab_size, layers=2)
        self.head = nn.Linear(32, vocab_size)

class Huge(Net):
    def forward(self, tokens):
        if len(tokens) > 2:
            torch.empty(2**60)
        return super().forward(tokens)


class HugeInFp32(Net):
    def forward(self, tokens):
        if not torch.is_autocast_enabled("cpu"):
            torch.empty(2**60)
        return super().forward(tokens)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe's folder with models and prepared data."""
    folder = tmp_path_factory.mktemp("peak")
    (folder / "own_peak_blocks.py").write_text(BLOCKS)
    (folder / "a.txt").write_text("0123456789abcdef" * 400)
    prepare(folder, folder / "data", {"text": "*.txt"})
    return folder


def payload(folder: Path, builder: str = "Net", sequence: int = 64, **more: Any) -> dict[str, Any]:
    recipe = {
        "model": {"build": f"own_peak_blocks:{builder}"},
        "data": {"source": {"prepared": str(folder / "data")}, "seq_len": sequence},
    }
    values = Recipe.model_validate(recipe).model_dump(mode="json")
    return {"recipe": values, "folder": str(folder), "threads": 1, **more}


def layers(width: int, depth: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


def peak(model: nn.Module, width: int) -> int:
    def forward(samples: int) -> Tensor:
        loss: Tensor = model(torch.ones(samples, width)).sum()
        return loss

    return measure_bytes_per_sample(model, forward, CPU)


def test_a_sample_takes_what_its_layers_keep() -> None:
    width, depth = 64, 8
    kept = 4 * width * depth  # what each Tanh gives; the inputs of linear layers are the same tensors
    assert kept <= peak(layers(width, depth), width) <= kept + 4 * 4 * width


def test_gradients_do_not_hide_what_a_sample_takes_where_they_are_larger() -> None:
    """With one sample a step of this has its peak where the gradient of a weight is made; with many, elsewhere."""
    assert peak(layers(512, 4), 512) >= 4 * 512 * 4


def test_a_forward_with_a_sparse_matrix_is_followed() -> None:
    graph, weight = torch.eye(4).to_sparse(), torch.ones(4, 2, requires_grad=True)
    course = trace_memory(lambda: torch.sparse.mm(graph, weight).sum(), torch.device("cpu"))
    assert course.bytes_after_forward > 0


def test_storages_count_until_they_are_gone_and_views_do_not() -> None:
    def forward() -> Tensor:
        weight = torch.ones(1, requires_grad=True)
        big = torch.zeros(1000)
        views = [big.view(10, 100), big[5:]]
        del big, views
        return weight * 2

    course = trace_memory(forward, CPU)
    assert 4000 <= max(course.bytes_after_op) <= 4100
    assert course.bytes_after_op[-1] < 100


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        (MemoryTrace([10, 50, 90]), MemoryTrace([20, 80, 95]), 30),
        (MemoryTrace([10, 90], 10), MemoryTrace([10, 20, 100], 40), 30),
        (MemoryTrace([10, 90], 10), MemoryTrace([10, 20, 140], 40), 50),
        (MemoryTrace([10]), MemoryTrace([5]), 0),
        (MemoryTrace(), MemoryTrace(), 0),
    ],
)
def test_growth_is_the_largest_difference_at_the_same_operation(
    one: MemoryTrace, two: MemoryTrace, expected: int
) -> None:
    assert compute_sample_growth(one, two) == expected


def test_the_more_is_recomputed_the_less_a_sample_takes(folder: Path) -> None:
    peaks = profile_model(payload(folder))["peaks"]["whole"]
    assert peaks["none"] > 1.3 * peaks["selective"]
    assert peaks["selective"] > 1.3 * peaks["full"] > 0


def test_a_loss_in_chunks_takes_less_where_it_was_asked_for(folder: Path) -> None:
    peaks = profile_model(payload(folder, losses=["whole", "chunked"]))["peaks"]
    assert list(peaks) == ["whole", "chunked"]
    assert 0 < peaks["chunked"]["full"] < peaks["whole"]["full"]


def test_a_model_whose_output_layer_has_a_bias_has_no_loss_in_chunks(folder: Path) -> None:
    assert list(profile_model(payload(folder, "Biased", losses=["whole", "chunked"]))["peaks"]) == ["whole"]


def test_a_way_of_recomputing_that_does_not_go_with_the_model_is_left_out(folder: Path) -> None:
    peaks = profile_model(payload(folder, "Changing"))["peaks"]["whole"]
    assert peaks["selective"] is None
    assert peaks["none"] > peaks["full"] > 0


@pytest.mark.parametrize(("recompute", "chunked"), [("full", False), ("selective", True)])
def test_a_race_runs_as_the_recipe_will(folder: Path, recompute: str, chunked: bool) -> None:
    found = time_precisions(
        payload(folder, threads=1, micro=2, precisions=["fp32"], recompute=recompute, chunked_loss=chunked)
    )
    assert set(found) == {"fp32", "update", OTHER_LOAD_KEY}


def test_a_race_that_runs_out_of_memory_says_so(folder: Path) -> None:
    asked = payload(folder, "Huge", threads=1, micro=4, precisions=["fp32"])
    assert time_precisions(asked) == {"out_of_memory": 1.0}
    both = payload(folder, "HugeInFp32", threads=1, micro=4, precisions=["fp32", "bf16"])
    assert set(time_precisions(both)) == {"bf16", "update", OTHER_LOAD_KEY}
    assert time_precisions({**asked, "micro": 2})["fp32"] > 0
