"""An optimizer of the user's own loop under the engine's face: rates, state, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from phalanx.errors import RecipeError, UsageError
from phalanx.train.optim.user import UserOptimizer


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def train(model: nn.Module, adopted: UserOptimizer, steps: int, lr: float = 0.01, first: int = 0) -> Tensor:
    """Some steps; the parameters after them, flat."""
    for step in range(first, first + steps):
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(inputs).square().sum().backward()
        adopted.step(lr)
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


MAKERS = {
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_that_was_saved_and_loaded_goes_on_in_the_same_bits(name: str) -> None:
    model = make_model()
    adopted = UserOptimizer(model, MAKERS[name](model.parameters()))
    train(model, adopted, 3)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    state = {key: value.clone() for key, value in adopted.state().items()}
    expected = train(model, adopted, 3, first=3)

    again = make_model()
    again.load_state_dict(weights)
    resumed = UserOptimizer(again, MAKERS[name](again.parameters()))
    resumed.load(state, "checkpoint")
    assert torch.equal(train(again, resumed, 3, first=3), expected)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_groups_follow_the_schedule_in_the_loops_proportion(as_tensor: bool) -> None:
    model = make_model()
    first, *rest = model.parameters()
    rates: list[Any] = [torch.tensor(0.1), torch.tensor(0.4)] if as_tensor else [0.1, 0.4]
    groups = [{"params": [first], "lr": rates[0]}, {"params": rest, "lr": rates[1]}]
    optimizer = torch.optim.AdamW(groups, capturable=False, foreach=False)
    adopted = UserOptimizer(model, optimizer)
    assert adopted.base_lr == pytest.approx(0.4)
    train(model, adopted, 1, lr=0.2)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.05, 0.2])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda p: torch.optim.SGD(make_model().parameters(), lr=0.1),
            "has 6 parameters that are not the model's; make",
        ),
        (lambda p: torch.optim.SGD(p[:2], lr=0.1), r"leaves out 4 parameters .* such as 1.weight; .* freeze"),
        (lambda p: torch.optim.SGD(p, lr=0.0), "learning rate is 0"),
    ],
    ids=["built before the model was divided", "parameters that would get no update", "learning rate of zero"],
)
def test_an_optimizer_that_cannot_be_adopted_is_refused(build: Any, message: str) -> None:
    model = make_model()
    with pytest.raises(UsageError, match=message):
        UserOptimizer(model, build(list(model.parameters())))


def test_frozen_parameters_may_be_given_or_left_out() -> None:
    for own in (False, True):
        model = make_model()
        model[0].requires_grad_(False)  # type: ignore[index,union-attr]
        given = [p for p in model.parameters() if own or p.requires_grad]
        before = model[0].weight.clone()  # type: ignore[index,union-attr]
        adopted = UserOptimizer(model, torch.optim.AdamW(given, lr=0.1))
        train(model, adopted, 1)
        assert sorted(adopted.parameter_names.values()) == ["1.bias", "1.weight", "2.bias", "2.weight"]
        assert torch.equal(before, model[0].weight)  # type: ignore[index,union-attr]


def test_an_optimizer_of_whole_matrices_is_refused_where_they_are_cut() -> None:
    model = nn.Linear(3, 3, bias=False)
    with pytest.raises(UsageError, match=r"under parallelism.tensor and expert Muon would see slices of matrices"):
        UserOptimizer(model, torch.optim.Muon(model.parameters()), is_sharded=True, is_sliced=True)
    UserOptimizer(model, torch.optim.AdamW(model.parameters()), is_sharded=True, is_sliced=True)


class Stepping(torch.optim.SGD):
    """Keeps numbers in its groups, as Prodigy and schedule-free do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["pair"] = (0.5 / group["k"], True)
            group["d"] = group.get("d", torch.tensor(1.0)) * 0.9
            for parameter in group["params"]:
                parameter.grad = parameter.grad * group["pair"][0] * group["d"]
        super().step(closure)


def test_state_in_the_groups_goes_on_in_the_same_bits_and_is_reset_by_a_checkpoint_without_it() -> None:
    model = make_model()
    adopted = UserOptimizer(model, Stepping(model.parameters(), lr=0.01, momentum=0.5))
    assert adopted.group_settings() == {}
    start = {key: value.clone() for key, value in model.state_dict().items()}
    train(model, adopted, 3)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    state, settings = {key: value.clone() for key, value in adopted.state().items()}, adopted.group_settings()
    expected = train(model, adopted, 3, first=3)

    again = make_model()
    again.load_state_dict(weights)
    resumed = UserOptimizer(again, Stepping(again.parameters(), lr=0.01, momentum=0.5))
    resumed.load(state, "checkpoint")
    resumed.load_group_settings(settings, "checkpoint")
    assert torch.equal(train(again, resumed, 3, first=3), expected)
    again.load_state_dict(start)
    resumed.load({}, "checkpoint")
    resumed.load_group_settings({}, "checkpoint")
    assert resumed.group_settings() == {}
    train(again, resumed, 3)
    assert all(torch.equal(value, weights[key]) for key, value in again.state_dict().items())


class Holding(torch.optim.SGD):
    """Keeps in a group what no checkpoint holds."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.param_groups[0]["memory"] = {1, 2}


class Global(torch.optim.SGD):
    """Keeps state that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.state["all"]["k"] = torch.ones(1)


def test_state_that_a_checkpoint_cannot_hold_is_told_in_the_first_step() -> None:
    model = make_model()
    with pytest.raises(RecipeError, match="a parameter group of Holding holds set, which is not saved"):
        train(model, UserOptimizer(model, Holding(model.parameters(), lr=0.1)), 1)
    with pytest.raises(UsageError, match="Global keeps state under 'all', which is no parameter"):
        train(model, UserOptimizer(model, Global(model.parameters(), lr=0.1)), 1)


class Late(torch.optim.SGD):
    """Keeps a number that is no tensor from its third step on."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        type(self).steps += 1
        if self.steps == 3:
            self.state[self.param_groups[0]["params"][0]]["count"] = 1


def test_state_that_comes_later_is_told_in_the_step_in_which_it_comes() -> None:
    model = make_model()
    adopted = UserOptimizer(model, Late(model.parameters(), lr=0.1, momentum=0.5))
    train(model, adopted, 2)
    with pytest.raises(UsageError, match=r"Late keeps 'count' of 0.weight as int, and only tensors are saved"):
        train(model, adopted, 1, first=2)


def test_an_array_in_a_group_is_told_when_it_changes() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["array"] = np.zeros(2)
    adopted = UserOptimizer(model, optimizer)
    train(model, adopted, 1)
    optimizer.param_groups[0]["array"][0] = 1
    with pytest.raises(RecipeError, match="a parameter group of SGD holds ndarray, which is not saved"):
        train(model, adopted, 1)


SCHEDULERS: dict[str, Any] = {
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
    "by hand": lambda optimizer: optimizer.param_groups[0].update(lr=0.001),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_the_loops_own_is_refused_in_the_first_step(name: str) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    adopted = UserOptimizer(model, optimizer)
    SCHEDULERS[name](optimizer)
    with pytest.raises(UsageError, match=r"session.step: the loop .*give its warmup and decay as optimizer.schedule"):
        train(model, adopted, 1)


def test_a_rate_that_the_loop_changes_later_is_refused_in_the_next_step() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    adopted = UserOptimizer(model, optimizer)
    train(model, adopted, 2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    plateau.step(1.0)
    train(model, adopted, 1)
    plateau.step(2.0)
    with pytest.raises(UsageError, match=r"session.step: the loop changed a learning rate to 0.001"):
        train(model, adopted, 1)


def test_state_of_another_shape_is_told_where_parameters_are_divided() -> None:
    model = make_model()
    adopted = UserOptimizer(model, torch.optim.Adafactor(model.parameters(), lr=0.1), is_sharded=True)
    with pytest.raises(
        UsageError, match=r"Adafactor keeps 'row_var' of 0.weight in another shape .* parallelism.replicate"
    ):
        train(model, adopted, 1)
