"""What is no number that a key can have is refused by key, value and what may stand there."""

import json
from typing import Any

import pytest

from phalanx.errors import RecipeError
from phalanx.recipe import Recipe, load_recipe
from phalanx.recipe.field_types import ConfigModel
from phalanx.recipe.schema import DistillationConfig, EmbeddingConfig, GrpoConfig, PreferenceConfig, RewardConfig
from phalanx.recipe.schema_keys import find_schema, iterate_keys, iterate_variants
from phalanx.recipe.yaml_loader import KeyPath, format_key


def numbers_below(key: KeyPath) -> list[KeyPath]:
    """A key that holds a number, or the first place of a list of numbers."""
    forms = list(iterate_variants(find_schema(key, Recipe) or {}))
    if any(form.get("type") in ("integer", "number") for form in forms):
        return [key]
    if any("items" in form or "prefixItems" in form for form in forms):
        return numbers_below((*key, 0))
    return []


NUMBERS = sorted({each for key in iterate_keys(Recipe) for each in numbers_below(key)}, key=format_key)
"""The keys of all numbers."""
NAMES = [format_key(key) for key in NUMBERS]
TASKS: dict[type[ConfigModel], str] = {
    PreferenceConfig: "task={kind: preference}",
    DistillationConfig: "task={kind: distillation, teacher: run}",
    GrpoConfig: 'task={kind: grpo, reward: "module:function"}',
    RewardConfig: "task={kind: reward}",
    EmbeddingConfig: "task={kind: embedding}",
}


def refusal(name: str, text: str) -> str:
    """What is said of a recipe with this text for a number."""
    parts = name.split(".")
    if parts[-1] == "0":  # lists are given whole
        name, text = ".".join(parts[:-1]), f"[{text}, {text}]"
    with pytest.raises(RecipeError) as caught:
        load_recipe(None, [*task_with(name), f"{name}={text}"])
    return str(caught.value)


def task_with(name: str) -> list[str]:
    """An override for the task that has a key of this name, if it is one of a task."""
    top, _, field = name.partition(".")
    return [text for kind, text in TASKS.items() if top == "task" and field in kind.model_fields][:1]


def test_there_are_numbers_in_all_parts_of_a_recipe() -> None:
    assert len(NUMBERS) > 45
    assert {name.split(".")[0] for name in NAMES} >= {
        "adapter",
        "batch",
        "data",
        "grad_sync",
        "local_sgd",
        "parallelism",
        "optimizer",
    }


@pytest.mark.parametrize("text", ["-1", ".inf", ".nan", "true", "[]"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_out_of_bounds_or_no_number_is_refused_by_name(name: str, text: str) -> None:
    said = refusal(name, text)
    shown = name.removesuffix(".0")
    assert shown in said
    assert "expected" in said
    assert "\n" not in said.replace(f"\noverride {shown}", "")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("batch.global_size=true", "batch.global_size: found true, expected a whole number above 0"),
        ("optimizer.lr=0", "optimizer.lr: found 0, expected a number above 0"),
        (
            "optimizer.schedule.min_lr_ratio=2",
            "optimizer.schedule.min_lr_ratio: found 2, expected a number from 0 to 1",
        ),
        ("seed=9223372036854775808", "seed: found 9223372036854775808, expected a whole number from 0 to"),
    ],
)
def test_a_refusal_tells_the_value_and_its_bounds(given: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(None, [given])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ("steps=1e3", "steps", 1000),
        ("steps='1000'", "steps", 1000),
        ("optimizer.lr='1e-3'", "optimizer.lr", 1e-3),
        ("optimizer.lr=1", "optimizer.lr", 1.0),
        ("seed=9223372036854775807", "seed", 2**63 - 1),
    ],
)
def test_numbers_within_bounds_may_be_written_as_before(given: str, name: str, value: Any) -> None:
    found: Any = load_recipe(None, [given]).recipe
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_python_may_not_give_truth_for_a_number_either() -> None:
    with pytest.raises(ValueError, match="expected a number"):
        Recipe.model_validate(json.loads('{"num_threads": true}'))


@pytest.mark.parametrize("value", [".nan", ".inf", "{a: [1, {b: -.inf}]}"])
def test_arguments_of_a_model_are_finite(value: str) -> None:
    with pytest.raises(RecipeError, match=r"model\.args: found -?(nan|inf), expected finite numbers"):
        load_recipe(None, [f"model.args.dropout={value}"])
