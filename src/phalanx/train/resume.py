"""Resume training from the newest checkpoint, and report where an attempt starts and how the run ends."""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from phalanx.data.reader import RESTORE_FILES_HINT
from phalanx.errors import DataError, RecipeError
from phalanx.recipe import ResolvedRecipe
from phalanx.recipe.diff import diff_recipes, is_mathematics
from phalanx.run import read_events
from phalanx.run.directory import RESULT_FORMAT
from phalanx.run.event_types import AttemptStarted, CheckpointSaved, InMemoryRestored, RunWarning
from phalanx.train.checkpoint.digest import compute_digest, digest_checkpoint
from phalanx.train.checkpoint.format import format_checkpoint_name
from phalanx.train.checkpoint.load_plan import find_unused_entries, get_state_tensors
from phalanx.train.checkpoint.restore import (
    RestoredCheckpoint,
    find_store_url,
    has_checkpoint,
    prune_stale,
    restore_newest,
)
from phalanx.train.checkpoint.store_fetch import StoreSource
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.object_collectives import all_gather_json
from phalanx.train.model_builder import has_batch_norm
from phalanx.train.optim.container import trainable_parameters
from phalanx.train.train_context import TrainContext, report_rejected_checkpoint
from phalanx.train.train_state import TrainState


def resume_training(
    context: TrainContext, fingerprint: str, force: bool, hint: str = RESTORE_FILES_HINT, needs_checkpoint: bool = False
) -> TrainState:
    """Resume from the newest in-memory checkpoint of the run, else from its newest good checkpoint on disk. Without
    either, training starts at step 0; DataError when `needs_checkpoint` or any worker sees checkpoints. DataError, with
    the `hint`, when it was trained on data of another fingerprint."""
    # All workers must agree on whether there are checkpoints, also where one of them does not see the files.
    checkpoints_seen = needs_checkpoint or has_checkpoint(context.run, context.recipe.checkpoint, context.dist_env)
    start_time = time.perf_counter()
    store_url = find_store_url(context.run, context.recipe.checkpoint)
    run, state, on_reject = context.run, context.app_state, partial(report_rejected_checkpoint, context)
    restored = restore_newest(run, context.dist_env, state, on_reject, in_place=needs_checkpoint, store_url=store_url)
    if restored is None:
        if checkpoints_seen:
            raise DataError(
                f"{context.run.checkpoints}: no checkpoint here is good; run `phalanx checkpoint verify` to see why"
            )
        if store_url is not None and any(all_gather_json(context.dist_env, _has_saved(context))):
            raise DataError(
                f"{store_url}: no checkpoint is left, and the run has saved some; restore them, or use another --run "
                "to start from the beginning"
            )
        prune_stale(context.run, context.dist_env, 0, None)
        return TrainState()
    meta = restored.manifest.meta
    if restored.in_memory and context.dist_env.is_rank_zero:
        event = InMemoryRestored(
            step=meta["step"],
            checkpoint_step=meta["last_saved_step"],
            fetched_bytes=restored.fetched_bytes,
            duration_s=time.perf_counter() - start_time,
        )
        context.reporter.report_event(event)
    if meta.get("fingerprint") != fingerprint:
        fingerprints = f"(fingerprint {meta.get('fingerprint')}, now {fingerprint})"
        if not force:
            raise DataError(f"{restored.path}: was trained on other data {fingerprints}; {hint}")
        if context.dist_env.is_rank_zero:
            context.reporter.report_event(RunWarning(text=f"forced: the run continues with other data {fingerprints}"))
    check_resumed_recipe(context, restored.path, meta, force)
    _check_restored_state(context, restored, force)
    train_state = TrainState.from_meta(meta)
    prune_stale(context.run, context.dist_env, train_state.step, restored.path if restored.in_memory else None)
    return train_state


def _has_saved(context: TrainContext) -> bool:
    return context.dist_env.is_rank_zero and any(
        isinstance(event, CheckpointSaved) for event in read_events(context.run.events)
    )


def check_resumed_recipe(context: TrainContext, path: Path, meta: Mapping[str, Any], force: bool) -> None:
    """RecipeError when keys that change the mathematics differ from the recipe in the meta of the checkpoint at `path`.
    The meta is protected by a checksum, resolved.yaml is not."""
    if "recipe" not in meta:
        return
    try:
        trained = ResolvedRecipe.model_validate(meta["recipe"])
    except ValidationError as error:
        raise DataError(f"{path}: its recipe is not one that this Phalanx knows ({error.errors()[0]['msg']})") from None
    found = [each for each in diff_recipes(trained, context.recipe) if is_mathematics(each.key, trained)]
    if not found:
        return
    if not force:
        listed = "; ".join(map(str, found))
        raise RecipeError(
            f"{context.run.resolved}: is not what {path} was trained with: {listed}; put the old values back there, or "
            "use --force to continue with the new ones"
        )
    if context.dist_env.is_rank_zero:
        earlier_warnings = {event.text for event in read_events(context.run.events) if isinstance(event, RunWarning)}
        for text in (f"forced: {each}" for each in found):
            if text not in earlier_warnings:  # where the recipes were compared as they were given
                context.reporter.report_event(RunWarning(text=text))


def _check_restored_state(context: TrainContext, restored: RestoredCheckpoint, force: bool) -> None:
    """DataError when the checkpoint has state that was not used, or none for a trained parameter; a warning if forced.
    Every worker calls it."""
    trained = list(trainable_parameters(context.model))
    in_checkpoint = restored.manifest.meta.get("trained_parameters", trained)
    unused = all_gather_json(context.dist_env, context.optimizer.unused_state)
    problems = {
        "holds state without a place in the model": find_unused_entries(context.model, restored.manifest.tensors),
        "holds optimizer state of another kind of optimizer": sorted(set().union(*unused)),
        "has no optimizer state of parameters that were not trained before": sorted(set(trained) - set(in_checkpoint)),
    }
    texts = [
        f"{problem}: {len(names)} tensor{'s' if len(names) > 1 else ''}, such as {names[0]}"
        for problem, names in problems.items()
        if names
    ]
    if not texts:
        return
    if not force:
        raise DataError(
            f"{restored.path}: {'; '.join(texts)}; resume with the model and optimizer that it was trained with, or "
            "use --force to continue without this state"
        )
    if context.dist_env.is_rank_zero:
        context.reporter.report_event(RunWarning(text=f"forced: the checkpoint {'; '.join(texts)}"))


def report_start(context: TrainContext, samples: int, train_state: TrainState) -> None:
    """Report the start of an attempt on `samples` training samples, and warnings about the recipe."""
    recipe, dist_env = context.recipe, context.dist_env
    event = AttemptStarted(
        world_size=dist_env.world_size,
        attempt=dist_env.attempt,
        start_step=train_state.step,
        total_steps=recipe.steps,
        device=str(dist_env.device),
        num_micro_batches=context.accumulator.num_micro_batches,
    )
    context.reporter.report_event(event)
    if has_batch_norm(context.model):
        text = (
            "the model has BatchNorm: results depend on the micro-batch, and running statistics are the first "
            "worker's; GroupNorm has none"
        )
        context.reporter.report_event(RunWarning(text=text))
    if samples < recipe.batch.global_size:
        text = f"the data have only {samples} training samples, less than batch.global_size"
        context.reporter.report_event(RunWarning(text=text))


def make_result(context: TrainContext, train_state: TrainState, status: str) -> dict[str, Any]:
    """result.json, but for the seconds: how training ended, with the digest of the state that was saved last."""
    return {
        "format": RESULT_FORMAT,
        "status": status,
        "steps": train_state.step,
        "final_loss": train_state.last_loss,
        "num_units": train_state.units_trained,
        "num_restarts": context.dist_env.attempt,
        "digest": _final_digest(context, train_state),
    }


def _final_digest(context: TrainContext, train_state: TrainState) -> str:
    """The digest of the state with which the run ends. Where no worker holds it all, it is read from the checkpoint."""
    if not context.parallel_model.fully_replicated:
        if (url := context.run.store_url) is not None:
            StoreSource(context.run, DistEnv(), url).fetch(train_state.step)
        return digest_checkpoint(context.run.checkpoints / format_checkpoint_name(train_state.step))
    return compute_digest(
        get_state_tensors(context.model, context.optimizer, context.scaler).items(), train_state.samples_consumed
    )
