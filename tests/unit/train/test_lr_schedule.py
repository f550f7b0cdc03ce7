"""The learning rate over a run."""

import math
from itertools import pairwise

import pytest

from phalanx.recipe.schema import LrScalingConfig, LrScheduleConfig, Recipe
from phalanx.train.lr_schedule import compute_learning_rate, lr_factor, peak_learning_rate

DECAYS = ["cosine", "linear", "wsd", "poly", "step", "constant"]


def schedule(decay: str, warmup: int = 10, final: float = 0.1) -> LrScheduleConfig:
    return LrScheduleConfig.model_validate({"decay": decay, "warmup_steps": warmup, "min_lr_ratio": final})


@pytest.mark.parametrize("decay", DECAYS)
def test_warm_up_is_linear_and_reaches_one_at_its_last_step(decay: str) -> None:
    assert [lr_factor(schedule(decay), step, 100) for step in (1, 5, 10)] == [0.1, 0.5, 1.0]


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd", "poly"])
def test_decay_ends_at_the_final_share_and_stays_there(decay: str) -> None:
    assert [lr_factor(schedule(decay), step, 100) for step in (100, 120)] == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize("decay", DECAYS)
def test_the_rate_never_rises_after_warm_up(decay: str) -> None:
    rates = [lr_factor(schedule(decay), step, 100) for step in range(10, 101)]
    assert all(after <= before for before, after in pairwise(rates))


def test_a_quarter_down_the_cosine_follows_its_formula() -> None:
    assert lr_factor(schedule("cosine", warmup=0), 25, 100) == pytest.approx(
        0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2
    )


def test_wsd_is_stable_until_its_last_part_and_falls_with_the_root_of_it() -> None:
    wsd = LrScheduleConfig(warmup_steps=10, decay="wsd", decay_fraction=0.2, min_lr_ratio=0.0)
    assert [lr_factor(wsd, step, 100) for step in (11, 80)] == [1.0, 1.0]
    assert lr_factor(wsd, 85, 100) == pytest.approx(1 - math.sqrt(0.25))


def test_without_warm_up_the_first_step_is_part_of_the_decay() -> None:
    assert lr_factor(schedule("linear", warmup=0, final=0.0), 1, 10) == pytest.approx(0.9)


@pytest.mark.parametrize("decay", DECAYS)
def test_a_run_shorter_than_its_warm_up_only_rises(decay: str) -> None:
    assert [lr_factor(schedule(decay, warmup=20), step, 10) for step in (1, 10)] == [0.05, 0.5]


@pytest.mark.parametrize("decay", DECAYS)
def test_a_run_may_be_one_step_long(decay: str) -> None:
    assert 0 < lr_factor(schedule(decay, warmup=0), 1, 1) <= 1


def test_poly_is_caffes_power_of_what_is_left() -> None:
    """GoogLeNet's solver: base_lr x (1 - iter / max_iter)^0.5."""
    poly = LrScheduleConfig(warmup_steps=0, decay="poly", power=0.5, min_lr_ratio=0.0)
    assert [lr_factor(poly, step, 100) for step in (19, 75, 100)] == [0.9, 0.5, 0.0]


def test_steps_drop_where_caffes_policy_drops() -> None:
    """NiN's solver: gamma^floor(iter / stepsize), where iter counts from 0: 220 iterations, stepsize 100."""
    drops = LrScheduleConfig(warmup_steps=0, decay="step", milestones=[10 / 22, 20 / 22], gamma=0.1)
    found = [lr_factor(drops, step, 220) for step in (1, 100, 101, 200, 201, 220)]
    assert found == pytest.approx([0.1 ** ((step - 1) // 100) for step in (1, 100, 101, 200, 201, 220)])


def scaled(batch: int, **scaling: object) -> Recipe:
    values = {"base_batch_size": 64, "warmup_steps": 100, **scaling}
    optim = {"lr": 0.01, "schedule": {"warmup_steps": 0, "decay": "constant"}, "lr_scaling": values}
    return Recipe.model_validate({"batch": {"global_size": batch}, "steps": 1000, "optimizer": optim})


@pytest.mark.parametrize(("rule", "times"), [("linear", 16.0), ("sqrt", 4.0)])
def test_the_rate_follows_the_batch_by_its_rule(rule: str, times: float) -> None:
    assert compute_learning_rate(scaled(1024, rule=rule), 500) == pytest.approx(0.01 * times)
    assert peak_learning_rate(scaled(1024, rule=rule)) == pytest.approx(0.01 * times)


@pytest.mark.parametrize(
    ("batch", "warmup_steps", "rate"), [(1024, 0, 0.16), (16, 100, 0.0025), (64, 100, 0.01)], ids=str
)
def test_without_warm_up_or_for_no_larger_a_batch_the_first_step_has_the_whole_rate(
    batch: int, warmup_steps: int, rate: float
) -> None:
    assert compute_learning_rate(scaled(batch, warmup_steps=warmup_steps), 1) == pytest.approx(rate)


def test_its_warm_up_is_a_line_from_the_given_rate_to_that_of_the_batch() -> None:
    """Goyal et al. 2017, sec. 2.2."""
    recipe = scaled(1024)
    rates = [compute_learning_rate(recipe, step) for step in range(1, 102)]
    assert rates[0] == pytest.approx(0.01 * (1 + 15 / 100))
    steps = [after - before for before, after in pairwise(rates[:100])]
    assert steps == pytest.approx([0.01 * 15 / 100] * 99)
    assert rates[99] == rates[100] == pytest.approx(0.16)


def test_scaling_goes_on_top_of_the_schedule() -> None:
    plain = Recipe.model_validate({"steps": 300, "optimizer": {"lr": 0.01}})
    scaled = plain.model_copy(
        update={"optimizer": plain.optimizer.model_copy(update={"lr_scaling": LrScalingConfig(base_batch_size=4)})}
    )
    ratio = [compute_learning_rate(scaled, step) / compute_learning_rate(plain, step) for step in (10, 200, 300)]
    assert ratio == pytest.approx([1 + 3 * 10 / 200, 4.0, 4.0])
