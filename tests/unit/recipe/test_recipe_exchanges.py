"""Among which strategies of exchange a recipe leaves the choice."""

from typing import Any

import pytest

from phalanx.errors import RecipeError
from phalanx.recipe import Recipe
from phalanx.recipe.checks import check
from phalanx.recipe.exchanges import APART, BY_ACCURACY, LATEST, apart_from, candidates, cost_of, first_steps
from phalanx.recipe.schema import Exchange

NO = {"strategy": "auto", "exact": "no"}


def found(exchange: dict[str, Any], layout: Any = "auto", device: str = "cpu", **values: Any) -> tuple[str, ...]:
    return candidates(Recipe.model_validate({"exchange": exchange, "layout": layout, **values}), device)


@pytest.mark.parametrize(
    "layout", ["auto", {"replicate": 4}, {"replicate": 2, "tensor": 2}, {"replicate": 2, "shard": 2}]
)
def test_with_no_promise_replicas_may_send_fewer_bytes(layout: Any) -> None:
    assert found(NO, layout) == ("allreduce", "bf16", "int8")


@pytest.mark.parametrize("exact", ["world", "replicas"])
def test_promised_bits_leave_no_choice(exact: str) -> None:
    assert found({"exact": exact}, {"replicate": 4}) == ("allreduce",)


def test_a_given_strategy_leaves_no_choice() -> None:
    assert found({"strategy": "int8", "exact": "no"}, {"replicate": 4}) == ("int8",)


@pytest.mark.parametrize(
    "layout",
    [
        {"replicate": 1},
        {"tensor": 4},
        {"shard": 4},
        {"replicate": 2, "shard": 2, "tensor": 2},
        {"replicate": 2, "shard": 2, "expert": 2},
        {"replicate": 2, "pipeline": 2},
        {"replicate": 2, "context": 2},
    ],
)
def test_layouts_whose_replicas_are_summed_otherwise_leave_no_choice(layout: dict[str, int]) -> None:
    assert found(NO, layout) == ("allreduce",)


def test_on_a_gpu_fsdp_goes_on_summing_between_sharded_replicas() -> None:
    assert found(NO, {"replicate": 2, "shard": 2}, device="cuda") == ("allreduce",)
    assert found(NO, {"replicate": 4}, device="cuda") == ("allreduce", "bf16", "int8")


def test_a_loss_scale_that_changes_excludes_what_is_held_back() -> None:
    assert found(NO, {"replicate": 4}, precision="fp16") == ("allreduce", "bf16")


@pytest.mark.parametrize("layout", [{"replicate": 4}, {"replicate": 2, "tensor": 2}, {"replicate": 2, "shard": 2}])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_each_that_may_be_chosen_may_also_be_given(layout: dict[str, int], precision: str, tmp_path: Any) -> None:
    for strategy in found(NO, layout, precision=precision):
        values = {"exchange": {"strategy": strategy, "exact": "no"}, "layout": layout, "precision": precision}
        check(Recipe.model_validate(values), tmp_path, 4)
    assert set(BY_ACCURACY) >= set(found(NO, layout))


@pytest.mark.parametrize(("bound", "expected"), [("0.1%", ("allreduce",)), ("0.2%", BY_ACCURACY), ("5 %", BY_ACCURACY)])
def test_a_bound_on_the_loss_leaves_what_costs_no_more(bound: str, expected: tuple[str, ...]) -> None:
    assert found({**NO, "tolerance": bound}, {"replicate": 4}) == expected


def apart(bound: str | None, step: int = 100, **values: Any) -> Exchange | None:
    recipe = {"exchange": {**NO, "tolerance": bound}, "layout": {"replicate": 4}, **values}
    return apart_from(Recipe.model_validate(recipe), step)


def test_workers_may_train_apart_after_the_first_steps_where_the_loss_is_bounded() -> None:
    how = apart("9%", 130)
    assert how is not None
    assert (how.strategy, how.every, how.delay, how.wire, how.start) == ("diloco", 10, 2, "int8", 130)
    assert apart("9%", 99) is None


@pytest.mark.parametrize(
    ("exchange", "steps", "expected"),
    [
        ({"strategy": "diloco"}, 60, 100),
        ({"strategy": "local"}, 300, 100),
        ({"strategy": "local"}, 1000, 334),
        ({"strategy": "auto", "tolerance": "9%"}, 1000, 334),
        ({"strategy": "powersgd"}, 1000, 100),
        ({"strategy": "powersgd", "start": 7}, 1000, 7),
        ({"strategy": "diloco", "start": 0}, 1000, 0),
    ],
)
def test_the_first_steps_of_a_long_run_without_rounds_are_a_third_of_it(
    exchange: Any, steps: int, expected: int
) -> None:
    assert first_steps(Recipe.model_validate({"exchange": {"exact": "no", **exchange}, "steps": steps})) == expected


def test_workers_do_not_train_apart_before_the_step_that_is_given(tmp_path: Any) -> None:
    exchange = {**NO, "tolerance": "9%", "start": 300}
    recipe = Recipe.model_validate({"exchange": exchange, "layout": {"replicate": 4}})
    check(recipe, tmp_path, 4)
    assert apart_from(recipe, 299) is None
    assert apart_from(recipe, 300) is not None


@pytest.mark.parametrize(
    ("bound", "values"),
    [
        (None, {}),
        ("8.9%", {}),
        ("9%", {"layout": {"replicate": 2, "tensor": 2}}),
        ("9%", {"layout": {"replicate": 1}}),
        ("9%", {"optim": {"state": "8bit"}}),
        ("9%", {"exchange": {"strategy": "int8", "exact": "no", "tolerance": "9%"}}),
    ],
)
def test_workers_may_not_train_apart_without_a_bound_or_the_whole_model(bound: str | None, values: Any) -> None:
    assert apart(bound, **values) is None


def test_what_auto_may_turn_to_may_also_be_given(tmp_path: Any) -> None:
    how = {**APART, "delay": LATEST, "exact": "no", "tolerance": "9%"}
    check(Recipe.model_validate({"exchange": how, "layout": {"replicate": 4}}), tmp_path, 4)


@pytest.mark.parametrize(
    ("exchange", "told"),
    [
        (
            {"strategy": "powersgd", "exact": "no", "tolerance": "1%"},
            "powersgd .* 6.0% .* at least 6%, or strategy: auto",
        ),
        ({"strategy": "diloco", "exact": "no", "tolerance": "2%"}, "diloco .* 9.0% "),
        ({"strategy": "local", "start": 0, "exact": "no", "tolerance": "5%"}, "local .* 9.0% "),
        (
            {"strategy": "int8", "exact": "no", "tolerance": "0.1%"},
            "found 0.1%, but with strategy: int8 .* at least 0.2%",
        ),
        ({"tolerance": "1%"}, "exact: world sends fp32 .* or exact: no"),
    ],
)
def test_a_bound_that_excludes_what_is_asked_for_is_refused(exchange: Any, told: str, tmp_path: Any) -> None:
    recipe = Recipe.model_validate({"exchange": exchange, "layout": {"replicate": 4}})
    with pytest.raises(RecipeError, match=f"exchange.tolerance: .*{told}"):
        check(recipe, tmp_path, 4)


def test_what_sends_fp32_in_every_step_costs_nothing() -> None:
    assert cost_of(Exchange(strategy="ring")) == 0.0
