"""What differs between two recipes, and which differences a resumed run may have."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.recipe.schema import Recipe
from phalanx.recipe.schema_keys import can_be_auto
from phalanx.recipe.validation_errors import describe_value

KEYS_FREE_ON_RESUME = (
    "name",
    "steps",
    "epochs",
    "checkpoint",
    "fault_tolerance",
    "trackers",
    "callbacks",
    "evaluation.every",
    "evaluation.max_samples",
    "evaluation.tasks",
    "evaluation.tasks_every",
    "parallelism",
    "device",
)
"""Keys that may change when a run resumes; every other key changes the mathematics or its rounding.

`evaluation.holdout_fraction` and `evaluation.source` are not free: they say what training never sees. `parallelism` and
`device` are: they change rounding only, and a note says so.
"""
KEYS_NOT_COMPARED = ("data.source", "data.tokenizer", "evaluation.source", "batch.micro_size")
"""Keys of a recipe that say where data lie, which a fingerprint stands for, and in which parts a batch is computed."""


@dataclass(frozen=True)
class RecipeDifference:
    """One key with a different value. None stands for null and for a missing key."""

    key: str
    old_value: Any
    new_value: Any

    def __str__(self) -> str:
        return f"{self.key}: {describe_value(self.old_value)} -> {describe_value(self.new_value)}"


def diff_recipes(old: Recipe, new: Recipe) -> list[RecipeDifference]:
    """Return the keys with different values, the deepest that both recipes have, in the recipe's order."""
    return list(_diff_values(old.model_dump(), new.model_dump(), ""))


def is_free_on_resume(key: str) -> bool:
    """Whether a run may resume with another value of `key`."""
    return any(key == free or key.startswith(f"{free}.") for free in KEYS_FREE_ON_RESUME)


def is_mathematics(key: str, trained: Recipe) -> bool:
    """Whether a value of `key` in resolved.yaml must be that of the checkpoint's own recipe, `trained`."""
    chosen_while_training = ("determinism", "grad_sync", "local_sgd") if trained.determinism == "off" else ()
    own = (*KEYS_NOT_COMPARED, *chosen_while_training)
    return not is_free_on_resume(key) and not any(f"{key}.".startswith(f"{place}.") for place in own)


def incompatible_changes(given_old: Recipe, resolved_old: Recipe, given_new: Recipe) -> list[RecipeDifference]:
    """Return the differences that prevent a resume under `given_new`: those that change the mathematics.

    An `auto` stays what it was resolved to: only an explicit other value differs from it, and a new `auto` differs
    from nothing.
    """
    resolved = resolved_old.model_dump()
    result: list[RecipeDifference] = []
    for difference in diff_recipes(given_old, given_new):
        can_be_auto_ = can_be_auto(difference.key)
        if can_be_auto_ and difference.new_value == "auto":
            continue
        if can_be_auto_ and difference.old_value == "auto":
            resolved_value = resolved
            for part in difference.key.split("."):
                resolved_value = resolved_value[part]
            result += _diff_values(resolved_value, difference.new_value, difference.key)
        else:
            result.append(difference)
    return [each for each in result if not is_free_on_resume(each.key)]


def _diff_values(old: Any, new: Any, key: str) -> Iterator[RecipeDifference]:
    start = f"{key}." if key else ""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from _diff_values(old.get(name), new.get(name), f"{start}{name}")
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _diff_values(before, after, f"{start}{index}")
    elif old != new or type(old) is not type(new):
        yield RecipeDifference(key, old, new)
