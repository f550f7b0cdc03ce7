"""How workers share a recipe's batch and model: the batch that grows with them, and what they cannot divide. Pure
functions; the learning rate that follows is computed by `train/lr_schedule.py`.

A batch that scales with the workers is fixed once, at the first start: a run that resumes with more workers keeps its
batch and its learning rate, since both change the mathematics, and the order of the samples depends on the batch.
"""

import math
from collections.abc import Iterator

from phalanx.formatting import format_plural
from phalanx.recipe.schema import RECORDS_OF_TASKS, Parallelism, Recipe


def scale_batch_with_workers(recipe: Recipe, num_workers: int) -> Recipe:
    """Return the recipe for a run that starts on `num_workers` workers: `batch.global_size` becomes the global batch of
    the run, and `optimizer.lr_scaling`, if given, gets the batch size that `optimizer.lr` is meant for."""
    batch, optimizer = recipe.batch, recipe.optimizer
    if optimizer.lr_scaling is not None and optimizer.lr_scaling.base_batch_size is None and batch.scale_with_workers:
        lr_scaling = optimizer.lr_scaling.model_copy(update={"base_batch_size": batch.global_size})
        optimizer = optimizer.model_copy(update={"lr_scaling": lr_scaling})
    if batch.scale_with_workers:
        whole = {"global_size": batch.global_size * num_workers, "scale_with_workers": False}
        batch = batch.model_copy(update=whole)
    return recipe.model_copy(update={"batch": batch, "optimizer": optimizer})


def describe_batch_scaling(original: Recipe, resolved: Recipe, peak_lr: float) -> list[str]:
    """What a first start says of a batch and a learning rate that grew; `peak_lr` is the highest rate that the scaling
    allows."""
    notes, global_size, lr_scaling = [], resolved.batch.global_size, resolved.optimizer.lr_scaling
    if original.batch.global_size != global_size:
        own_size = original.batch.global_size
        notes.append(f"batch.global_size {own_size} for each of {global_size // own_size} workers: {global_size}")
    if lr_scaling is not None and peak_lr != original.optimizer.lr:
        rises = peak_lr > original.optimizer.lr and lr_scaling.warmup_steps
        when = f" at step {lr_scaling.warmup_steps}" if rises else ""
        notes.append(
            f"optimizer.lr_scaling: {lr_scaling.rule}: learning rate {original.optimizer.lr:.3g} for "
            f"{lr_scaling.base_batch_size} samples, {peak_lr:.3g}{when} for {global_size}"
        )
        if when and lr_scaling.warmup_steps > resolved.steps:
            notes.append(
                f"optimizer.lr_scaling.warmup_steps: the run ends after {resolved.steps} of its "
                f"{lr_scaling.warmup_steps} steps, before that"
            )
    return notes


def describe_kept_batch(original: Recipe, resolved: Recipe, num_workers: int) -> list[str]:
    """Return the notes for a run with `batch.scale_with_workers` that resumes with another number of workers."""
    if not original.batch.scale_with_workers or original.batch.global_size * num_workers == resolved.batch.global_size:
        return []
    initial_workers = resolved.batch.global_size // original.batch.global_size
    began = f"as the run began on {format_plural(initial_workers, 'worker')}"
    return [f"batch.global_size stays {resolved.batch.global_size}, {began}: only another run can have another batch"]


def list_divisors(number: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


WORLD_DIMENSIONS = ("replicate", "shard", "tensor", "pipeline", "context")
"""Dimensions of the parallelism; their product is the world size."""


def find_parallelism_problems(recipe: Recipe, parallelism: Parallelism, num_workers: int) -> Iterator[tuple[str, str]]:
    if parallelism.world != num_workers:
        factors = " x ".join(
            f"{name} {getattr(parallelism, name)}" for name in WORLD_DIMENSIONS if getattr(parallelism, name) > 1
        )
        yield (
            "parallelism",
            f"takes {parallelism.world} workers ({factors or 'one of each'}), but the run has {num_workers}: "
            f"use --nproc-per-node {parallelism.world} or parallelism=auto",
        )
    shard_ranks = parallelism.shard * parallelism.context
    if shard_ranks % parallelism.expert:
        yield "parallelism.expert", f"found {parallelism.expert}, which must divide shard x context = {shard_ranks}"
    other_dimensions = parallelism.replicate * parallelism.shard != parallelism.world or parallelism.expert > 1
    if recipe.determinism == "elastic" and other_dimensions:
        problem = "determinism: elastic goes with replicate and shard only: give these, or determinism: fixed-world"
        yield "parallelism", problem
    if recipe.optimizer.name == "muon" and parallelism.tensor > 1:
        problem = "muon works on whole matrices, which tensor ranks do not have; use parallelism.shard or adamw"
        yield "parallelism.tensor", problem
    if recipe.compile == "cuda-graphs" and parallelism.replicate != parallelism.world:
        yield (
            "compile",
            "cuda-graphs cannot hold the communication of a divided model: give parallelism.replicate only, or true",
        )
    if recipe.compile is True and parallelism.splits_backward:
        yield (
            "compile",
            f"blocks of a {parallelism.pipeline_schedule} pipeline cannot be compiled; use false, or "
            "parallelism.pipeline_schedule=1f1b",
        )
    if recipe.memory.activation_checkpointing == "selective" and parallelism.splits_backward:
        reason = (
            f"a {parallelism.pipeline_schedule} pipeline's backward comes in two parts, of which selective repeats one"
        )
        yield "memory.activation_checkpointing", f"{reason}; use full or none, or parallelism.pipeline_schedule=1f1b"
    yield from _find_pipeline_problems(recipe, parallelism)
    yield from _find_adapter_problems(recipe, parallelism)
    if parallelism.async_tp and parallelism.tensor == 1:
        problem = "affects communication between tensor ranks only; give parallelism.tensor, or false"
        yield "parallelism.async_tp", problem
    for name in ("tensor", "expert"):
        if recipe.optimizer.state_dtype == "int8" and getattr(parallelism, name) > 1:
            what = "optimizer.state_dtype = int8 keeps blocks of whole rows, which would be cut; use bf16"
            yield f"parallelism.{name}", what
    for name in ("tensor", "context"):
        if getattr(parallelism, name) > 1 and recipe.task_kind == "classification":
            yield f"parallelism.{name}", "is for models of sequences; classification of images has none"
    for name in ("tensor", "context", "pipeline"):
        if getattr(parallelism, name) > 1 and recipe.task_kind in RECORDS_OF_TASKS:
            yield f"parallelism.{name}", f"found {getattr(parallelism, name)}, expected 1 for {recipe.task_kind}"
    for name in ("context", "pipeline"):
        if getattr(parallelism, name) > 1 and recipe.task_kind in ("preference", "distillation"):
            whole, undivided = "its losses are of whole sequences", "the teacher is not divided"
            why = whole if recipe.task_kind == "preference" else undivided
            yield f"parallelism.{name}", f"found {getattr(parallelism, name)}, expected 1 for {recipe.task_kind}: {why}"
    samples = recipe.task_kind == "grpo" or getattr(recipe.task, "on_policy", 0.0) > 0
    if samples and parallelism.world != parallelism.replicate:
        what = "grpo" if recipe.task_kind == "grpo" else "on_policy"
        yield "parallelism", f"{what} samples with a whole model on each worker: give parallelism.replicate only"
    if (seq_len := recipe.data.seq_len) % parallelism.context:
        yield "parallelism.context", f"found {parallelism.context}, which must divide data.seq_len = {seq_len}"


def _find_adapter_problems(recipe: Recipe, parallelism: Parallelism) -> Iterator[tuple[str, str]]:
    """Adapters that need whole weights."""
    for key, value in (("kind", "dora"), ("init", "pissa")):
        if parallelism.tensor > 1 and recipe.adapter is not None and getattr(recipe.adapter, key) == value:
            yield f"adapter.{key}", f"{value} needs whole weights, which parallelism.tensor cuts: use shard instead"
    if recipe.adapter is not None and recipe.adapter.base_dtype and parallelism.replicate != parallelism.world:
        problem = "is for workers that hold the whole model: give parallelism.replicate only, or base_dtype: null"
        yield "adapter.base_dtype", f"{recipe.adapter.base_dtype} {problem}"


def _find_pipeline_problems(recipe: Recipe, layout: Parallelism) -> Iterator[tuple[str, str]]:
    """Stages and micro-batches of a pipeline."""
    stages, ranks = stages_of(layout), layout.pipeline
    if ranks == 1:
        if layout.layers_per_stage is not None:
            yield "parallelism.layers_per_stage", "is for pipelines: give parallelism.pipeline, or leave it out"
        if layout.pipeline_schedule != Parallelism().pipeline_schedule:
            what = f"{layout.pipeline_schedule} is for pipelines: give parallelism.pipeline, or leave it out"
            yield "parallelism.pipeline_schedule", what
        return
    if problem := stages_problem(layout.pipeline_schedule, stages, ranks):
        yield "parallelism.pipeline" if layout.layers_per_stage is None else "parallelism.layers_per_stage", problem
        return
    parts = layout.replicate * layout.shard
    share, micro = recipe.batch.global_size // parts, recipe.batch.micro_size
    if recipe.batch.global_size % parts or (isinstance(micro, int) and share % micro):
        return  # which is another problem
    sizes = [size for size in list_divisors(share) if fitting(layout.pipeline_schedule, share // size, stages, ranks)]
    what = f"{layout.pipeline_schedule} with {stages} stages on {ranks} ranks"
    if not sizes:
        yield "batch.global_size", f"{what} has no micro-batch that fits the {share} samples of a step; raise it"
    elif isinstance(micro, int) and micro not in sizes:
        valid = ", ".join(map(str, sizes))
        yield "batch.micro_size", f"{what} cannot run {share // micro} micro-batches a step; {valid} would be valid"


def find_batch_problems(global_size: int, micro_size: int | str, num_groups: int) -> Iterator[tuple[str, str]]:
    """`num_groups`: workers, or groups of them, among which the batch is divided."""
    if global_size % num_groups:
        below, above = global_size // num_groups * num_groups, (global_size // num_groups + 1) * num_groups
        valid_sizes = " or ".join(str(size) for size in (below, above) if size)
        problem = f"{global_size} samples cannot be divided among {num_groups} workers; {valid_sizes} can"
        yield "batch.global_size", problem
    elif isinstance(micro_size, int) and global_size % (micro_size * num_groups):
        samples_per_group = global_size // num_groups
        best = min(list_divisors(samples_per_group), key=lambda size: (abs(size - micro_size), size))
        problem = f"{micro_size} x {format_plural(num_groups, 'worker')} = {micro_size * num_groups} does not divide"
        advice = f"the nearest micro-batch that does is {best}"
        yield "batch.micro_size", f"{problem} batch.global_size = {global_size}; {advice}"


def stages_of(layout: Parallelism) -> int:
    """Stages of a pipeline: as given, else one a rank, or two for the interleaved schedule."""
    if layout.layers_per_stage is not None:
        return len(layout.layers_per_stage)
    return layout.pipeline * (2 if layout.pipeline_schedule == "interleaved" else 1)


def stages_problem(schedule: str, stages: int, ranks: int) -> str | None:
    """What is wrong with a number of stages on a number of ranks; None where the schedule can have them."""
    each = stages // ranks
    if schedule in ("gpipe", "1f1b"):
        fits, rule = stages == ranks, f"one stage a rank: {ranks} stages"
    elif schedule == "interleaved":
        fits, rule = stages % ranks == 0 and each > 1, f"2 or more stages a rank: {2 * ranks}, {3 * ranks}, ... stages"
    else:
        fits, rule = stages % ranks == 0 and each > 0, f"{ranks}, {2 * ranks}, ... stages"
    return None if fits else f"{schedule} on {ranks} ranks takes {rule}, not {stages}"


def fitting(schedule: str, micro_batches: int, stages: int, ranks: int) -> bool:
    """Whether the schedule can run with a number of micro-batches a step: one forward, one backward wants one for each
    stage; schedules that go in rounds want rounds of the same length, of about as many as there are ranks. All at once
    (gpipe) and the V of zero-bubble take any number."""
    if schedule == "1f1b":
        return micro_batches >= stages
    if schedule == "gpipe" or (schedule == "zero-bubble" and stages == 2 * ranks):
        return micro_batches >= 1
    return micro_batches >= 1 and micro_batches % max(1, micro_batches // ranks) == 0
