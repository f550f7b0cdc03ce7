"""Among which strategies of exchange a recipe leaves the choice."""

from typing import Any

import pytest

from phalanx.recipe import Recipe
from phalanx.recipe.checks import check
from phalanx.recipe.exchanges import BY_ACCURACY, candidates, first_steps

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


@pytest.mark.parametrize(
    ("exchange", "steps", "expected"),
    [
        ({"strategy": "diloco"}, 60, 100),
        ({"strategy": "local"}, 300, 100),
        ({"strategy": "local"}, 1000, 334),
        ({"strategy": "powersgd"}, 1000, 100),
        ({"strategy": "powersgd", "start": 7}, 1000, 7),
        ({"strategy": "diloco", "start": 0}, 1000, 0),
    ],
)
def test_the_first_steps_of_a_long_run_without_rounds_are_a_third_of_it(
    exchange: Any, steps: int, expected: int
) -> None:
    assert first_steps(Recipe.model_validate({"exchange": {"exact": "no", **exchange}, "steps": steps})) == expected
