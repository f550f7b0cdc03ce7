"""The learning rate over a run."""

import math
from itertools import pairwise

import pytest

from phalanx.recipe.schema import Schedule
from phalanx.train.schedule import factor

DECAYS = ["cosine", "linear", "constant"]


def schedule(decay: str, warmup: int = 10, final: float = 0.1) -> Schedule:
    return Schedule.model_validate({"decay": decay, "warmup": warmup, "final": final})


@pytest.mark.parametrize("decay", DECAYS)
def test_warm_up_is_linear_and_reaches_one_at_its_last_step(decay: str) -> None:
    assert [factor(schedule(decay), step, 100) for step in (1, 5, 10)] == [0.1, 0.5, 1.0]


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_decay_ends_at_the_final_share_at_the_last_step(decay: str) -> None:
    assert factor(schedule(decay), 100, 100) == pytest.approx(0.1)


@pytest.mark.parametrize("decay", DECAYS)
def test_the_rate_never_rises_after_warm_up(decay: str) -> None:
    rates = [factor(schedule(decay), step, 100) for step in range(10, 101)]
    assert all(after <= before for before, after in pairwise(rates))


def test_a_constant_rate_stays_at_one() -> None:
    assert {factor(schedule("constant"), step, 100) for step in range(10, 101)} == {1.0}


def test_halfway_a_cosine_is_halfway_down() -> None:
    assert factor(schedule("cosine", final=0.0), 55, 100) == pytest.approx(0.5)


def test_a_quarter_down_the_cosine_follows_its_formula() -> None:
    assert factor(schedule("cosine", warmup=0), 25, 100) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)


def test_without_warm_up_the_first_step_is_part_of_the_decay() -> None:
    assert factor(schedule("linear", warmup=0, final=0.0), 1, 10) == pytest.approx(0.9)


def test_a_longer_run_moves_the_horizon_of_the_decay() -> None:
    assert factor(schedule("linear"), 100, 200) > factor(schedule("linear"), 100, 100)
    assert factor(schedule("linear"), 200, 200) == pytest.approx(0.1)


def test_steps_beyond_the_horizon_keep_the_final_rate() -> None:
    assert factor(schedule("cosine"), 120, 100) == pytest.approx(0.1)


@pytest.mark.parametrize("decay", DECAYS)
def test_a_run_shorter_than_its_warm_up_only_rises(decay: str) -> None:
    assert [factor(schedule(decay, warmup=20), step, 10) for step in (1, 10)] == [0.05, 0.5]


@pytest.mark.parametrize("decay", DECAYS)
def test_a_run_may_be_one_step_long(decay: str) -> None:
    assert 0 < factor(schedule(decay, warmup=0), 1, 1) <= 1
