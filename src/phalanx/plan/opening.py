"""The first steps of a run, where they are of another kind: in them gradients or weights travel whole.

What is sent then, by `exchange.strategy`, is said in `train.exchange`; how many steps it is, in `recipe.exchanges`.
"""

from dataclasses import dataclass, replace

from phalanx.plan.rates import Rates
from phalanx.plan.search import Option
from phalanx.plan.setup import Wire, wire_of
from phalanx.plan.step import step
from phalanx.recipe import Recipe
from phalanx.recipe.exchanges import first_steps
from phalanx.recipe.schema import LOCAL, Exchange


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
    wire, steps = first_wire_of(recipe.exchange), min(first_steps(recipe), recipe.steps)
    if wire is None or not steps or best.setup.layout.replicate == 1:
        return None
    longer = step(replace(best.setup, wire=wire), rates).gradients - best.parts.gradients
    return Opening(steps, best.seconds + longer)


def first_wire_of(exchange: Exchange) -> Wire | None:
    """What an exchange sends in a first step: all gradients, or what a round of one step does, while workers wait."""
    if exchange.strategy in LOCAL:
        return wire_of(exchange.model_copy(update={"every": 1, "delay": 0}))
    return Wire() if exchange.strategy == "powersgd" else None
