"""A recipe's first resolution: trials in processes of their own, choices from what they found (`plan`), and facts about
the machine. It writes nothing but the memory of what trials found.

A trial may fill the machine's memory and die of it: that is an answer like any other, remembered like any other, and
the next best choice is tried.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from phalanx.cluster import Cluster, Machine, peak
from phalanx.cluster.failures import DAY
from phalanx.compat import has_compiler
from phalanx.data import open_data
from phalanx.errors import RecipeError, TrialError
from phalanx.foretelling import automatic_layout, foretold_here, probed
from phalanx.plan import (
    COMMON_WORLDS,
    Choice,
    Needs,
    Room,
    choose_bucket,
    choose_compile,
    choose_exact,
    choose_memory,
    choose_precision,
    choose_start,
    choose_threads,
    divides_state,
    fits_whole,
    likely_precision,
    losses_to_try,
    plan_of,
    precisions_to_time,
    resolve,
)
from phalanx.plan.memory import Forecast
from phalanx.plan.resolve import LOSSES
from phalanx.recipe import Recipe
from phalanx.recipe.checks import has_bf16
from phalanx.recipe.exchanges import CHANGES, LOSES, ONLY_GPU, WRITES, not_kept
from phalanx.recipe.schema import Parallelism
from phalanx.run.cache import remembered

PROFILE, RACE = "phalanx.train.trial:profile", "phalanx.train.trial:race"
IMAGINED = "phalanx.train.trial:imagined"
FILLING = (PROFILE, RACE)
"""Trials that may run out of memory."""
STEPS_READ = 3
"""Steps whose samples are in memory: one is computed, two are ready (`data/feed.py`)."""
MICRO_BYTES = 512
"""Of the host's memory that a micro-batch takes beside its samples, at least."""
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
    given: Recipe, folder: Path, machine: Machine, world: int, call: Call, nodes: int = 1
) -> tuple[Recipe, dict[str, Any], dict[str, Any]]:
    """Trials of a recipe whose data are prepared, choices, and the recipe, plan and cluster facts that follow, for so
    many workers on so many nodes like this machine."""
    check_batch(given, machine.memory_bytes, nodes)
    here = known(machine, given, folder, call)
    layout = [] if here is None else planned_layout(given, folder, here, world)
    if layout:
        given = given.model_copy(update={"parallelism": layout[0].value})
    threads = choose_threads(given, machine.cores, world)
    payload = {"recipe": trial_recipe(given), "folder": str(folder), "threads": threads.value}
    # Workers share the memory of a CPU; under `elastic` the choice must not depend on how many there are.
    sharing = max(world, *COMMON_WORLDS) if given.determinism == "elastic" else world
    memory = machine.device_memory_bytes // (sharing if machine.device == "cpu" else 1)
    bf16 = has_bf16(machine.capability)
    room, alone = Room(machine.device, memory, world, bf16), Room(machine.device, machine.device_memory_bytes, 1, bf16)
    profile, needs = measured_needs(given, alone, world, payload, call)
    check_state(given, profile, world, machine.device)
    blocks = profile.get("blocks", 0)
    seconds: dict[str, float] = {}  # a model that no process holds whole cannot be timed in one
    if divides_state(given) and not fits_whole(given, needs, alone):
        chosen = choose_memory(given, needs, room)
    else:
        forecast = forecast_of(given, folder, here, world)
        chosen, seconds = tried_memory(given, needs, room, payload, call, forecast, blocks)
    bucket = choose_bucket(given, needs.trainable, world, nodes, machine.device)
    precision = choose_precision(given, seconds, machine.device, bf16)
    choices = [threads, *chosen, precision, *bucket, *choose_start(given)]
    if given.compile == "auto" and machine.device != "cpu":
        choices.append(choose_compile(given, machine.device, blocks, has_compiler()))
    choices += choose_exact(given, seconds, machine.device)
    recipe = resolve(given, choices, world)
    choices = [*layout_choices(layout), *choices]
    rates = call("phalanx.train.trial:matmul", {"device": machine.device, "threads": threads.value})
    sheet = peak(machine)
    cluster = {
        "host": machine.host,
        "device": machine.device,
        "device_name": machine.name,
        "device_count": machine.count,
        "physical_cores": machine.cores,
        "memory_bytes": machine.memory_bytes,
        "threads_per_worker": threads.value,
        "measured_matmul_tflops": rates,
        "data_sheet_tflops": None if sheet is None else sheet.tflops,
        "data_sheet_source": None if sheet is None else sheet.source,
        "failures_per_device_s": None if here is None else failures_of(here),
    }
    plan = plan_of(profile, choices, seconds, recipe)
    return recipe, {**plan, **foretold_parts(recipe, folder, here, world)}, cluster


def check_batch(given: Recipe, memory: int, nodes: int) -> None:
    """RecipeError where the samples of a step do not fit into the memory of so many nodes: each reads those of its
    workers at once, and some ahead."""
    sample = sum(values.nbytes for values in open_data(given.data, given.evaluation, given.seed).train(0, 1).values())
    if isinstance(given.batch.micro_size, int):
        sample += MICRO_BYTES // given.batch.micro_size
    most = memory * nodes // (STEPS_READ * max(1, sample))
    if given.batch.global_size > most:
        raise RecipeError(
            f"batch.global_size: found {given.batch.global_size:,}, but the samples of a step and those read ahead "
            f"would take {STEPS_READ * sample * given.batch.global_size / nodes / 1e9:,.1f} GB on each node, which "
            f"has {memory / 1e9:,.1f} GB of memory; expected at most {most:,}"
        )


def check_state(given: Recipe, profile: Mapping[str, Any], world: int, device: str) -> None:
    """RecipeError where the promise of the recipe cannot be kept with what forwards of its model change, or where the
    model has layers that so many workers cannot run on this device."""
    changed = " and ".join(filter(None, (profile.get(CHANGES), profile.get(LOSES))))
    if given.determinism == "elastic" and changed:
        raise RecipeError(not_kept(changed))
    if (layers := profile.get(ONLY_GPU)) and world > 1 and device == "cpu":
        raise RecipeError(
            f"model.build: SyncBatchNorm ({layers}) computes over several workers on GPUs only; use one worker, "
            "BatchNorm, or GroupNorm, which needs no statistics of others"
        )


def lost_state(plan: Mapping[str, Any]) -> list[str]:
    """What to say about a model whose forwards change what no checkpoint holds."""
    if not (state := plan.get(LOSES)):
        return []
    return [
        f"forwards of the model change {state}, which is in no checkpoint and which workers do not share: a run that "
        "goes on may end in other bits; keep it in a persistent buffer, or give it in get_extra_state, and draw random "
        "numbers from torch's own generator"
    ]


def failures_of(cluster: Cluster) -> float | None:
    """Failures of a device a second, as the cluster's file tells for nodes."""
    rate = cluster.reliability.failures_per_1000_node_days
    return None if rate is None else rate / (1000.0 * DAY * cluster.node.count)


def known(machine: Machine, given: Recipe, folder: Path, call: Call) -> Cluster | None:
    """This machine as `phalanx calibrate` measured it, with the recipe's model followed, so that steps can be foretold.
    None where nobody measured or the model cannot be followed."""
    here = probed(machine)
    if here is None:
        return None
    payload = {"recipe": given.model_dump(mode="json"), "folder": str(folder)}
    try:
        call("phalanx.profiling:follow", payload)
    except RecipeError:  # trials tell what is wrong with it, if anything is
        return None
    return here


def planned_layout(given: Recipe, folder: Path, here: Cluster, world: int) -> list[Choice]:
    """The layout that `auto` becomes for several workers, from what the probe measured."""
    whole = given.determinism == "elastic" or given.local_sgd is not None
    if given.parallelism != "auto" or world == 1 or whole:
        return []
    found = automatic_layout(given, folder, here, world)
    return [] if found is None else [Choice("parallelism", found[0], found[1])]


def layout_choices(found: list[Choice]) -> list[Choice]:
    """As plan.json tells them."""
    return [Choice(each.key, each.value.model_dump(exclude_defaults=True), each.why) for each in found]


def forecast_of(given: Recipe, folder: Path, here: Cluster | None, world: int) -> Forecast | None:
    """Seconds of a step by way of recomputing and micro-batch, where the probe's file can tell them."""
    if here is None:
        return None
    layout = given.parallelism if isinstance(given.parallelism, Parallelism) else Parallelism(replicate=world)
    precision = likely_precision(given, "cpu")

    def forecast(way: str, micro: int) -> float | None:
        values = {"parallelism": layout, "precision": precision, "compile": False}
        batch, memory = (
            given.batch.model_copy(update={"micro_size": micro}),
            given.memory.model_copy(update={"activation_checkpointing": way}),
        )
        recipe = given.model_copy(update={**values, "batch": batch, "memory": memory})
        parts = foretold_here(recipe, folder, here, world)
        return None if parts is None else parts.total

    return forecast


def foretold_parts(recipe: Recipe, folder: Path, here: Cluster | None, world: int) -> dict[str, Any]:
    """What the probe's file says of a step, for plan.json."""
    parts = None if here is None else foretold_here(recipe, folder, here, world)
    if parts is None:
        return {}
    computing = parts.total - parts.gradients - parts.optimizer - parts.rest
    by_part = {"computing": computing, "exchange": parts.gradients, "optimizer": parts.optimizer}
    return {"calibrated_step_s": parts.total, "calibrated_breakdown_s": by_part, "calibrated_by": "phalanx calibrate"}


def measured_needs(
    given: Recipe, alone: Room, world: int, payload: dict[str, Any], call: Call
) -> tuple[dict[str, Any], Needs]:
    """The profile of a model, and what it says of memory. Ways of recomputing that fill the memory that one process has
    `alone` with a sample or two are left out, the hungriest first. A model that the layout divides, and that is too
    large for one process, is not loaded for it. RecipeError when no way is left."""
    facts = open_data(given.data, given.evaluation, given.seed).facts
    logits = 4 * (facts.sequence or 0) * (facts.vocab or 0)
    asked = {**payload, "losses": losses_to_try(given, logits, Room(alone.device, alone.memory, world))}
    # The precision is chosen by timing micro-batches, so it is not known yet: the likely one is taken.
    asked["precision"] = likely_precision(given, alone.device, alone.bf16)
    if isinstance(given.parallelism, Parallelism) and given.parallelism.context > 1:
        asked["context"] = given.parallelism.context

    def needs_of(profile: dict[str, Any]) -> Needs:
        return Needs(profile["trainable_parameters"], profile["frozen_parameters"], profile["peaks"], logits)

    if divides_state(given):
        profile = call(IMAGINED, asked)
        check_forward(given, profile)
        if profile and not fits_whole(given, needs_of(profile), alone):
            return profile, needs_of(profile)
    for ways in (["none", "selective", "full"], ["selective", "full"], ["full"]):
        profile = call(PROFILE, {**asked, "ways": ways})
        if OUT_OF_MEMORY not in profile:
            check_forward(given, profile)
            return profile, needs_of(profile)
    raise RecipeError(
        "model: forward and backward of two samples run out of memory, however much is recomputed; "
        "use a smaller model or sequence"
    )


def check_forward(given: Recipe, profile: Mapping[str, Any]) -> None:
    """RecipeError where forwards change parameters that the layout shards: they change what is gathered for them; or
    where the loss is to be taken in chunks and cannot."""
    if given.memory.chunked_loss is True and profile and "chunked" not in profile["peaks"]:
        raise RecipeError(
            "memory.chunked_loss: true needs a language model whose logits are what an nn.Linear without bias and "
            "adapter gives, and nothing else; use auto or false"
        )
    layout, changed = given.parallelism, profile.get(WRITES)
    if changed and isinstance(layout, Parallelism) and layout.shard * layout.context > 1:
        raise RecipeError(
            f"parallelism.shard: forwards of the model change parameter {changed[0]!r}, and of a sharded one the "
            "change is lost; keep it in a buffer, or use parallelism.replicate"
        )


def tried_memory(
    given: Recipe,
    needs: Needs,
    room: Room,
    payload: dict[str, Any],
    call: Call,
    forecast: Forecast | None = None,
    blocks: int = 0,
) -> tuple[list[Choice], dict[str, float]]:
    """What is predicted to fit, tried: recomputation, loss and micro-batch that survived a trial, and the seconds that
    it took, compiled and with deterministic kernels where the run of a model with so many repeated `blocks` will be.
    Each trial that runs out of memory makes room for the next best. A trial has the whole model: no seconds where that
    is too large for one worker and the layout divides it."""
    precisions = precisions_to_time(given, room.device, room.bf16)
    failed: list[tuple[str, str, int]] = []
    while True:
        choices = choose_memory(given, needs, room, failed, forecast)
        recompute, loss, micro = (choice.value for choice in choices)
        trial = {**payload, "micro": micro, "precisions": precisions, "recompute": recompute, "chunked_loss": loss}
        compiled = choose_compile(given, room.device, blocks, has_compiler()).value
        trial |= {"compile": compiled, "determinism": given.determinism}
        trial["alone"] = room.world == 1
        seconds = call(RACE, {**trial, "offload": given.optimizer.offload})
        if OUT_OF_MEMORY not in seconds:
            return choices, seconds
        if divides_state(given):  # that one worker cannot hold alone what all hold together proves nothing
            return choices, {}
        failed.append((recompute, LOSSES[loss], micro))


def trial_recipe(given: Recipe) -> dict[str, Any]:
    """What a trial must know of a recipe; the rest takes its defaults, so that it does not make trials differ."""
    kept = given.model_dump(mode="json")
    return {key: kept[key] for key in ("device", "model", "lora", "task", "data", "batch", "optimizer", "seed")}
