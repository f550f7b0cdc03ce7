"""The batch of a recipe that scales it with the workers, and the notes about it. Pure functions; the learning rate that
follows is computed by `train/lr_schedule.py`.

The batch is fixed once, at the first start: a run that resumes with more workers keeps its batch and its learning rate,
since both change the mathematics, and the order of the samples depends on the batch.
"""

import math

from phalanx.recipe.schema import Recipe


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
        notes.append(
            f"batch.global_size {original.batch.global_size} for each of {global_size // original.batch.global_size} "
            f"workers: "
            f"{global_size}"
        )
    if lr_scaling is not None and peak_lr != original.optimizer.lr:
        when = (
            f" at step {lr_scaling.warmup_steps}" if peak_lr > original.optimizer.lr and lr_scaling.warmup_steps else ""
        )
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
    return [
        f"batch.global_size stays {resolved.batch.global_size}, as the run began on {initial_workers} "
        f"{'worker' if initial_workers == 1 else 'workers'}: only another run can have another batch"
    ]


def list_divisors(number: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]
