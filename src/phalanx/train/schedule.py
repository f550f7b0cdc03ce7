"""The learning rate as a pure function of the step, and of the batch where the recipe asks for that."""

import math

from phalanx.recipe.schema import LrScalingConfig, LrScheduleConfig, Recipe


def learning_rate(recipe: Recipe, step: int) -> float:
    """The highest learning rate among parameters at `step` (1 is the first), of a recipe whose `auto` are resolved."""
    optim = recipe.optimizer
    rate = optim.lr * factor(optim.schedule, step, recipe.steps)
    return rate if optim.lr_scaling is None else rate * growth(optim.lr_scaling, recipe.batch.global_size, step)


def peak(recipe: Recipe) -> float:
    """The highest learning rate that the recipe's scaling allows, however its schedule goes."""
    optim = recipe.optimizer
    if optim.lr_scaling is None:
        return optim.lr
    return optim.lr * growth(optim.lr_scaling, recipe.batch.global_size, optim.lr_scaling.warmup_steps)


def factor(schedule: LrScheduleConfig, step: int, steps: int) -> float:
    """What the learning rate is multiplied with at `step` (1 is the first) of `steps`.

    Linear warm-up over `schedule.warmup_steps` steps, reaching 1 at the last of them, then decay that reaches
    `schedule.min_lr_ratio` at the last step. `poly` and `step` are the policies of these names in Caffe.
    """
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.decay == "constant":
        return 1.0
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps))
    if schedule.decay == "step":
        return float(schedule.gamma ** sum(progress > drop for drop in schedule.milestones))
    left = 1 - progress
    power = schedule.power if schedule.decay == "poly" else 1.0
    shape = (1 + math.cos(math.pi * progress)) / 2 if schedule.decay == "cosine" else math.pow(left, power)
    return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * shape


def growth(scaling: LrScalingConfig, batch: int, step: int) -> float:
    """What the learning rate of `scaling.base_batch_size` samples is multiplied with for `batch` samples.

    `linear`: k = batch / base_batch_size (Krizhevsky 2014; Goyal et al. 2017); `sqrt`: its root (Hoffer et al. 2017
    for SGD; Malladi et al. 2022 for Adam). It rises from 1 in a straight line over `scaling.warmup_steps` steps (Goyal,
    sec. 2.2); a smaller batch has its smaller rate from the first step on. `base_batch_size` must be resolved.
    """
    assert scaling.base_batch_size is not None
    ratio = batch / scaling.base_batch_size
    goal = ratio if scaling.rule == "linear" else math.sqrt(ratio)
    if goal <= 1 or step >= scaling.warmup_steps:
        return goal
    return 1 + (goal - 1) * step / scaling.warmup_steps
