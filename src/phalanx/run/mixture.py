"""How often a run passes through each of its sources, by a given step: a forecast, or what was done."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.formatting import format_significant

MIXTURE_KEY = "mixture"
"""Key of plan.json."""


class MixtureStage(NamedTuple):
    """Weights of the sources from a step on; the first step is 0."""

    first_step: int
    weights: tuple[float, ...]


@dataclass(frozen=True)
class SourceMixture:
    """The sources that a run trains on. `num_samples`: training samples of one epoch of each."""

    num_samples: tuple[int, ...]
    stages: tuple[MixtureStage, ...]

    def count_epochs(self, num_steps: int, global_size: int) -> list[float]:
        """Return how many epochs of each source `num_steps` steps of `global_size` samples take."""
        epochs = [0.0] * len(self.num_samples)
        ends = [*(stage.first_step for stage in self.stages[1:]), num_steps]
        for stage, end in zip(self.stages, ends, strict=True):
            samples = max(min(end, num_steps) - stage.first_step, 0) * global_size
            for number, (weight, size) in enumerate(zip(stage.weights, self.num_samples, strict=True)):
                epochs[number] += samples * weight / sum(stage.weights) / size
        return epochs

    def average_weights(self) -> list[float]:
        """Return the mean weight of each source over the stages, on the scale of the first stage."""
        total = sum(self.stages[0].weights)
        return [
            sum(weight * (total / sum(stage.weights)) for weight, stage in zip(weights, self.stages, strict=True))
            for weights in zip(*(stage.weights for stage in self.stages), strict=True)
        ]


def format_epochs(epochs: Sequence[float]) -> str:
    """Format the epochs of each source: `1.25`, or `1.25 of source 0, 0.5 of source 1`."""
    counts = [format_significant(count) for count in epochs]
    return counts[0] if len(counts) == 1 else ", ".join(f"{count} of source {n}" for n, count in enumerate(counts))
