"""`grad_sync.algorithm: auto` between two ranks, with times made up: all switch after the same step, and nothing of the
gradients is lost on the way."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.recipe import Recipe
from phalanx.run import Event
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.grad_sync import BucketedReducer
from phalanx.train.grad_sync.autoselect import MIN_MEASURED_STEPS, WARMUP_STEPS, GradSyncSelector
from phalanx.train.grad_sync.selection import SelectionState
from phalanx.train.train_state import TrainState
from process_worlds import ProcessWorlds

SHAPES = ((33, 7), (5,), (200,), (16, 16))
CAPACITY = 1000.0  # bytes: several buckets
COMPUTING, BACKWARD = 1.0, 0.5
TRIAL = WARMUP_STEPS + MIN_MEASURED_STEPS
"""Steps with a strategy before it is judged."""
SLOW = {"all-reduce": 1.0, "bf16": 0.5, "int8": 0.2}
"""Exposed seconds of a step."""


class Rank:
    """A rank that trains nothing: gradients of its own, an exchange, and a watch that is told made-up times."""

    def __init__(self, rank: int, world: int, exact: str = "off", choice: SelectionState | None = None):
        self.rank, self.step = rank, 0
        self.weights = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        self.grad_sync_selector = BucketedReducer(
            self.weights,
            rank=rank,
            world_size=world,
            micro_batches=world,
            is_elastic=False,
            bucket_bytes=CAPACITY,
            num_metric_slots=2,
        )
        values = {
            "determinism": exact,
            "precision": "fp32",
            "parallelism": {"replicate": world},
        }
        self.train_state = TrainState(grad_sync_selection=choice or SelectionState())
        self.events: list[Event] = []
        recipe, place = Recipe.model_validate(values), DistEnv(rank, world)
        self.timer = GradSyncSelector(recipe, place, self.grad_sync_selector, 1, self.train_state, self._report_event)
        self.strategies: list[str] = []
        self.gone = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]  # into sums, and what came of it
        self.came = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]

    def _report_event(self, event: Event) -> None:
        self.events.append(replace(event, time=0.0))

    def train(self, steps: int, exposed: dict[str, float]) -> None:
        for _ in range(steps):
            self.strategies.append(self.train_state.grad_sync_selection.algorithm)
            self.sum()
            waits = exposed.get(self.train_state.grad_sync_selection.algorithm, exposed["all-reduce"])
            # The other rank computes longer, so this one waits for it besides; and a checkpoint takes its time.
            parts = {"grad_sync": waits + 0.7 * self.rank, "backward": BACKWARD, "checkpoint_stall": 3.0}
            self.timer.record_step(COMPUTING + waits + 3.0, parts)
            self.train_state.step += 1
            self.timer.select_if_due()

    def sum(self) -> None:
        draws = [torch.Generator().manual_seed(100 * self.step + rank) for rank in range(2)]
        gradients = [[torch.randn(shape, generator=draw) for shape in SHAPES] for draw in draws]
        for weight in self.weights:
            weight.grad = None
        if self.grad_sync_selector.metric_slots is not None:
            self.grad_sync_selector.metric_slots.copy_(torch.tensor([1e6, self.step]))
        self.grad_sync_selector.begin_backward(self.rank)
        pairs = zip(self.weights, gradients[self.rank], strict=True)
        torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum().backward()
        self.grad_sync_selector.end_backward()
        self.grad_sync_selector.reduce_gradients()
        if self.grad_sync_selector.metric_slots is not None:
            assert self.grad_sync_selector.metric_slots.tolist() == [2e6, 2 * self.step]
        for went, came, weight, one, other in zip(self.gone, self.came, self.weights, *gradients, strict=True):
            assert weight.grad is not None
            went += one.double() + other
            came += weight.grad
        self.step += 1


def trained(rank: int, world: int, *, steps: int, exact: str = "off") -> dict[str, Any]:
    """Over the slow network."""
    worker = Rank(rank, world, exact)
    worker.train(steps, SLOW)
    worker.grad_sync_selector.close()
    found = {"strategies": worker.strategies, "events": worker.events, "choice": worker.train_state.grad_sync_selection}
    return {**found, "holds": bool(worker.grad_sync_selector.residuals())}


def test_all_ranks_switch_after_the_same_steps_and_stay_with_the_best(world: ProcessWorlds) -> None:
    one, other = world.run_once(2, trained, steps=3 * TRIAL + 3)
    assert one == other
    assert one["strategies"] == ["all-reduce"] * TRIAL + ["bf16"] * TRIAL + ["int8"] * (TRIAL + 3)
    assert one["choice"].is_final
    assert one["holds"]


def test_every_decision_is_told_with_its_reason(world: ProcessWorlds) -> None:
    first, second, third = world.run_once(2, trained, steps=3 * TRIAL + 3)[0]["events"]
    assert [(e.step, e.selected, e.previous) for e in (first, second, third)] == [
        (TRIAL, "bf16", "all-reduce"),
        (2 * TRIAL, "int8", "bf16"),
        (3 * TRIAL, "int8", "int8"),
    ]
    assert first.exposed_fraction == pytest.approx(1.0 / 2.0)  # without what one rank waits for the other
    assert first.efficiency_by_choice == {"all-reduce": pytest.approx(0.5)}
    assert first.predicted_efficiency == pytest.approx(1.0 / 1.25)
    assert [e.is_final for e in (first, second, third)] == [False, False, True]
    assert third.efficiency_by_choice == pytest.approx({"all-reduce": 1 / 2.0, "bf16": 1 / 1.5, "int8": 1 / 1.2})
    assert "50.0% of a step is exposed" in first.reason


@pytest.mark.parametrize("exact", ["fixed-world", "elastic"])
def test_where_bits_are_promised_nothing_is_switched_and_it_is_told_once_what_that_costs(
    world: ProcessWorlds, exact: str
) -> None:
    for found in world.run(2, trained, steps=2 * TRIAL + 1, exact=exact):
        assert not found["holds"]
        (event,) = found["events"]
        assert event.step == TRIAL
        assert event.selected == event.previous == ("all-reduce" if exact == "fixed-world" else "fixed tree")
        assert "determinism: off would allow int8" in event.reason
        assert event.exposed_fraction == pytest.approx(0.5)


def switched(rank: int, world: int, *, way: list[str]) -> list[float]:
    """After two steps with each strategy: the most that is in the gradients so far and not in the sums so far."""
    worker, found = Rank(rank, world, "fixed-world"), []
    for strategy in way:
        worker.grad_sync_selector.switch_algorithm(strategy)
        for _ in range(2):
            worker.sum()
        found.append(max(float((a - b).abs().max()) for a, b in zip(worker.gone, worker.came, strict=True)))
    worker.grad_sync_selector.close()
    return found


def test_what_was_held_back_is_sent_with_the_first_gradients_of_another_strategy(world: ProcessWorlds) -> None:
    for found in world.run(2, switched, way=["all-reduce", "int8", "all-reduce", "int8", "all-reduce"]):
        exact, rough, settled, again, at_last = found
        assert max(exact, settled, at_last) < 1e-5
        assert min(rough, again) > 1e-3
