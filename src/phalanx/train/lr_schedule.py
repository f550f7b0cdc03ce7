"""The learning rate as a pure function of the step and, if the recipe scales it, of the batch size."""

import math

from phalanx.recipe.schema import LrScalingConfig, LrScheduleConfig, Recipe


def compute_learning_rate(recipe: Recipe, step: int) -> float:
    """Return the highest learning rate of all parameters at `step` (the first is 1). `auto` values must be resolved."""
    optim = recipe.optimizer
    rate = optim.lr * lr_factor(optim.schedule, step, recipe.steps)
    if optim.lr_scaling is None:
        return rate
    return rate * lr_batch_factor(optim.lr_scaling, recipe.batch.global_size, step)


def peak_learning_rate(recipe: Recipe) -> float:
    """Return the highest learning rate that the recipe's scaling allows, before the schedule."""
    optim = recipe.optimizer
    if optim.lr_scaling is None:
        return optim.lr
    return optim.lr * lr_batch_factor(optim.lr_scaling, recipe.batch.global_size, optim.lr_scaling.warmup_steps)


def lr_factor(schedule: LrScheduleConfig, step: int, steps: int) -> float:
    """Return the factor of the schedule at `step` (the first is 1) of `steps`.

    Linear warm-up over `schedule.warmup_steps` steps, reaching 1 at the last of them, then decay that reaches
    `schedule.min_lr_ratio` at the last step; `wsd` begins to decay later (Hägele et al. 2024). `poly` and `step` are
    the policies of these names in Caffe.
    """
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.decay == "constant":
        return 1.0
    begin = schedule.warmup_steps
    if schedule.decay == "wsd":
        begin = max(begin, steps - round(schedule.decay_fraction * steps))
    decay_progress = min(1.0, max(0, step - begin) / max(1, steps - begin))
    if schedule.decay == "step":
        return float(schedule.gamma ** sum(decay_progress > drop for drop in schedule.milestones))
    remaining = 1 - decay_progress
    power = schedule.power if schedule.decay == "poly" else 1.0
    if schedule.decay == "cosine":
        shape = (1 + math.cos(math.pi * decay_progress)) / 2
    else:
        shape = 1 - math.sqrt(decay_progress) if schedule.decay == "wsd" else math.pow(remaining, power)
    return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * shape


def lr_batch_factor(scaling: LrScalingConfig, batch: int, step: int) -> float:
    """Return the factor of the learning rate for `batch` samples relative to `scaling.base_batch_size` samples.

    `linear`: k = batch / base_batch_size (Krizhevsky 2014; Goyal et al. 2017); `sqrt`: its root (Hoffer et al. 2017
    for SGD; Malladi et al. 2022 for Adam). It rises linearly from 1 over `scaling.warmup_steps` steps (Goyal, sec.
    2.2); for a smaller batch, the smaller rate is used from the first step. `base_batch_size` must be resolved.
    """
    assert scaling.base_batch_size is not None
    ratio = batch / scaling.base_batch_size
    target = ratio if scaling.rule == "linear" else math.sqrt(ratio)
    if target <= 1 or step >= scaling.warmup_steps:
        return target
    return 1 + (target - 1) * step / scaling.warmup_steps
