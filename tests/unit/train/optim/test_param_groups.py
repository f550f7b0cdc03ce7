"""Weight decay by role, and groups of parameters with a learning rate or weight decay of their own."""

import pytest
import torch
from torch import nn

from phalanx.errors import RecipeError
from phalanx.recipe.schema import OptimizerConfig, ParamGroupConfig
from phalanx.train.optim.container import OptimizerContainer, select_muon_matrices


class Own(nn.Module):
    """Parameters of every role, in shapes that do not tell it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, 1, 8))
        self.table_bias = nn.Parameter(torch.ones(4, 8))
        self.matrix = nn.Parameter(torch.ones(4, 8))
        self.embedding = nn.Embedding(5, 8)
        self.norm = nn.LayerNorm([3, 8])
        self.convolution = nn.Conv2d(1, 1, 1)
        self.head = nn.Linear(8, 1)


def settings(optimizer: OptimizerContainer, key: str) -> dict[str, float]:
    return {
        optimizer.parameter_names[p]: group[key]
        for part in optimizer.optimizers
        for group in part.param_groups
        for p in group["params"]
    }


def config(*groups: ParamGroupConfig, name: str = "adamw") -> OptimizerConfig:
    return OptimizerConfig.model_validate({"name": name, "weight_decay": 0.5, "groups": list(groups)})


def test_norms_biases_and_vectors_do_not_decay_whatever_their_shape() -> None:
    decay = settings(OptimizerContainer(Own(), config()), "weight_decay")
    decayed = {"matrix", "embedding.weight", "convolution.weight", "head.weight"}
    assert {name for name, value in decay.items() if value == 0.5} == decayed
    assert {value for name, value in decay.items() if name not in decayed} == {0.0}


def test_the_first_group_that_matches_counts() -> None:
    groups = [
        ParamGroupConfig(match="head.*", lr_ratio=0.1),
        ParamGroupConfig(match="*.bias", weight_decay=0.25),
        ParamGroupConfig(match="embedding*", lr_ratio=2, weight_decay=0),
    ]
    optimizer = OptimizerContainer(Own(), config(*groups))
    optimizer.step(1e-3)
    rates, decay = settings(optimizer, "lr"), settings(optimizer, "weight_decay")
    assert {name: rates[name] for name in ("head.bias", "norm.bias", "embedding.weight", "matrix")} == {
        "head.bias": 1e-4,
        "norm.bias": 1e-3,
        "embedding.weight": 2e-3,
        "matrix": 1e-3,
    }
    assert [decay[name] for name in ("head.weight", "head.bias", "norm.bias", "embedding.weight")] == [0.5, 0, 0.25, 0]


@pytest.mark.parametrize("name", ["adamw", "sgd", "lars", "lamb"])
def test_a_group_learns_at_its_own_rate(name: str) -> None:
    def train(model: nn.Linear, lr: float, *groups: ParamGroupConfig) -> nn.Linear:
        optimizer = OptimizerContainer(model, config(*groups, name=name))
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step(lr)
        return model

    one, other = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
    other.load_state_dict(one.state_dict())
    expected = train(one, 0.5 * 1e-2).weight
    assert torch.equal(train(other, 1e-2, ParamGroupConfig(match="weight", lr_ratio=0.5)).weight, expected)


def test_muon_and_its_adamw_have_groups() -> None:
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 5))
    groups = [
        ParamGroupConfig(match="1.weight", lr_ratio=0.5, weight_decay=0),
        ParamGroupConfig(match="0.*", lr_ratio=2),
    ]
    optimizer = OptimizerContainer(model, config(*groups, name="muon"))
    assert settings(optimizer, "lr_ratio") == {
        "0.weight": 2.0, "1.weight": 0.5, "1.bias": 1.0, "2.weight": 1.0, "2.bias": 1.0
    }  # fmt: skip
    assert settings(optimizer, "weight_decay")["1.weight"] == 0.0


@pytest.mark.parametrize(
    ("matches", "message"),
    [
        (["heads.*"], r"groups.0.match: 'heads.\*' fits no parameter that is trained; .* did you mean head"),
        (["*", "head.*"], r"groups.1.match: 'head.\*' fits head.weight, which an earlier group has"),
        (["matrix"], r"groups.0.match: 'matrix' fits no parameter that is trained"),
    ],
)
def test_a_group_without_parameters_is_refused(matches: list[str], message: str) -> None:
    model = Own()
    model.matrix.requires_grad_(False)
    with pytest.raises(RecipeError, match=f"optimizer.{message}"):
        select_muon_matrices(model, config(*(ParamGroupConfig(match=match) for match in matches)))
