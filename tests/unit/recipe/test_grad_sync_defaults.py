"""What `auto` means for the warm-up of gradient synchronization."""

from typing import Any

import pytest

from phalanx.recipe import Recipe
from phalanx.recipe.grad_sync_defaults import num_warmup_steps

NO = {"determinism": "off"}


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
