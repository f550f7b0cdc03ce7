"""The warm-up of a run: its first steps, which send gradients or weights uncompressed.

`train.grad_sync` defines what they send, `recipe.grad_sync_defaults` how many steps it takes.
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
    """The first steps of a run, which synchronize gradients differently from the rest."""

    num_steps: int
    step_s: float
    """Seconds of each of these steps."""

    def mean_step_seconds(self, steady_step_s: float, total_steps: int) -> float:
        """Mean seconds of a step in a run of `total_steps`, when a step after the warm-up takes `steady_step_s`."""
        return steady_step_s + (self.step_s - steady_step_s) * self.num_steps / total_steps


def predict_warmup_phase(recipe: Recipe, candidate: Candidate, rates: DeviceCosts) -> WarmupPhase | None:
    """The warm-up, longer by the all-reduce of all gradients; None where all steps are equal."""
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
