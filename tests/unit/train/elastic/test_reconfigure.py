"""A worker that trains looks for orders while its forward and its backward go."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.train.distributed.environment import DistEnv
from phalanx.train.elastic.membership import SocketRegistry
from phalanx.train.elastic.reconfigure import NO_STEP, PeerStates, Reconfiguration, requires_reconfiguration
from phalanx.train.train_context import MembershipChanged, WorkerProcess
from phalanx.train.train_state import SurvivorState, TrainState


def listening(orders: Any, compiled: bool = False) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    unused: Any = None
    regrouping = Reconfiguration(
        orders, SocketRegistry(), SocketRegistry(), 0, WorkerProcess(unused, unused, DistEnv(), unused), unused, ""
    )
    regrouping.install_membership_hooks([model], compiled)
    return model


def test_backward_ends_where_it_is_when_somebody_is_gone() -> None:
    orders = SimpleNamespace(worker_lost=False)
    model = listening(orders)

    class Lost(torch.autograd.Function):
        """Somebody is lost when backward is in the middle of the model."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            orders.worker_lost = True
            return gradient

    loss = model[1](Lost.apply(model[0](torch.ones(2, 4)))).sum()
    with pytest.raises(MembershipChanged) as raised:
        loss.backward()
    assert requires_reconfiguration(raised.value)
    assert model[1].weight.grad is not None
    assert [parameter.grad is None for parameter in model[0].parameters()].count(True) == 1


class Gone(nn.Module):
    """Somebody is lost when forward is in the middle of the model."""

    def __init__(self, orders: Any):
        super().__init__()
        self.orders = orders

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.orders.worker_lost = True
        return x


def test_forward_ends_where_it_is_when_somebody_is_gone() -> None:
    orders = SimpleNamespace(worker_lost=False)
    model = listening(orders)
    reached: list[str] = []
    model[1].register_forward_hook(lambda *_: reached.append("the end"))
    with pytest.raises(MembershipChanged):
        nn.Sequential(model[0], Gone(orders), model[1])(torch.ones(2, 4))
    assert not reached


def test_an_evaluation_goes_on_when_somebody_is_gone() -> None:
    model = listening(SimpleNamespace(worker_lost=True)).eval()
    assert model(torch.ones(2, 4)).shape == (2, 1)


def test_a_compiled_forward_is_left_alone() -> None:
    model = listening(SimpleNamespace(worker_lost=True), compiled=True)
    loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(MembershipChanged):
        loss.backward()


def test_an_order_that_can_wait_does_not_end_it() -> None:
    model = listening(SimpleNamespace(worker_lost=False, has_update=True))
    model(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("reached", "saving", "at_odds"),
    [
        ([7, 7], [NO_STEP, NO_STEP], False),
        ([7, 8], [6, 6], False),
        ([7, NO_STEP], [NO_STEP, NO_STEP], False),
        ([8, 7], [8, NO_STEP], True),
        ([8, 7], [NO_STEP, 6], True),
    ],
)
def test_whether_a_save_can_go_along(reached: list[int], saving: list[int], at_odds: bool) -> None:
    found = PeerStates(reached, [False, False], saving, 0, SurvivorState(TrainState(), 0), {})
    assert found.saves_diverged is at_odds
