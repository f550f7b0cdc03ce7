"""The first steps of a run, where they are of another kind: in them gradients or weights travel whole.

What is sent then is said in `train.exchange`; how many steps it is, in `recipe.exchanges`.
"""

from dataclasses import dataclass, replace

from phalanx.plan.rates import Rates
from phalanx.plan.search import Option
from phalanx.plan.setup import Wire, local_wire
from phalanx.plan.step import step
from phalanx.recipe import Recipe
from phalanx.recipe.exchanges import first_steps


@dataclass(frozen=True)
class Opening:
    """So many first steps of a run."""

    steps: int
    seconds: float
    """Of each of them."""

    def mean(self, seconds: float, steps: int) -> float:
        """Seconds of a step on average over a run of so many, where all others take `seconds`."""
        return seconds + (self.seconds - seconds) * self.steps / steps


def opening_of(recipe: Recipe, best: Option, rates: Rates) -> Opening | None:
    """They take as much longer as it takes to exchange all; None where all steps are alike."""
    wire, steps = first_wire_of(recipe), min(first_steps(recipe), recipe.steps)
    if wire is None or not steps or best.setup.layout.replicate == 1:
        return None
    longer = step(replace(best.setup, wire=wire), rates).gradients - best.parts.gradients
    return Opening(steps, best.seconds + longer)


def first_wire_of(recipe: Recipe) -> Wire | None:
    """What is sent in a first step: all gradients, or what a round of one step does, while workers wait."""
    if recipe.local_sgd is not None:
        return local_wire(recipe.local_sgd.model_copy(update={"sync_every": 1, "sync_delay": 0}))
    return Wire() if recipe.grad_sync.compression == "powersgd" else None
