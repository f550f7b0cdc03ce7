"""A step of a worker that trains by itself for a while (`exchange/rounds.py`): as any other, but that the gradients are
those of its own samples, which it divides by its own number of terms and clips by its own norm.

What workers agree on is agreed in every step all the same, in one small message: the loss of the whole batch, the wish
to stop, how far a save is, and whether anybody's gradient is not finite. Such a step is skipped by all, so that their
optimizers and fp16's loss scale count alike.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.recipe import Recipe
from phalanx.recipe.exchanges import bucket_bytes, first_steps
from phalanx.recipe.schema import Parallelism
from phalanx.train.apart import Apart, was_apart
from phalanx.train.exchange.rounds import PLAIN, Rounds
from phalanx.train.exchange.schedule import Schedule
from phalanx.train.gradients import LocalGradients
from phalanx.train.model import Seeds
from phalanx.train.optimizers import Optimizer
from phalanx.train.parallel.divided import Divided
from phalanx.train.place import Place
from phalanx.train.precision import LossScale
from phalanx.train.residuals import Residuals
from phalanx.train.step import Outcome, Stepper, doubtful, told
from phalanx.train.timing import Stopwatch


class OwnGradients(LocalGradients):
    """Those of a worker's own samples. The rounds are closed with them, since they hold the group."""

    def __init__(self, parameters: Sequence[nn.Parameter], rounds: Rounds):
        super().__init__(parameters)
        self._rounds = rounds

    def close(self) -> None:
        self._rounds.close()


class LocalStepper(Stepper):
    """The norm that it tells is the root of the mean square of all workers'. The gradient noise scale cannot be told:
    it takes the gradient of the whole batch."""

    def __init__(self, rounds: Rounds, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._rounds = rounds

    def begin(self, step: int) -> None:
        super().begin(step)
        self._squared = False

    def finish(self, watch: Stopwatch) -> Tensor:
        """Leave this worker's gradients in the parameters; the agreement of all, on the device."""
        self.summed.finish()
        norm = self.summed.norm().double()
        terms = self._agreement[self.micro_batches : 2 * self.micro_batches].sum()  # others' are not there yet
        self._own_part = torch.stack([norm, terms])
        self._agreement[-1] = (norm / terms.clamp(min=1.0) / self.scale.scale).square()
        if self.place.world > 1:
            dist.all_reduce(self._agreement)
        watch.lap("exchange")
        return self._agreement

    def settle(self, agreement: Tensor) -> tuple[Outcome, float]:
        """Judge the step: its outcome, and the factor that turns this worker's gradients into its clipped mean's."""
        *values, square, norm, terms = torch.cat([agreement, self._own_part]).tolist()
        loss, _, flags = told(values, self.micro_batches, self.place.world)
        grad_norm = math.sqrt(square / self.place.world)
        factor = 1.0 / (max(terms, 1.0) * self.scale.scale)
        skipped = doubtful(loss, grad_norm)
        if skipped is None and self.clip is not None and norm * factor > self.clip:
            factor *= self.clip / (norm * factor)
        return Outcome(loss, grad_norm, skipped, flags), factor

    def update(self, factor: float, lr: float) -> None:
        """Scale the gradients and change the parameters, which from now on are this worker's own."""
        super().update(factor, lr)
        self._rounds.together = False


def make_local_stepper(
    recipe: Recipe, place: Place, divided: Divided, optimizer: Optimizer, scale: LossScale, seeds: Seeds
) -> LocalStepper:
    """The stepper for a model that is whole on every worker, whose state is from now on each worker's own."""
    micro, layout, local_sgd = recipe.batch.micro_size, recipe.parallelism, recipe.local_sgd
    assert local_sgd is not None
    assert isinstance(micro, int)
    assert isinstance(layout, Parallelism)
    parameters = list(divided.trainable().values())
    rounds = Rounds(
        parameters,
        rank=place.rank,
        world=place.world,
        schedule=Schedule(
            local_sgd.sync_every, recipe.steps, local_sgd.num_fragments, local_sgd.sync_delay, first_steps(recipe)
        ),
        outer=local_sgd.outer_optimizer if local_sgd.method == "diloco" else PLAIN,
        wire=local_sgd.sync_dtype,
        capacity=bucket_bytes(recipe.grad_sync),
        group=divided.mesh.replicate,
    )
    divided.apart = Apart(divided, rounds)
    divided.residuals = None
    if local_sgd.sync_dtype == "int8":
        divided.residuals = replace(Residuals.of(divided, rounds.residuals()), fits=was_apart)
    return LocalStepper(
        rounds,
        optimizer,
        scale,
        OwnGradients(parameters, rounds),
        place=place,
        mesh=divided.mesh,
        micro_batches=recipe.batch.global_size // micro,
        clip=recipe.optimizer.max_grad_norm,
        seeds=seeds,
        modules=divided.modules,
        own_gradients=recipe.compile == "cuda-graphs",
    )
