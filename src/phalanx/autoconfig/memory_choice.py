"""What a step needs of a worker's memory, and which plans fit: activation checkpointing, the way to compute the loss,
and the micro-batch, chosen together, with the reasons. Pure: what trials measured (`profile_trial.py`) comes in as
numbers. An estimate, good enough to begin with: a trial of the choice follows, and settings that ran out of memory in
one are not chosen again.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from phalanx.autoconfig.choices import LOSS_MODES, AutoChoice, num_data_parallel_groups, required_divisor
from phalanx.errors import RecipeError
from phalanx.formatting import format_bytes
from phalanx.planner.scenario import transport_of
from phalanx.recipe import Recipe
from phalanx.recipe.devices import size_table_of
from phalanx.recipe.schema import Parallelism
from phalanx.recipe.work_division import fitting, list_divisors, stages_of

CHECKPOINTING_MODES = ("none", "selective", "full")
"""Ways of recomputing, the cheapest first."""
USABLE_MEMORY_FRACTION = {"cpu": (1, 2), "cuda": (17, 20)}
"""What a step may fill of a worker's memory where the micro-batch is chosen: a CPU's is shared with data, checkpoints
that are being written and other programs, a GPU's is split into pieces of which some never fit."""
LARGE_LOGITS_BYTES = 256 * 10**6
"""Bytes of fp32 logits from which it pays on a CPU never to hold them all."""
LOGITS_MEMORY_DIVISOR = 16
"""On a GPU, all logits may take this part of its memory: in chunks they cost a pass over the head's weight each."""


@dataclass(frozen=True)
class MemoryProfile:
    """What trials found out about a model: parameters that are trained and that are `frozen_parameters`, of which those
    in 8 bits count as a quarter, and the bytes that a sample adds at the peak of forward and backward, by way of
    computing the loss, then by way of recomputing. None: so it cannot be computed, or a single sample was too much
    already. `logits_bytes` are the fp32 bytes of those of a sample."""

    trainable_parameters: int
    frozen_parameters: int
    peak_bytes: Mapping[str, Mapping[str, int | None]]
    logits_bytes: int = 0


@dataclass(frozen=True)
class WorkerMemory:
    """Memory of one worker: bytes on a torch device, and the number of workers."""

    device: str
    memory_bytes: int
    world_size: int
    bf16: bool = True
    """Whether a GPU computes in that."""


@dataclass(frozen=True)
class MemoryPlan:
    """One way to go: with what it takes, bytes of the state and of activations."""

    checkpointing: str
    loss_mode: str
    micro_size: int
    state_bytes: int
    activation_bytes: int


TrialSettings = tuple[str, str, int]
"""How a trial went about it: recompute, loss and micro-batch."""


def state_bytes_per_parameter(recipe: Recipe, device: str) -> int:
    """Bytes of training state for each parameter that is trained: fp32 weight and gradient, and what the optimizer
    keeps (muon's matrices need half of what is counted, its other parameters all)."""
    optimizer = recipe.optimizer
    if optimizer.offload and device != "cpu":
        optimizer_bytes = 0
    elif optimizer.name in ("sgd", "lars"):  # lars has its buffer at momentum 0, too
        optimizer_bytes = 4 if optimizer.momentum or optimizer.name == "lars" else 0
    else:
        optimizer_bytes = {"fp32": 8, "bf16": 4, "int8": 2}[optimizer.state_dtype]
    single_replica = isinstance(recipe.parallelism, Parallelism) and recipe.parallelism.replicate == 1
    transport = transport_of(recipe)
    is_sent = not single_replica or transport.needed_by_single_replica
    transport_bytes = transport.extra_bytes_per_element if is_sent else 0.0
    # Matrix products in 16 bits keep a copy of their weights from forward to backward; FSDP gathers them in 16 bits.
    has_cast_weights = (
        device != "cpu" and recipe.precision not in ("fp32", "tf32") and parallelism_or_default(recipe).shard == 1
    )
    return 8 + optimizer_bytes + math.ceil(transport_bytes) + 2 * has_cast_weights


def state_bytes(recipe: Recipe, trainable_parameters: int, frozen_parameters: int, device: str) -> int:
    """Bytes of weights, gradients and optimizer state on one worker; what is frozen has only its weights."""
    whole_bytes = state_bytes_per_parameter(recipe, device) * trainable_parameters + 4 * frozen_parameters
    return whole_bytes // num_shards(recipe)


def fits_unsharded(recipe: Recipe, memory_profile: MemoryProfile, worker: WorkerMemory) -> bool:
    """Whether one process could train the whole model, undivided, with at least a sample at once."""
    peaks = [peak for by_mode in memory_profile.peak_bytes.values() for peak in by_mode.values() if peak is not None]
    per_parameter = state_bytes_per_parameter(recipe, worker.device)
    state = per_parameter * memory_profile.trainable_parameters + 4 * memory_profile.frozen_parameters
    return state + min(peaks, default=0) <= worker.memory_bytes


def activation_bytes(recipe: Recipe, bytes_per_sample: int, micro_size: int, world_size: int) -> int:
    """Bytes that micro-batches of `micro_size` samples hold on one worker at the peak of a step, where a sample takes
    `peak` without any layout. Stages of a pipeline hold their part of several micro-batches at once."""
    parallelism = parallelism_or_default(recipe)
    samples = float(micro_size)
    if parallelism.pipeline > 1:
        num_micro_batches = recipe.batch.global_size // num_data_parallel_groups(recipe, world_size) // micro_size
        is_gpipe = parallelism.pipeline_schedule == "gpipe"
        in_flight = num_micro_batches if is_gpipe else min(num_micro_batches, parallelism.pipeline)
        samples = micro_size * in_flight / parallelism.pipeline
    sequence_ranks = parallelism.context
    if parallelism.tensor > 1 and (recipe.data.seq_len // parallelism.context) % parallelism.tensor == 0:
        sequence_ranks *= parallelism.tensor  # they cut the sequence wherever they do not cut the width
    return math.ceil(bytes_per_sample * samples / sequence_ranks)


def micro_batch_candidates(recipe: Recipe, world_size: int) -> list[int]:
    """Micro-batches that may be chosen, the largest first: they divide what a worker gets of the batch, and leave a
    pipeline enough of them. RecipeError when there are none."""
    if recipe.batch.micro_size != "auto":
        return [recipe.batch.micro_size]
    samples_per_group = recipe.batch.global_size // required_divisor(recipe, world_size)
    candidates, parallelism = list_divisors(samples_per_group)[::-1], parallelism_or_default(recipe)
    if parallelism.pipeline == 1:
        return candidates
    num_stages = stages_of(parallelism)
    runnable = [
        micro_size
        for micro_size in candidates
        if fitting(parallelism.pipeline_schedule, samples_per_group // micro_size, num_stages, parallelism.pipeline)
    ]
    # With twice as many micro-batches as stages, a third of the time is lost to filling and draining at most.
    for min_micro_batches in (2 * num_stages, num_stages, 1):
        if fitting_sizes := [size for size in runnable if samples_per_group // size >= min_micro_batches]:
            return fitting_sizes
    raise RecipeError(
        f"batch.micro_size: no micro-batch lets {parallelism.pipeline_schedule} run {num_stages} stages on "
        f"{parallelism.pipeline} ranks with the {samples_per_group} samples of a step; raise batch.global_size, to "
        f"{num_stages * (recipe.batch.global_size // samples_per_group)} or a multiple"
    )


def next_smaller_micro_size(recipe: Recipe) -> int | None:
    """Return the micro-batch to retry with when that of a resolved recipe ran out of memory; None when there is none
    smaller."""
    current = recipe.batch.micro_size
    assert isinstance(current, int)
    # `auto` wants micro-batches enough for a pipeline, and smaller ones only make more of them.
    candidates = micro_batch_candidates(_with_auto_micro_size(recipe), 1)
    return max((micro_size for micro_size in candidates if micro_size < current), default=None)


def _with_auto_micro_size(recipe: Recipe) -> Recipe:
    values = recipe.model_dump()
    values["batch"]["micro_size"] = "auto"
    return Recipe.model_validate(values)


def large_logits_bytes(worker: WorkerMemory) -> int:
    """Bytes of fp32 logits from which they are computed in chunks."""
    on_gpu = max(LARGE_LOGITS_BYTES, worker.memory_bytes // LOGITS_MEMORY_DIVISOR)
    return LARGE_LOGITS_BYTES if worker.device == "cpu" else on_gpu


def loss_modes_to_try(recipe: Recipe, logits_bytes: int, worker: WorkerMemory) -> list[str]:
    """Return the ways of computing the loss that are worth a trial of their memory; `logits_bytes` as in
    `MemoryProfile`."""
    if not recipe.has_head_loss:
        return ["whole"]
    if parallelism_or_default(recipe).tensor > 1:
        return ["chunked"]  # ranks that hold parts of the vocabulary never have all logits
    if recipe.memory.chunked_loss != "auto":
        return [LOSS_MODES[recipe.memory.chunked_loss is True]]
    largest = micro_batch_candidates(recipe, worker.world_size)[0]
    is_large = logits_bytes_per_worker(recipe, logits_bytes, largest) > large_logits_bytes(worker)
    return ["whole", "chunked"] if is_large else ["whole"]


def checkpointing_modes(recipe: Recipe) -> tuple[str, ...]:
    """Return the modes of activation checkpointing to try, the one with the least recomputation first."""
    if recipe.memory.activation_checkpointing != "auto":
        return (recipe.memory.activation_checkpointing,)
    splits_backward = parallelism_or_default(recipe).splits_backward
    return tuple(mode for mode in CHECKPOINTING_MODES if mode != "selective" or not splits_backward)


def fitting_plans(
    recipe: Recipe, memory_profile: MemoryProfile, loss_mode: str, worker: WorkerMemory
) -> list[MemoryPlan]:
    """What is predicted to fit, the best first: as little recomputed as possible, then as many samples at once."""
    micro_size_given = recipe.batch.micro_size != "auto"
    numerator, denominator = (1, 1) if micro_size_given else USABLE_MEMORY_FRACTION[size_table_of(worker.device)]
    usable_bytes = worker.memory_bytes * numerator // denominator
    state = state_bytes(recipe, memory_profile.trainable_parameters, memory_profile.frozen_parameters, worker.device)
    peak_by_mode = memory_profile.peak_bytes.get(loss_mode) or next(iter(memory_profile.peak_bytes.values()))
    plans = []
    for mode in checkpointing_modes(recipe):
        if (sample_bytes := peak_by_mode.get(mode)) is None:
            continue
        for micro_size in micro_batch_candidates(recipe, worker.world_size):
            activations = activation_bytes(recipe, sample_bytes, micro_size, worker.world_size)
            if state + activations <= usable_bytes:
                plans.append(MemoryPlan(mode, loss_mode, micro_size, state, activations))
    return plans


def logits_bytes_per_worker(recipe: Recipe, logits_bytes: int, micro_size: int) -> int:
    """Bytes of the fp32 logits of a micro-batch on one worker."""
    return logits_bytes * micro_size // parallelism_or_default(recipe).context


def parallelism_or_default(recipe: Recipe) -> Parallelism:
    """Return the layout; one worker where it is still `auto`."""
    return recipe.parallelism if isinstance(recipe.parallelism, Parallelism) else Parallelism()


def num_shards(recipe: Recipe) -> int:
    """Among how many ranks parameters are divided."""
    parallelism = parallelism_or_default(recipe)
    return parallelism.shard * parallelism.context * parallelism.tensor * parallelism.pipeline


def choose_memory(
    recipe: Recipe, memory_profile: MemoryProfile, worker: WorkerMemory, failed_trials: Collection[TrialSettings] = ()
) -> list[AutoChoice]:
    """Recomputation, loss and micro-batch. RecipeError when nothing fits; it names a micro-batch that would where one
    was given. A micro-batch that was given may fill all of the memory. Of micro-batches that fit the largest is
    taken."""
    loss_mode, plans = _choose_loss_mode(recipe, memory_profile, worker)
    remaining = [plan for plan in plans if (plan.checkpointing, plan.loss_mode, plan.micro_size) not in failed_trials]
    if not remaining:
        raise RecipeError(_explain_out_of_memory(recipe, memory_profile, worker, loss_mode, failed_trials))
    best = remaining[0]
    why_checkpointing = _explain_checkpointing(recipe, memory_profile, best, failed_trials)
    why_loss_mode = _explain_loss_mode(recipe, memory_profile, worker, best)
    return [
        AutoChoice("memory.activation_checkpointing", best.checkpointing, why_checkpointing),
        AutoChoice("memory.chunked_loss", best.loss_mode == "chunked", why_loss_mode),
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
        largest = chunked[0].micro_size if chunked else 0
        logits_bytes = logits_bytes_per_worker(recipe, memory_profile.logits_bytes, largest)
        if "whole" not in memory_profile.peak_bytes or logits_bytes > large_logits_bytes(worker):
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
    known = [(mode, peak) for mode in cheaper_modes if (peak := peaks.get(mode)) is not None]
    sample_bytes = ", ".join(f"{format_bytes(peak)} with {mode}" for mode, peak in known)
    cause = "a trial ran out of memory" if ran_out_of_memory else "not even one sample would fit"
    return f"with less of it {cause}" + (f" (a sample takes {sample_bytes})" if sample_bytes else "")


def _explain_loss_mode(recipe: Recipe, memory_profile: MemoryProfile, worker: WorkerMemory, best: MemoryPlan) -> str:
    if recipe.memory.chunked_loss != "auto":
        return "given"
    if not recipe.has_head_loss:
        return "chunks are for language models"
    if best.loss_mode == "chunked" and "whole" not in memory_profile.peak_bytes:
        return "tensor ranks hold parts of the vocabulary"
    logits_bytes = logits_bytes_per_worker(recipe, memory_profile.logits_bytes, best.micro_size)
    size = f"all logits of a micro-batch take {format_bytes(logits_bytes)} in fp32"
    if best.loss_mode == "whole" and logits_bytes > large_logits_bytes(worker):
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
        limit = f"{_format_usable_fraction(worker)} of the memory"
        reason = f"the largest that fits: its activations ({format_bytes(best.activation_bytes)}) stay within {limit}"
    elif parallelism.pipeline > 1:
        count = recipe.batch.global_size // num_groups // best.micro_size
        reason = f"{count} micro-batches a step for the {stages_of(parallelism)} stages of the pipeline"
    elif recipe.determinism == "elastic":
        shared = f"{num_groups} micro-batches can be shared by any number of workers that divides it"
        reason = f"determinism: elastic: {shared}"
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
        smaller_plans = fitting_plans(_with_auto_micro_size(recipe), memory_profile, loss_mode, worker)
        least = max((size for _, _, size in failed_trials), default=micro_size)
        largest_fitting = max((plan.micro_size for plan in smaller_plans if plan.micro_size < least), default=None)
        advice = f"batch.micro_size={largest_fitting} would fit"
        if not largest_fitting:
            advice = f"not even one would fit: use a smaller model{checkpointing_advice}"
        if failed_trials or not per_sample:
            return f"batch.micro_size: a trial of {micro_size} samples at once ran out of memory; {advice}"
        needed_bytes = state + activation_bytes(recipe, min(per_sample), micro_size, worker.world_size)
        return (
            f"batch.micro_size: {micro_size} samples at once need at least {format_bytes(needed_bytes)}, and a worker "
            f"has {format_bytes(worker.memory_bytes)}; {advice}"
        )
    if failed_trials or not per_sample:
        last = f"{min(size for _, _, size in failed_trials)} samples at once" if failed_trials else "one sample"
        cause = f"not even one micro-batch fits: trials ran out of memory, the last with {last}"
        return f"batch.micro_size: {cause}; use a smaller model or sequence{checkpointing_advice}"
    most, least = USABLE_MEMORY_FRACTION[size_table_of(worker.device)]
    available_bytes = max(worker.memory_bytes * most // least - state, 0)
    smallest = micro_batch_candidates(recipe, worker.world_size)[-1]
    smallest_bytes = activation_bytes(recipe, min(per_sample), smallest, worker.world_size)
    return (
        f"batch.micro_size: not even one sample fits: it takes {format_bytes(smallest_bytes)} in forward and backward, "
        f"and {format_bytes(available_bytes)} are left after parameters and optimizer state; "
        f"use a smaller model or sequence{checkpointing_advice}, or give batch.micro_size to try all the same"
    )


def _format_usable_fraction(worker: WorkerMemory) -> str:
    numerator, denominator = USABLE_MEMORY_FRACTION[size_table_of(worker.device)]
    return "half" if (numerator, denominator) == (1, 2) else f"{numerator / denominator:.0%}"
