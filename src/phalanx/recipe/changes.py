"""What differs between two recipes, and which differences a run that goes on may have."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.recipe.explain import found
from phalanx.recipe.schema import Recipe
from phalanx.recipe.shape import can_be_auto

FREE = (
    "name",
    "steps",
    "checkpoint",
    "fault_tolerance",
    "callbacks",
    "evaluation.every",
    "evaluation.max_samples",
    "parallelism",
    "device",
)
"""Keys that may change when a run goes on; every other one changes the mathematics or its rounding.

`evaluation.holdout_fraction` and `evaluation.source` are not free: they say what training never sees. `parallelism` and
`device` are: they change rounding only, and a note says so.
"""
PLACES = ("data.source", "data.tokenizer", "evaluation.source", "batch.micro_size")
"""Keys of a recipe that say where data lie, which a fingerprint stands for, and in which parts a batch is computed."""


@dataclass(frozen=True)
class Difference:
    """One key whose value differs. None stands for null and for a key that is not there."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {found(self.old)} -> {found(self.new)}"


def differences(old: Recipe, new: Recipe) -> list[Difference]:
    """Keys whose values differ, the deepest that both recipes have, in the recipe's order."""
    return list(_differences(_plain(old), _plain(new), ""))


def is_free(key: str) -> bool:
    """Whether a run may go on with another value of `key`."""
    return any(key == free or key.startswith(f"{free}.") for free in FREE)


def is_mathematics(key: str, trained: Recipe) -> bool:
    """Whether a value of `key` in resolved.yaml must be that of the checkpoint's own recipe, `trained`."""
    # what is chosen while training
    own = (*PLACES, "determinism", "grad_sync", "local_sgd") if trained.determinism == "off" else PLACES
    return not is_free(key) and not any(f"{key}.".startswith(f"{place}.") for place in own)


def refused(given_old: Recipe, resolved_old: Recipe, given_new: Recipe) -> list[Difference]:
    """What keeps a run from going on under `given_new`: differences that change the mathematics.

    An `auto` stays what it was resolved to: only an explicit other value differs from it, and a new `auto` differs
    from nothing.
    """
    resolved = _plain(resolved_old)
    result: list[Difference] = []
    for difference in differences(given_old, given_new):
        automatic = can_be_auto(difference.key)
        if automatic and difference.new == "auto":
            continue
        if automatic and difference.old == "auto":
            was = resolved
            for part in difference.key.split("."):
                was = was[part]
            result += _differences(was, difference.new, difference.key)
        else:
            result.append(difference)
    return [difference for difference in result if not is_free(difference.key)]


def _plain(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump()


def _differences(old: Any, new: Any, key: str) -> Iterator[Difference]:
    start = f"{key}." if key else ""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from _differences(old.get(name), new.get(name), f"{start}{name}")
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _differences(before, after, f"{start}{index}")
    elif old != new or type(old) is not type(new):
        yield Difference(key, old, new)
