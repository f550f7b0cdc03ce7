"""Rules of tensor parallel before anything is cut: what they match, and what is said of rules that cannot be."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.errors import RecipeError
from phalanx.train.distributed.tensor_parallel import apply_tensor_parallel, check_tp_plan, resolve_styles


class Net(nn.Module):
    """Embedding, two blocks with a normalisation inside, and a head that may be tied to the embedding."""

    def __init__(self, width: int = 6, inner: int = 12, vocab: int = 10, tie: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, inner), "norm": nn.LayerNorm(inner), "down": nn.Linear(inner, width)})
            for _ in range(2)
        )
        self.head = nn.Linear(width, vocab, bias=False)
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block["down"](block["norm"](block["up"](x)))
        return self.head(x)


def net(**options: Any) -> Net:
    with torch.device("meta"):
        return Net(**options)


RULES = {"blocks.*": "region", "blocks.*.up": "columns", "blocks.*.norm": "shared", "blocks.*.down": "rows"}


def test_a_pattern_gives_each_module_that_it_matches_its_style() -> None:
    assert resolve_styles(net(), {"blocks.*.up": "columns", "head": "head"}) == {
        "blocks.0.up": "columns",
        "blocks.1.up": "columns",
        "head": "head",
    }


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"head": "diagonal"}, r"model.tp_plan\.head: no style 'diagonal'; expected region, columns, rows, "),
        (
            {"blocks.*.upp": "rows"},
            r"model.tp_plan\.blocks\.\*\.upp: matches no module; the model's are named embedding, ",
        ),
        (
            {"blocks.*.up": "columns", "blocks.1.up": "rows"},
            r"model.tp_plan\.blocks\.1\.up: makes blocks\.1\.up rows, another rule makes it columns$",
        ),
        ({"embedding": "columns"}, r"model.tp_plan: embedding is Embedding, and columns is for Linear$"),
        ({"head": "vocabulary"}, r"model.tp_plan: head is Linear, and vocabulary is for Embedding$"),
        ({"blocks.*.norm": "rows"}, r"model.tp_plan: blocks\.0\.norm is LayerNorm, and rows is for Linear$"),
        (
            {"blocks.*.norm": "columns-conv1d"},
            r"model.tp_plan: blocks\.0\.norm is LayerNorm, and columns-conv1d is for ",
        ),
        (
            {"blocks.*": "region", "blocks.*.up": "columns", "blocks.*.down": "rows"},
            r"model.tp_plan: blocks\.0\.norm has parameters and lies in blocks\.0 \(region\), so it needs a style; ",
        ),
    ],
)
def test_rules_that_cannot_be_are_told_with_rule_and_module(rules: dict[str, str], expected: str) -> None:
    with pytest.raises(RecipeError, match=f"^{expected}"):
        check_tp_plan(net(), rules, 2)


@pytest.mark.parametrize(
    ("options", "rules", "ranks"),
    [
        ({}, RULES, 3),
        ({"vocab": 11}, {"embedding": "vocabulary", "head": "head"}, 4),
        ({"tie": True}, {"embedding": "vocabulary", "head": "head"}, 2),
        ({"tie": True}, RULES, 2),
    ],
    ids=["blocks", "any vocabulary", "a tied weight is cut in its places", "a tied weight stays whole"],
)
def test_rules_that_fit_are_accepted(options: dict[str, Any], rules: dict[str, str], ranks: int) -> None:
    check_tp_plan(net(**options), rules, ranks)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (RULES, r"parallelism.tensor: blocks\.0\.up \(columns\) has 12 features, which 5 ranks cannot share$"),
        (
            {"blocks.*.down": "rows"},
            r"parallelism.tensor: blocks\.0\.down \(rows\) has 12 features, which 5 ranks cannot",
        ),
    ],
)
def test_features_that_do_not_divide_are_told_with_the_layer(rules: dict[str, str], expected: str) -> None:
    with pytest.raises(RecipeError, match=f"^{expected}"):
        check_tp_plan(net(), rules, 5)


class Conv1D(nn.Module):
    """As transformers' own: the weight is [in, out]."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))


def test_each_part_of_a_fused_matrix_must_divide() -> None:
    model = nn.Sequential(Conv1D(4, 18))
    check_tp_plan(model, {"0": "columns-conv1d:3"}, 2)
    check_tp_plan(model, {"0": "columns-conv1d"}, 9)
    with pytest.raises(
        RecipeError, match=r"^parallelism.tensor: 0 .* has 18 features \(3 x 6\), which 9 ranks cannot share"
    ):
        check_tp_plan(model, {"0": "columns-conv1d:3"}, 9)


@pytest.mark.parametrize("rules", [{"embedding": "vocabulary"}, {"head": "head"}, {"head": "rows"}])
def test_a_tied_weight_that_only_one_place_would_cut_is_told_with_both(rules: dict[str, str]) -> None:
    tied = r"^model.tp_plan: embedding and head share a weight \(tied\), but only one of them would be cut, or each"
    with pytest.raises(RecipeError, match=tied):
        check_tp_plan(net(tie=True), rules, 2)


def test_a_group_of_one_cuts_nothing() -> None:
    model = net()
    division = apply_tensor_parallel(model, RULES, None)
    assert (division.dim_shards, division.partial_grads, division.vocab_group) == ({}, set(), None)
    assert model.blocks[0]["up"].weight.shape == (12, 6)
