"""What a step needs of a worker's memory, and which plans fit: activation checkpointing, the way to compute the loss,
and the micro-batch. Pure: what trials measured (`profile_trial.py`) comes in as numbers. An estimate, good enough to
begin with: a trial of the choice follows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.autoconfig.choices import LOSS_MODES, num_data_parallel_groups, required_divisor
from phalanx.errors import RecipeError
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
    elif optimizer.name in ("sgd", "lars"):
        optimizer_bytes = (
            4 if optimizer.momentum or optimizer.name == "lars" else 0
        )  # lars has its buffer at momentum 0, too
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
    state = (
        state_bytes_per_parameter(recipe, worker.device) * memory_profile.trainable_parameters
        + 4 * memory_profile.frozen_parameters
    )
    return state + min(peaks, default=0) <= worker.memory_bytes


def activation_bytes(recipe: Recipe, bytes_per_sample: int, micro_size: int, world_size: int) -> int:
    """Bytes that micro-batches of `micro_size` samples hold on one worker at the peak of a step, where a sample takes
    `peak` without any layout. Stages of a pipeline hold their part of several micro-batches at once."""
    parallelism = parallelism_or_default(recipe)
    samples = float(micro_size)
    if parallelism.pipeline > 1:
        num_micro_batches = recipe.batch.global_size // num_data_parallel_groups(recipe, world_size) // micro_size
        in_flight = (
            num_micro_batches
            if parallelism.pipeline_schedule == "gpipe"
            else min(num_micro_batches, parallelism.pipeline)
        )
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
        if large_enough := [
            micro_size for micro_size in runnable if samples_per_group // micro_size >= min_micro_batches
        ]:
            return large_enough
    raise RecipeError(
        f"batch.micro_size: no micro-batch lets {parallelism.pipeline_schedule} run {num_stages} stages on "
        f"{parallelism.pipeline} ranks with the {samples_per_group} samples of a step; raise batch.global_size, to "
        f"{num_stages * (recipe.batch.global_size // samples_per_group)} or a multiple"
    )


def next_smaller_micro_size(recipe: Recipe) -> int | None:
    """Return the micro-batch to retry with when that of a resolved recipe ran out of memory; None when there is none
    smaller."""
    values = recipe.model_dump()
    current, values["batch"]["micro_size"] = recipe.batch.micro_size, "auto"
    assert isinstance(current, int)
    # `auto` wants micro-batches enough for a pipeline, and smaller ones only make more of them.
    return next(
        (micro_size for micro_size in micro_batch_candidates(Recipe.model_validate(values), 1) if micro_size < current),
        None,
    )


def large_logits_bytes(worker: WorkerMemory) -> int:
    """Bytes of fp32 logits from which they are computed in chunks."""
    return (
        LARGE_LOGITS_BYTES
        if worker.device == "cpu"
        else max(LARGE_LOGITS_BYTES, worker.memory_bytes // LOGITS_MEMORY_DIVISOR)
    )


def loss_modes_to_try(recipe: Recipe, logits_bytes: int, worker: WorkerMemory) -> list[str]:
    """Return the ways of computing the loss that are worth a trial of their memory; `logits_bytes` as in
    `MemoryProfile`."""
    if not recipe.has_head_loss:
        return ["whole"]
    if parallelism_or_default(recipe).tensor > 1:
        return ["chunked"]  # ranks that hold parts of the vocabulary never have all logits
    if recipe.memory.chunked_loss != "auto":
        return [LOSS_MODES[recipe.memory.chunked_loss is True]]
    return (
        ["whole", "chunked"]
        if logits_bytes_per_worker(recipe, logits_bytes, micro_batch_candidates(recipe, worker.world_size)[0])
        > large_logits_bytes(worker)
        else ["whole"]
    )


def checkpointing_modes(recipe: Recipe) -> tuple[str, ...]:
    """Return the modes of activation checkpointing to try, the one with the least recomputation first."""
    if recipe.memory.activation_checkpointing != "auto":
        return (recipe.memory.activation_checkpointing,)
    return tuple(
        mode
        for mode in CHECKPOINTING_MODES
        if mode != "selective" or not parallelism_or_default(recipe).splits_backward
    )


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
