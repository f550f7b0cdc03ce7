"""Resolve a recipe: replace every `auto` by a value, and say why. Pure: numbers in, recipe out.

What changes bits (precision, micro-batch, threads, compile, exchange) is chosen once, on the first start of a run, and
stays pinned in `resolved.yaml`; `go_on` makes the recipe of a later start from it.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.errors import RecipeError
from phalanx.recipe import Recipe
from phalanx.recipe.checks import divisors
from phalanx.recipe.schema import Layout

GAIN = 1.2
"""bf16 is chosen when forward and backward of this model are at least so many times faster than in fp32."""
COMMON_WORLDS = (1, 2, 3, 4, 6, 8)
PREDICTION = (
    "forward and backward of a micro-batch, timed alone, times a worker's micro-batches, plus the update; "
    "the exchange of gradients between workers is not in it yet"
)
STATE_BYTES = 16
"""Bytes a parameter: fp32 weight, gradient and two moments of AdamW."""


@dataclass(frozen=True)
class Choice:
    """One `auto` and what became of it."""

    key: str
    value: Any
    why: str


def choose_threads(recipe: Recipe, cores: int, world: int) -> Choice:
    """CPU threads of a worker."""
    if recipe.threads != "auto":
        return Choice("threads", recipe.threads, "given")
    if recipe.exchange.exact == "replicas":
        return Choice("threads", 1, "exact: replicas needs the same number on any world size")
    threads = max(1, cores // world)
    return Choice("threads", threads, f"{cores} cores for {world} {'worker' if world == 1 else 'workers'}")


def choose_micro(recipe: Recipe, parameters: int, saved_bytes: int, memory: int, world: int) -> Choice:
    """The largest micro-batch whose activations fit into half of a worker's memory beside the training state.

    `memory` is what one worker has. Under `exact: replicas` there must be enough micro-batches for other world sizes
    to share, whatever the world is now: otherwise the choice, and with it the bits, would depend on it.
    """
    if recipe.batch.micro != "auto":
        return Choice("batch.micro", recipe.batch.micro, "given")
    batch = recipe.batch.global_
    if recipe.exchange.exact == "replicas":
        parts = math.lcm(*(size for size in COMMON_WORLDS if batch % size == 0), world)
        why = f"exact: replicas: {parts} micro-batches can be shared by any number of workers that divides it"
    else:
        parts = world
        why = "a worker's whole share at once"
    share = batch // parts
    room = memory // 2 - STATE_BYTES * parameters
    if saved_bytes and share * saved_bytes > room:
        fitting = [size for size in divisors(share) if size * saved_bytes <= room]
        if not fitting:
            raise RecipeError(
                f"batch.micro: not even one sample fits: it saves {saved_bytes / 1e6:.0f} MB for backward, and "
                f"{max(room, 0) / 1e6:.0f} MB are left beside parameters and optimizer state; "
                "use a smaller model or sequence, or give batch.micro to try all the same"
            )
        share = fitting[-1]
        why = f"the largest whose activations ({share * saved_bytes / 1e9:.2f} GB) fit into half of the memory"
    return Choice("batch.micro", share, why)


def check_memory(micro: int, parameters: int, saved_bytes: int, memory: int) -> None:
    """RecipeError, naming a micro-batch that would fit, when what a step must hold at least (training state and saved
    activations) is more than all of a worker's memory."""
    needed = micro * saved_bytes + STATE_BYTES * parameters
    if needed <= memory:
        return
    room = memory // 2 - STATE_BYTES * parameters  # half, as `choose_micro` would
    fitting = [size for size in divisors(micro) if size < micro and size * saved_bytes <= room]
    raise RecipeError(
        f"batch.micro: {micro} samples at once need at least {needed / 1e9:.1f} GB, and a worker has "
        f"{memory / 1e9:.1f} GB; "
        + (f"batch.micro={fitting[-1]} would fit" if fitting else "not even one would fit: use a smaller model")
    )


def choose_precision(recipe: Recipe, seconds: Mapping[str, float]) -> Choice:
    """The precision, by the time that this very model takes for forward and backward."""
    if recipe.precision != "auto":
        return Choice("precision", recipe.precision, "given")
    ratio = seconds["fp32"] / seconds["bf16"]
    why = f"forward and backward of a micro-batch take {seconds['fp32']:.3g} s in fp32, {seconds['bf16']:.3g} s in bf16"
    return Choice("precision", "bf16" if ratio >= GAIN else "fp32", f"{why}: {ratio:.2f} x")


def resolve(recipe: Recipe, choices: list[Choice], world: int) -> Recipe:
    """The recipe with `choices` for threads, micro-batch and precision made, and the remaining `auto` set to what this
    version does."""
    chosen = {choice.key: choice.value for choice in choices}
    values = recipe.model_dump(by_alias=True)
    values["threads"] = chosen["threads"]
    values["batch"]["micro"] = chosen["batch.micro"]
    values["precision"] = chosen["precision"]
    values["layout"] = replicated(world)
    values["memory"]["recompute"] = "none"
    values["compile"] = recipe.compile is True
    values["exchange"]["strategy"] = "allreduce"
    return Recipe.model_validate(values)


def replicated(world: int) -> dict[str, int]:
    """Every worker a replica."""
    return Layout(replicate=world).model_dump()


def go_on(resolved: Recipe, given: Recipe, world: int) -> Recipe:
    """The recipe of a run that goes on: what was resolved, with the keys that are free to change, and the places of
    prepared data, as given now."""
    values, new = resolved.model_dump(by_alias=True), given.model_dump(by_alias=True)
    for key in ("name", "steps", "checkpoint", "recovery", "callbacks"):
        values[key] = new[key]
    for key in ("every", "samples"):
        values["evaluate"][key] = new["evaluate"][key]
    values["data"]["source"] = new["data"]["source"]
    values["evaluate"]["source"] = new["evaluate"]["source"]
    values["layout"] = replicated(world)
    values["batch"]["micro"] = fitting_micro(resolved, given, world)
    return Recipe.model_validate(values)


def fitting_micro(resolved: Recipe, given: Recipe, world: int) -> int | str:
    """The micro-batch of a run that goes on: what was resolved. One that nobody gave and that a changed number of
    workers cannot share gets smaller where that costs no promise: under `replicas` it is part of the bits."""
    micro, batch = resolved.batch.micro, resolved.batch.global_
    if given.batch.micro != "auto" or resolved.exchange.exact == "replicas" or batch % world or micro == "auto":
        return micro
    return max(size for size in divisors(batch // world) if size <= micro)


def plan_of(
    profile: Mapping[str, Any], choices: list[Choice], seconds: Mapping[str, float], recipe: Recipe
) -> dict[str, Any]:
    """plan.json: what was found out and chosen, and the step time that follows."""
    micro, world = recipe.batch.micro, recipe.layout.world if isinstance(recipe.layout, Layout) else 1
    assert isinstance(micro, int)
    own = recipe.batch.global_ // (micro * world)
    predicted = own * seconds[recipe.precision] + seconds["update"]
    return {
        **profile,
        "chosen": [asdict(choice) for choice in choices],
        "predicted_step_seconds": predicted,
        "predicted_rule": PREDICTION,
    }
