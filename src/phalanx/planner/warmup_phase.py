"""The first steps of a run, where they are of another kind: in them gradients or weights travel whole.

What is sent then is said in `train.grad_sync`; how many steps it is, in `recipe.grad_sync_defaults`.
"""

from dataclasses import dataclass, replace

from phalanx.planner.device_costs import DeviceCosts
from phalanx.planner.scenario import GradientTransport, local_wire
from phalanx.planner.search import Candidate
from phalanx.planner.step_time import predict_step_time
from phalanx.recipe import Recipe
from phalanx.recipe.grad_sync_defaults import num_warmup_steps


@dataclass(frozen=True)
class WarmupPhase:
    """So many first steps of a run."""

    num_steps: int
    step_s: float
    """Of each of them."""

    def mean_step_seconds(self, steady_step_s: float, total_steps: int) -> float:
        """Seconds of a step on average over a run of so many, where all others take `seconds`."""
        return steady_step_s + (self.step_s - steady_step_s) * self.num_steps / total_steps


def predict_warmup_phase(recipe: Recipe, candidate: Candidate, rates: DeviceCosts) -> WarmupPhase | None:
    """They take as much longer as it takes to exchange all; None where all steps are alike."""
    transport, num_steps = warmup_transport_of(recipe), min(num_warmup_steps(recipe), recipe.steps)
    if transport is None or not num_steps or candidate.scenario.parallelism.replicate == 1:
        return None
    extra_s = (
        predict_step_time(replace(candidate.scenario, transport=transport), rates).grad_sync
        - candidate.breakdown.grad_sync
    )
    return WarmupPhase(num_steps, candidate.step_s + extra_s)


def warmup_transport_of(recipe: Recipe) -> GradientTransport | None:
    """What is sent in a first step: all gradients, or what a round of one step does, while workers wait."""
    if recipe.local_sgd is not None:
        return local_wire(recipe.local_sgd.model_copy(update={"sync_every": 1, "sync_delay": 0}))
    return GradientTransport() if recipe.grad_sync.compression == "powersgd" else None
