"""Workers that have sent gradients in every step begin to train apart, where `exchange: auto` found that to be due.

Nothing of the state changes at that step: the weights are the same everywhere, and a round begins with them. The run's
resolved recipe says it from then on, so whoever starts the run again does as it says. One that goes on from before that
step takes the mean of all weights after each step until it (`Schedule.start`).
"""

from dataclasses import replace

from phalanx.train.ends import make_stepper
from phalanx.train.gang import Gang
from phalanx.train.model import Seeds
from phalanx.train.parts import Parts
from phalanx.train.pinning import with_exchange
from phalanx.train.state import Standing


def part_ways(gang: Gang) -> tuple[Parts, Standing]:
    """What the next gang works with, and how it begins. All workers call it after the same step."""
    parts, how = gang.parts, gang.exchange.apart
    assert how is not None
    gang.saving.finish()
    standing = gang.abandon()
    recipe = with_exchange(parts.run, parts.recipe, parts.place, how)
    seeds = Seeds(recipe.seed, parts.place.device)
    stepper = make_stepper(recipe, parts.place, parts.divided, parts.optimizer, parts.scale, seeds)
    return replace(parts, recipe=recipe, stepper=stepper), standing
