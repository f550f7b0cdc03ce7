"""Choose activation checkpointing, the way to compute the loss, and the micro-batch among the plans that fit
(`micro_batch.py`), and give the reason of each choice. `failed_trials` are settings that ran out of memory in a trial.
"""

from collections.abc import Collection

from phalanx.autoconfig.choices import LOSS_MODES, AutoChoice, required_divisor
from phalanx.autoconfig.micro_batch import (
    CHECKPOINTING_MODES,
    USABLE_MEMORY_FRACTION,
    MemoryPlan,
    MemoryProfile,
    TrialSettings,
    WorkerMemory,
    activation_bytes,
    checkpointing_modes,
    fitting_plans,
    large_logits_bytes,
    logits_bytes_per_worker,
    micro_batch_candidates,
    parallelism_or_default,
    state_bytes,
)
from phalanx.errors import RecipeError
from phalanx.formatting import format_bytes
from phalanx.recipe import Recipe
from phalanx.recipe.devices import size_table_of
from phalanx.recipe.work_division import stages_of


def choose_memory(
    recipe: Recipe,
    memory_profile: MemoryProfile,
    worker: WorkerMemory,
    failed_trials: Collection[TrialSettings] = (),
) -> list[AutoChoice]:
    """Recomputation, loss and micro-batch. RecipeError when nothing fits; it names a micro-batch that would where one
    was given. A micro-batch that was given may fill all of the memory. Of micro-batches that fit the largest is
    taken."""
    loss_mode, plans = _choose_loss_mode(recipe, memory_profile, worker)
    remaining = [plan for plan in plans if (plan.checkpointing, plan.loss_mode, plan.micro_size) not in failed_trials]
    if not remaining:
        raise RecipeError(_explain_out_of_memory(recipe, memory_profile, worker, loss_mode, failed_trials))
    best = remaining[0]
    return [
        AutoChoice(
            "memory.activation_checkpointing",
            best.checkpointing,
            _explain_checkpointing(recipe, memory_profile, best, failed_trials),
        ),
        AutoChoice(
            "memory.chunked_loss", best.loss_mode == "chunked", _explain_loss_mode(recipe, memory_profile, worker, best)
        ),
        AutoChoice("batch.micro_size", best.micro_size, _explain_micro_size(recipe, worker, best, failed_trials)),
    ]


def _choose_loss_mode(
    recipe: Recipe, memory_profile: MemoryProfile, worker: WorkerMemory
) -> tuple[str, list[MemoryPlan]]:
    """How to compute the loss, and what fits then."""
    if recipe.memory.chunked_loss != "auto":
        given = LOSS_MODES[recipe.memory.chunked_loss is True]
        return given, fitting_plans(recipe, memory_profile, given, worker)
    if "chunked" in memory_profile.peak_bytes:
        # By the micro-batch that it allows itself: with all logits fewer samples fit, and it would seem to be needless.
        chunked = fitting_plans(recipe, memory_profile, "chunked", worker)
        if "whole" not in memory_profile.peak_bytes or (
            chunked
            and logits_bytes_per_worker(recipe, memory_profile.logits_bytes, chunked[0].micro_size)
            > large_logits_bytes(worker)
        ):
            return "chunked", chunked
    return "whole", fitting_plans(recipe, memory_profile, "whole", worker)


def _explain_checkpointing(
    recipe: Recipe, memory_profile: MemoryProfile, best: MemoryPlan, failed_trials: Collection[TrialSettings]
) -> str:
    if recipe.memory.activation_checkpointing != "auto":
        return "given"
    if best.checkpointing == "none":
        return "activations fit into memory"
    cheaper_modes = CHECKPOINTING_MODES[: CHECKPOINTING_MODES.index(best.checkpointing)]
    ran_out_of_memory = any(mode in cheaper_modes for mode, _, _ in failed_trials)
    peaks = memory_profile.peak_bytes.get(best.loss_mode) or {}
    sample_bytes = ", ".join(
        f"{format_bytes(peak)} with {mode}" for mode in cheaper_modes if (peak := peaks.get(mode)) is not None
    )
    cause = "a trial ran out of memory" if ran_out_of_memory else "not even one sample would fit"
    return f"with less of it {cause}" + (f" (a sample takes {sample_bytes})" if sample_bytes else "")


def _explain_loss_mode(recipe: Recipe, memory_profile: MemoryProfile, worker: WorkerMemory, best: MemoryPlan) -> str:
    if recipe.memory.chunked_loss != "auto":
        return "given"
    if not recipe.has_head_loss:
        return "chunks are for language models"
    if best.loss_mode == "chunked" and "whole" not in memory_profile.peak_bytes:
        return "tensor ranks hold parts of the vocabulary"
    size = (
        "all logits of a micro-batch take "
        f"{format_bytes(logits_bytes_per_worker(recipe, memory_profile.logits_bytes, best.micro_size))} in fp32"
    )
    if best.loss_mode == "whole" and logits_bytes_per_worker(
        recipe, memory_profile.logits_bytes, best.micro_size
    ) > large_logits_bytes(worker):
        return f"{size}, but this model's output layer cannot be computed in chunks"
    comparison = "more" if best.loss_mode == "chunked" else "no more"
    return f"{size}, {comparison} than {format_bytes(large_logits_bytes(worker))}"


def _explain_micro_size(
    recipe: Recipe, worker: WorkerMemory, best: MemoryPlan, failed_trials: Collection[TrialSettings]
) -> str:
    if recipe.batch.micro_size != "auto":
        return "given"
    candidates = micro_batch_candidates(recipe, worker.world_size)
    num_groups = required_divisor(recipe, worker.world_size)
    parallelism = parallelism_or_default(recipe)
    if best.micro_size != candidates[0]:
        reason = (
            f"the largest that fits: its activations ({format_bytes(best.activation_bytes)}) stay within "
            f"{_format_usable_fraction(worker)} of the memory"
        )
    elif parallelism.pipeline > 1:
        count = recipe.batch.global_size // num_groups // best.micro_size
        reason = f"{count} micro-batches a step for the {stages_of(parallelism)} stages of the pipeline"
    elif recipe.determinism == "elastic":
        reason = (
            f"determinism: elastic: {num_groups} micro-batches can be shared by any number of workers that divides it"
        )
    else:
        reason = "one micro-batch for each worker and step"
    larger = sorted({size for mode, _, size in failed_trials if mode == best.checkpointing and size > best.micro_size})
    if larger:
        reason = f"{reason}; a trial of {larger[0]} ran out of memory"
    return reason


def _explain_out_of_memory(
    recipe: Recipe,
    memory_profile: MemoryProfile,
    worker: WorkerMemory,
    loss_mode: str,
    failed_trials: Collection[TrialSettings],
) -> str:
    """Why nothing is left, and what would be right."""
    micro_size = recipe.batch.micro_size
    state = state_bytes(recipe, memory_profile.trainable_parameters, memory_profile.frozen_parameters, worker.device)
    peak_by_mode = memory_profile.peak_bytes.get(loss_mode) or next(iter(memory_profile.peak_bytes.values()))
    modes = checkpointing_modes(recipe)
    per_sample = [peak for mode in modes if (peak := peak_by_mode.get(mode)) is not None]
    checkpointing_advice = "" if modes[-1] == "full" else ", memory.activation_checkpointing=full"
    if isinstance(micro_size, int):
        automatic = recipe.model_dump()
        automatic["batch"]["micro_size"] = "auto"
        smaller_plans = fitting_plans(Recipe.model_validate(automatic), memory_profile, loss_mode, worker)
        least = max((size for _, _, size in failed_trials), default=micro_size)
        largest_fitting = max((plan.micro_size for plan in smaller_plans if plan.micro_size < least), default=None)
        advice = (
            f"batch.micro_size={largest_fitting} would fit"
            if largest_fitting
            else f"not even one would fit: use a smaller model{checkpointing_advice}"
        )
        if failed_trials or not per_sample:
            return f"batch.micro_size: a trial of {micro_size} samples at once ran out of memory; {advice}"
        needed_bytes = state + activation_bytes(recipe, min(per_sample), micro_size, worker.world_size)
        return (
            f"batch.micro_size: {micro_size} samples at once need at least {format_bytes(needed_bytes)}, and a worker "
            f"has {format_bytes(worker.memory_bytes)}; {advice}"
        )
    if failed_trials or not per_sample:
        cause = "trials ran out of memory, the last with " + (
            f"{min(size for _, _, size in failed_trials)} samples at once" if failed_trials else "one sample"
        )
        return (
            f"batch.micro_size: not even one micro-batch fits: {cause}; use a smaller model or "
            f"sequence{checkpointing_advice}"
        )
    most, least = USABLE_MEMORY_FRACTION[size_table_of(worker.device)]
    available_bytes = max(worker.memory_bytes * most // least - state, 0)
    smallest_bytes = activation_bytes(
        recipe, min(per_sample), micro_batch_candidates(recipe, worker.world_size)[-1], worker.world_size
    )
    return (
        f"batch.micro_size: not even one sample fits: it takes {format_bytes(smallest_bytes)} in forward and backward, "
        f"and {format_bytes(available_bytes)} are left after parameters and optimizer state; "
        f"use a smaller model or sequence{checkpointing_advice}, or give batch.micro_size to try all the same"
    )


def _format_usable_fraction(worker: WorkerMemory) -> str:
    numerator, denominator = USABLE_MEMORY_FRACTION[size_table_of(worker.device)]
    return "half" if (numerator, denominator) == (1, 2) else f"{numerator / denominator:.0%}"
