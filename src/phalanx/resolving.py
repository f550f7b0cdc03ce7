"""A recipe's first resolution: trials in processes of their own, choices from what they found (`plan`), and facts about
the machine. It writes nothing but the memory of what trials found.

A trial may fill the machine's memory and die of it: that is an answer like any other, remembered like any other, and
the next best choice is tried.
"""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from phalanx.cluster import Machine, peak
from phalanx.data import open_data
from phalanx.errors import RecipeError
from phalanx.jobs.agent import TrialError
from phalanx.plan import (
    COMMON_WORLDS,
    Choice,
    Needs,
    Room,
    choose_memory,
    choose_precision,
    choose_threads,
    divides_state,
    fits_whole,
    likely_precision,
    losses_to_try,
    plan_of,
    resolve,
)
from phalanx.recipe import Recipe
from phalanx.run.cache import remembered

PROFILE, RACE = "phalanx.train.trial:profile", "phalanx.train.trial:race"
IMAGINED = "phalanx.train.trial:imagined"
FILLING = (PROFILE, RACE)
"""Trials that may run out of memory."""
OUT_OF_MEMORY = "out_of_memory"
"""Key of what such a trial returns then."""
Call = Callable[[str, Any], Any]
"""Runs `module:function(payload)` in a process of its own."""


def remembering(call: Call, machine: Machine, code: str) -> Call:
    """`call` for trials, with what they found on this machine within the last day: a second start is quicker, and
    chooses alike although times vary."""

    def trial(function: str, payload: dict[str, Any]) -> Any:
        key = {"trial": function, "payload": payload, "code": code, "machine": [machine.name, machine.cores]}
        key["torch"] = version("torch")
        return remembered("trials", key, lambda: surviving(call, function, payload))

    return trial


def surviving(call: Call, function: str, payload: dict[str, Any]) -> Any:
    """`call`, where a trial that may fill memory says so instead of failing when the kernel kills it for that."""
    try:
        return call(function, payload)
    except TrialError as error:
        if not error.killed or function not in FILLING:
            raise
        return {OUT_OF_MEMORY: 1.0}


def first_resolution(
    given: Recipe, folder: Path, machine: Machine, world: int, call: Call
) -> tuple[Recipe, dict[str, Any], dict[str, Any]]:
    """Trials of a recipe whose data are prepared, choices, and the recipe, plan and cluster facts that follow."""
    threads = choose_threads(given, machine.cores, world)
    payload = {"recipe": trial_recipe(given), "folder": str(folder), "threads": threads.value}
    # Workers share the memory of a CPU; under `replicas` the choice must not depend on how many there are.
    sharing = max(world, *COMMON_WORLDS) if given.exchange.exact == "replicas" else world
    memory = machine.device_memory_bytes // (sharing if machine.device == "cpu" else 1)
    room, alone = Room(machine.device, memory, world), Room(machine.device, machine.device_memory_bytes, 1)
    profile, needs = measured_needs(given, alone, world, payload, call)
    seconds: dict[str, float] = {}  # a model that no process holds whole cannot be timed in one
    if divides_state(given) and not fits_whole(given, needs, alone):
        chosen = choose_memory(given, needs, room)
    else:
        chosen, seconds = tried_memory(given, needs, room, payload, call)
    choices = [threads, *chosen, choose_precision(given, seconds, machine.device)]
    recipe = resolve(given, choices, world)
    rates = call("phalanx.train.trial:matmul", {"device": machine.device, "threads": threads.value})
    sheet = peak(machine)
    cluster = {
        "host": machine.host,
        "device": machine.device,
        "name": machine.name,
        "count": machine.count,
        "cores": machine.cores,
        "memory_bytes": machine.memory_bytes,
        "threads": threads.value,
        "matmul_tflops": rates,
        "data_sheet_tflops": None if sheet is None else sheet.tflops,
        "data_sheet_source": None if sheet is None else sheet.source,
    }
    return recipe, plan_of(profile, choices, seconds, recipe), cluster


def measured_needs(
    given: Recipe, alone: Room, world: int, payload: dict[str, Any], call: Call
) -> tuple[dict[str, Any], Needs]:
    """The profile of a model, and what it says of memory. Ways of recomputing that fill the memory that one process has
    `alone` with a sample or two are left out, the hungriest first. A model that the layout divides, and that is too
    large for one process, is not loaded for it. RecipeError when no way is left."""
    facts = open_data(given.data, given.evaluate, given.seed).facts
    logits = 4 * (facts.sequence or 0) * (facts.vocab or 0)
    asked = {**payload, "losses": losses_to_try(given, logits, world)}
    # The precision is chosen by timing micro-batches, so it is not known yet: the likely one is taken.
    asked["precision"] = likely_precision(given, alone.device)

    def needs_of(profile: dict[str, Any]) -> Needs:
        return Needs(profile["parameters"], profile["frozen_parameters"], profile["peaks"], logits)

    if divides_state(given):
        profile = call(IMAGINED, asked)
        if profile and not fits_whole(given, needs_of(profile), alone):
            return profile, needs_of(profile)
    for ways in (["none", "selective", "full"], ["selective", "full"], ["full"]):
        profile = call(PROFILE, {**asked, "ways": ways})
        if OUT_OF_MEMORY not in profile:
            return profile, needs_of(profile)
    raise RecipeError(
        "model: forward and backward of two samples run out of memory, however much is recomputed; "
        "use a smaller model or sequence"
    )


def tried_memory(
    given: Recipe, needs: Needs, room: Room, payload: dict[str, Any], call: Call
) -> tuple[list[Choice], dict[str, float]]:
    """What is predicted to fit, tried: recomputation, loss and micro-batch that survived a trial, and the seconds that
    it took. Each trial that runs out of memory makes room for the next best. A trial has the whole model: no seconds
    where that is too large for one worker and the layout divides it."""
    precisions = ["fp32", "bf16"] if given.precision == "auto" else [given.precision]
    failed: list[tuple[str, str, int]] = []
    while True:
        choices = choose_memory(given, needs, room, failed)
        recompute, loss, micro = (choice.value for choice in choices)
        trial = {**payload, "micro": micro, "precisions": precisions, "recompute": recompute, "loss": loss}
        seconds = call(RACE, {**trial, "offload": given.memory.offload})
        if OUT_OF_MEMORY not in seconds:
            return choices, seconds
        if divides_state(given):  # that one worker cannot hold alone what all hold together proves nothing
            return choices, {}
        failed.append((recompute, loss, micro))


def trial_recipe(given: Recipe) -> dict[str, Any]:
    """What a trial must know of a recipe; the rest takes its defaults, so that it does not make trials differ."""
    kept = given.model_dump(mode="json", by_alias=True)
    return {key: kept[key] for key in ("model", "adapter", "task", "data", "batch", "optim", "seed")}
