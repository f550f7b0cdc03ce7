"""A worker that trains looks for orders while its forward and its backward go."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.run.pulse import Silent
from phalanx.train.gang import Summoned
from phalanx.train.orders import Connections
from phalanx.train.place import Place
from phalanx.train.regroup import NOTHING, Found, Regrouping, calls_for
from phalanx.train.state import Progress, Standing


def listening(orders: Any, compiled: bool = False) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    unused: Any = None
    regrouping = Regrouping(orders, Connections(), Connections(), 0, Place(), unused, Silent(), unused, "")
    regrouping.listen([model], compiled)
    return model


def test_backward_ends_where_it_is_when_somebody_is_gone() -> None:
    orders = SimpleNamespace(urgent=False)
    model = listening(orders)

    class Lost(torch.autograd.Function):
        """Somebody is lost when backward is in the middle of the model."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            orders.urgent = True
            return gradient

    loss = model[1](Lost.apply(model[0](torch.ones(2, 4)))).sum()
    with pytest.raises(Summoned) as raised:
        loss.backward()
    assert calls_for(raised.value)
    assert model[1].weight.grad is not None
    assert [parameter.grad is None for parameter in model[0].parameters()].count(True) == 1


class Gone(nn.Module):
    """Somebody is lost when forward is in the middle of the model."""

    def __init__(self, orders: Any):
        super().__init__()
        self.orders = orders

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.orders.urgent = True
        return x


def test_forward_ends_where_it_is_when_somebody_is_gone() -> None:
    orders = SimpleNamespace(urgent=False)
    model = listening(orders)
    reached: list[str] = []
    model[1].register_forward_hook(lambda *_: reached.append("the end"))
    with pytest.raises(Summoned):
        nn.Sequential(model[0], Gone(orders), model[1])(torch.ones(2, 4))
    assert not reached


def test_an_evaluation_goes_on_when_somebody_is_gone() -> None:
    model = listening(SimpleNamespace(urgent=True)).eval()
    assert model(torch.ones(2, 4)).shape == (2, 1)


def test_a_compiled_forward_is_left_alone() -> None:
    model = listening(SimpleNamespace(urgent=True), compiled=True)
    loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(Summoned):
        loss.backward()


def test_an_order_that_can_wait_does_not_end_it() -> None:
    model = listening(SimpleNamespace(urgent=False, waiting=True))
    model(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("reached", "saving", "at_odds"),
    [
        ([7, 7], [NOTHING, NOTHING], False),
        ([7, 8], [6, 6], False),
        ([7, NOTHING], [NOTHING, NOTHING], False),
        ([8, 7], [8, NOTHING], True),
        ([8, 7], [NOTHING, 6], True),
    ],
)
def test_whether_a_save_can_go_along(reached: list[int], saving: list[int], at_odds: bool) -> None:
    found = Found(reached, [False, False], saving, 0, Standing(Progress(), 0), {}, None)
    assert found.at_odds is at_odds
