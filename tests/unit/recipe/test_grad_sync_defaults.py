"""Among which methods of gradient synchronization a recipe leaves the choice."""

from typing import Any

import pytest

from phalanx.recipe import Recipe
from phalanx.recipe.checks import check_recipe
from phalanx.recipe.grad_sync_defaults import AUTO_COMPRESSIONS, auto_algorithms, num_warmup_steps

NO = {"determinism": "off"}


def found(sync: dict[str, Any], layout: Any = "auto", device: str = "cpu", **values: Any) -> tuple[str, ...]:
    return auto_algorithms(Recipe.model_validate({**sync, "parallelism": layout, **values}), device)


@pytest.mark.parametrize(
    "layout", ["auto", {"replicate": 4}, {"replicate": 2, "tensor": 2}, {"replicate": 2, "shard": 2}]
)
def test_with_no_promise_replicas_may_send_fewer_bytes(layout: Any) -> None:
    assert found(NO, layout) == ("all-reduce", "bf16", "int8")


@pytest.mark.parametrize("determinism", ["fixed-world", "elastic"])
def test_promised_bits_leave_no_choice(determinism: str) -> None:
    assert found({"determinism": determinism}, {"replicate": 4}) == ("all-reduce",)


def test_a_given_method_leaves_no_choice() -> None:
    assert found({**NO, "grad_sync": {"compression": "int8"}}, {"replicate": 4}) == ("int8",)


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
    assert found(NO, layout) == ("all-reduce",)


def test_on_a_gpu_fsdp_goes_on_summing_between_sharded_replicas() -> None:
    assert found(NO, {"replicate": 2, "shard": 2}, device="cuda") == ("all-reduce",)
    assert found(NO, {"replicate": 4}, device="cuda") == ("all-reduce", "bf16", "int8")


def test_a_loss_scale_that_changes_excludes_what_is_held_back() -> None:
    assert found(NO, {"replicate": 4}, precision="fp16") == ("all-reduce", "bf16")


@pytest.mark.parametrize("layout", [{"replicate": 4}, {"replicate": 2, "tensor": 2}, {"replicate": 2, "shard": 2}])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_each_that_may_be_chosen_may_also_be_given(layout: dict[str, int], precision: str, tmp_path: Any) -> None:
    for method in found(NO, layout, precision=precision):
        kind = "algorithm" if method == "all-reduce" else "compression"
        values = {**NO, "grad_sync": {kind: method}, "parallelism": layout, "precision": precision}
        check_recipe(Recipe.model_validate(values), tmp_path, 4)
    assert set(AUTO_COMPRESSIONS) >= set(found(NO, layout))


@pytest.mark.parametrize(
    ("sync", "steps", "expected"),
    [
        ({"local_sgd": {"method": "diloco"}}, 60, 100),
        ({"local_sgd": {"method": "average"}}, 300, 100),
        ({"local_sgd": {"method": "average"}}, 1000, 334),
        ({"grad_sync": {"compression": "powersgd"}}, 1000, 100),
        ({"grad_sync": {"compression": "powersgd", "warmup_steps": 7}}, 1000, 7),
        ({"local_sgd": {"warmup_steps": 0}}, 1000, 0),
    ],
)
def test_the_first_steps_of_a_long_run_without_rounds_are_a_third_of_it(sync: Any, steps: int, expected: int) -> None:
    assert num_warmup_steps(Recipe.model_validate({**NO, **sync, "steps": steps})) == expected
