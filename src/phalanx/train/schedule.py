"""The learning rate as a pure function of the step."""

import math

from phalanx.recipe.schema import Schedule


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """What the learning rate is multiplied with at `step` (1 is the first) of `steps`.

    Linear warm-up over `schedule.warmup` steps, reaching 1 at the last of them, then decay that reaches
    `schedule.final` at the last step.
    """
    if step <= schedule.warmup:
        return step / schedule.warmup
    if schedule.decay == "constant":
        return 1.0
    progress = min(1.0, (step - schedule.warmup) / max(1, steps - schedule.warmup))
    shape = (1 + math.cos(math.pi * progress)) / 2 if schedule.decay == "cosine" else 1 - progress
    return schedule.final + (1 - schedule.final) * shape
