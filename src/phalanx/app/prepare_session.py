"""Prepare the run of a session: check its recipe, resolve every `auto` by rules, write the run directory."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.app.prepare_run import (
    PreparedRun,
    RunRequest,
    check_machine,
    check_recipe_on_machine,
    create_run,
    find_machine,
    write_run_files,
)
from phalanx.app.resume import describe_all_changes, load_resumed_recipe, read_last_attempt
from phalanx.autoconfig.choices import choose_without_trials, resolve_recipe, resume_recipe
from phalanx.cluster import Machine
from phalanx.errors import RecipeError
from phalanx.recipe import Recipe, ResolvedRecipe, check_recipe, scale_batch_with_workers
from phalanx.recipe.load import LoadedRecipe
from phalanx.recipe.schema import Parallelism
from phalanx.run import Run
from phalanx.run.directory import check_run_path
from phalanx.run.lock import lock_run

IGNORED_KEYS = (
    *("model.build", "model.args", "init_from", "lora", "task", "data", "evaluation", "memory.chunked_loss"),
    *("optimizer.name", "optimizer.lr", "optimizer.weight_decay", "optimizer.betas", "optimizer.momentum"),
    *("optimizer.state_dtype", "optimizer.offload"),
)
"""Keys that have no effect in a session, because the loop itself decides them."""
TRAINER_ONLY_DIMENSIONS = ("pipeline", "context")
"""Dimensions of parallelism that a session does not have: they need the loss, or split sequences."""


@contextlib.contextmanager
def prepare_session(request: RunRequest, is_supervised: bool) -> Iterator[PreparedRun]:
    """Write the files of a run, and lock it unless its agent holds the lock. Checks the recipe first."""
    loaded, run, world_size = request.loaded, request.run, request.world_size
    assert world_size is not None
    _check_recipe_keys(loaded)
    if not is_supervised:
        check_run_path(run.path)
    machine = find_machine(loaded)
    given = loaded.recipe.model_copy(update={"device": machine.device})
    previous, notes = load_resumed_recipe(run, given, request.force)
    if previous is not None:
        resolved = resume_recipe(previous, given, world_size)
        check_recipe_on_machine(resolved, machine)
        notes += describe_all_changes(run, given, previous, resolved)
        plan: dict[str, Any] = run.read_json_or_empty(run.plan)
    else:
        resolved, plan = _resolve_without_trials(run, given, world_size, machine)
    check_recipe(resolved, loaded.recipe_dir, world_size, loaded.location_of)
    check_machine(loaded, machine)
    create_run(run)
    cluster = {
        "host": machine.hostname,
        "device": machine.device,
        "device_name": machine.device_name,
        "physical_cores": machine.physical_cores,
    }
    prepared = PreparedRun(run, resolved, loaded.recipe_dir, plan, cluster, notes, read_last_attempt(run) + 1)
    with contextlib.nullcontext() if is_supervised else lock_run(run) as note:
        prepared.notes.extend([] if note is None else [note])
        write_run_files(prepared, loaded)
        yield prepared


def _resolve_without_trials(
    run: Run, given: Recipe, world_size: int, machine: Machine
) -> tuple[ResolvedRecipe, dict[str, Any]]:
    """Resolve the recipe of a new run by rules; return it and the plan."""
    scaled_recipe = scale_batch_with_workers(given, world_size)
    choices = choose_without_trials(
        scaled_recipe, machine.physical_cores, world_size, machine.device, machine.has_fast_bf16, os.environ
    )
    plan: dict[str, Any] = {"auto_choices": [vars(choice) for choice in choices]}
    if loop := run.read_json_or_empty(run.plan).get("session"):  # with --force the state of this optimizer is kept
        plan["session"] = loop
    return resolve_recipe(scaled_recipe, choices, world_size), plan


def _check_recipe_keys(loaded: LoadedRecipe) -> None:
    """RecipeError when the recipe says what only the trainer can do, or what the loop itself says."""
    for key in IGNORED_KEYS:
        value: Any = loaded.given
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            raise RecipeError(
                f"{loaded.location_of(key)}: has no effect in a training loop of your own, which has its own model, "
                "data, loss and optimizer; leave it out, and say it in the script"
            )
    if isinstance(loaded.recipe.parallelism, Parallelism):
        for name in TRAINER_ONLY_DIMENSIONS:
            if getattr(loaded.recipe.parallelism, name) > 1:
                raise RecipeError(
                    f"{loaded.location_of(f'parallelism.{name}')}: a training loop of your own cannot be divided so, "
                    "only a recipe's task can; use replicate, shard or tensor"
                )
