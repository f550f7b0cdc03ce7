"""One worker's part in a run, as a training loop sees it: batches come, losses go in, steps happen.

    for batch in gang.batches():
        loss_sum, terms = ...            # forward and loss are the loop's own
        gang.backward(loss_sum, terms)
        gang.step()                      # acts after the last micro-batch of a step

Between two steps, in this order: the guard judges, progress counts, evaluation and checkpoint if they are due, a wish
to stop is obeyed. All decisions rest on numbers that all workers share, so all take the same turn. The arithmetic of a
step is `step.py`; the trainer (`loop.py`) and loops of the user's own (`joined.py`) both drive a gang.
"""

import gc
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.data.feed import Feed
from phalanx.errors import GaveUpError, UsageError
from phalanx.run import Event
from phalanx.run.event_types import EvaluationDone, NonFiniteStep, RunEnded, RunStatus, RunWarning, StepDone, StepPhases
from phalanx.train.exchange_watch import ExchangeWatch
from phalanx.train.forward_state import listed
from phalanx.train.guards import LIMIT, judge
from phalanx.train.interval import Times
from phalanx.train.keeping import Keeping
from phalanx.train.parts import Parts, never, reject
from phalanx.train.place import let_go
from phalanx.train.restoring import restore
from phalanx.train.same_model import SameModel
from phalanx.train.schedule import learning_rate
from phalanx.train.state import Last, Progress, Standing
from phalanx.train.step import Outcome
from phalanx.train.timing import Beating, stopwatch

CURE = "lower optimizer.lr, lengthen optimizer.schedule.warmup_steps, or look at the data of these steps"
BACKWARD_ONCE = "a training loop must call gang.backward(loss_sum, terms) once for every batch"
STEP_ONCE = "a training loop must call gang.step() once after every gang.backward(loss_sum, terms)"


Buffer = tuple[nn.Module, str, Tensor, Tensor]
"""A module's buffer, its name there, and its value at some time."""


def buffers_of(modules: Iterable[nn.Module]) -> list[Buffer]:
    """All buffers of modules as they are now, also those that are in no checkpoint: they may count within a step."""
    found = [
        (part, name, each)
        for top in modules
        for part in top.modules()
        for name, each in part.named_buffers(recurse=False)
    ]
    return [(part, name, buffer, buffer.clone()) for part, name, buffer in found]


class Summoned(Exception):
    """The agent wants the workers to meet anew (regroup.py), which all of them have seen at the end of a step; or one
    is gone."""


class Gang:
    """Trains from `progress` to the last step, or until a worker is asked to stop; or from how workers stood when they
    left another world."""

    def __init__(self, parts: Parts, begin: Progress | Standing, common_meta: dict[str, Any]):
        standing = begin if isinstance(begin, Standing) else Standing(begin, begin.step, scored=begin.step)
        self.parts = parts
        self.progress = progress = standing.progress
        self._goes_on = isinstance(begin, Standing)
        self._rollbacks: Counter[int] = Counter()
        recipe, place, mesh = parts.recipe, parts.place, parts.divided.mesh
        self.times = Times()
        self.keeping = Keeping(parts, standing, common_meta, self.times, self._tell)
        self.saving = self.keeping.saving
        self.watch = Beating(stopwatch(place.device), parts.pulse)
        gradients, backwards = parts.stepper.summed, len(mesh.own(parts.stepper.micro_batches))
        self.exchange = ExchangeWatch(recipe, place, gradients, backwards, progress, self._tell)
        self._same = SameModel(parts.divided)
        self._begun = progress.samples  # when the current step began
        self._settled, self._scored = standing.settled, standing.scored
        self._back_for = standing.back_for
        self._before: list[Buffer] = []  # when the step began, where workers may be torn out of one
        self._last: Last | None = None  # a step was done
        self._changing = False  # state and progress do not belong together
        self._handed_out = 0  # micro-batches of it that the loop has got
        self._stopping = False
        self._improved = standing.improved

    def batches(self) -> Iterator[Any]:
        """This worker's micro-batches, one after the other, until the run is done or stops. Random numbers are seeded
        for each. UsageError when `backward` or `step` is left out or called once too often."""
        for micro_batches in self.steps():
            for number, arrays in enumerate(micro_batches):
                batch = self.parts.convert(arrays)
                self._handed_out = number + 1
                self.parts.stepper.seed()
                yield batch
                if self.parts.stepper.backwards != number + 1:
                    raise UsageError(BACKWARD_ONCE)

    def steps(self) -> Iterator[list[Any]]:
        """The micro-batches of this worker for each step, as the data gave them."""
        recipe, parts, progress = self.parts.recipe, self.parts, self.progress
        parts.callbacks.view.step = progress.step
        parts.callbacks.start()
        stays = parts.summoned is never or parts.divided.mesh.only_replicates
        if self._goes_on:
            let_go(stays)  # of the group that lost a member
        else:
            gc.collect()
            if stays:
                gc.freeze()  # what exists now stays; later collections need not look at it again
        with Feed(
            parts.data,
            global_batch=recipe.batch.global_size,
            micro=recipe.batch.global_size // parts.stepper.micro_batches,
            rank=parts.divided.mesh.data,
            world=parts.divided.mesh.data_size,
            turns=parts.divided.mesh.turns,
            consumed=progress.samples,
        ) as feed:
            self.watch.start()
            if self._back_for:
                self._roll_back(self._back_for)
            elif self._settled < progress.step:
                self._settle()
            while progress.step < recipe.steps and not self._stopping:
                micro_batches = next(feed)
                self.watch.lap("data")
                self._begun = progress.samples
                self._before = [] if parts.summoned is never else buffers_of(parts.divided.modules)
                self._handed_out = len(micro_batches)
                parts.pulse.step = progress.step + 1
                parts.stepper.begin(progress.step + 1)
                yield micro_batches
                if progress.samples == self._begun:
                    raise UsageError(STEP_ONCE)

    def backward(self, loss_sum: Tensor, terms: Tensor | int) -> None:
        """Backward of a micro-batch: the sum of its losses (0-d) over `terms` terms. Do not divide: the gradient of a
        step is divided once, by the number of terms of the whole global batch. UsageError when there is no batch that
        waits for it."""
        if self.parts.stepper.backwards >= self._handed_out:
            raise UsageError(BACKWARD_ONCE)
        self.parts.stepper.backward(loss_sum, terms, self._flags, self.watch)

    def note(self, sums: Sequence[tuple[Tensor, Tensor | int]] | None) -> None:
        """Instead of `backward`: what a pipeline computed for all micro-batches of a step, backward included."""
        self.parts.stepper.note(sums, self._flags, self.watch)

    def step(self) -> bool:
        """After the last micro-batch of a step: change the weights, report, evaluate and save what is due. Whether it
        was the last. UsageError when the step was done already, or none has begun."""
        stepper, recipe, progress = self.parts.stepper, self.parts.recipe, self.progress
        if not self._handed_out:
            raise UsageError(STEP_ONCE)
        if not stepper.complete:
            return False
        if progress.samples != self._begun:
            raise UsageError(STEP_ONCE)
        self._same.check(progress.step + 1)
        before = progress.step
        outcome = self._finish_step()
        # Alone there is nobody to agree with, so a request that came late in the step is obeyed at once.
        self._stopping = bool(outcome.flags["stop"]) or (self.parts.place.world == 1 and self.parts.stop.asked)
        self.watch.lap("other")
        self._improved = False
        if progress.step > before:  # after a rollback nothing is due: it was done when it was new
            if progress.step < recipe.steps and not self._stopping:
                self.exchange.look()
            self._settle()
        # Who comes has no part in a save in flight.
        all_summoned = outcome.flags["summoned"] == self.parts.place.world and self.saving.in_flight is None
        if all_summoned and progress.step < recipe.steps and not self._stopping:
            raise Summoned
        return True

    def _settle(self) -> None:
        """Do what is due after a step."""
        if self._scored < self.progress.step:  # else by those who were torn out of what follows
            self._improved = self._evaluate_if_due()
            self._scored = self.progress.step
        self.watch.skip()
        if self.progress.step < self.parts.recipe.steps and not self._stopping:
            self.keeping.save_if_due(self._improved)
            self.keeping.copy_if_due()
            self.watch.lap("checkpoint")
        self._settled = self.progress.step

    @property
    def whole(self) -> bool:
        """Whether others could go on from what is in this worker's memory."""
        return not self._changing

    def abandon(self) -> Standing:
        """Leave everything as it was at the end of the last step that is done, without a word to the others."""
        unfinished = self.saving.leave()  # before anything changes that it may be copying
        self.parts.stepper.summed.close()
        within = self.progress.samples == self._begun
        if within:
            with torch.no_grad():
                for module, name, buffer, value in self._before:
                    setattr(module, name, buffer.copy_(value))
        summed = within and self.parts.stepper.has_sums
        due = (self._scored, self._improved, self._back_for)
        return Standing(self.progress, self._settled, self._last, summed, *due, unfinished)

    def finish(self) -> str:
        """Save the state with which the run ends; `done` or `interrupted`."""
        self.parts.pulse.beat("ending")
        self.keeping.save_last(self._improved)
        status: RunStatus = "done" if self.progress.step >= self.parts.recipe.steps else "interrupted"
        self._tell(RunEnded(status=status, step=self.progress.step))
        return status

    def _finish_step(self) -> Outcome:
        """Agree, judge, update, count, report."""
        parts, recipe, progress, watch = self.parts, self.parts.recipe, self.progress, self.watch
        step = progress.step + 1
        agreement, lr, early = parts.stepper.finish(watch), learning_rate(recipe, step), parts.stepper.early
        if early:
            self.saving.wait_copied()
            watch.lap("checkpoint")
            parts.stepper.update_early(agreement, lr)
        outcome, scale = parts.stepper.settle(agreement)
        watch.lap("optimizer")
        if not early:
            self.saving.wait_copied()
            watch.lap("checkpoint")
        self._changing = True
        if outcome.skipped is None and not early:
            parts.stepper.update(scale, lr)
        new = parts.stepper.follow(outcome.flags)
        watch.lap("optimizer")
        if parts.divided.apart is not None and parts.divided.apart.rounds.follow(step):
            watch.lap("exchange")
        self.saving.settle(outcome.flags)
        watch.lap("checkpoint")
        units = recipe.batch.global_size * parts.units_per_sample
        progress.step = parts.callbacks.view.step = step
        progress.samples += recipe.batch.global_size
        self._changing = False
        if outcome.skipped is None:
            progress.last_loss = outcome.loss
            progress.units += units
        seconds, times = watch.stop()
        watch.start()
        self.times.note(seconds)
        self.exchange.note(seconds, times)
        event = StepDone(
            step=step,
            loss=_finite(outcome.loss),
            grad_norm=_finite(outcome.grad_norm),
            lr=lr,
            units=units,
            duration_s=seconds,
            breakdown_s=phases_of(times),
            skip_reason=outcome.skipped,
            noise_scale_samples=self._noise(outcome),
        )
        first, self._last = self._last is None, Last((scale, lr) if outcome.skipped is None else None, ())
        self._remember(event)
        self._tell(event)
        if new:
            text = f"forwards change {listed(new)}: after each step all workers have what the first one has"
            self._tell(RunWarning(text=text))
        if first:
            parts.reporter.flush()  # the agent can do without a worker from now on
        self._judge(step, outcome)
        return outcome

    def _remember(self, event: StepDone | NonFiniteStep) -> None:
        """Keep what is told of a step for workers that may be torn out of it."""
        assert self._last is not None
        self._last = replace(self._last, told=(*self._last.told, event))

    def _noise(self, outcome: Outcome) -> float | None:
        """The gradient noise scale in samples, where this step added to the estimate."""
        squares, scale = outcome.squares, self.progress.noise
        if squares is None or squares.small_terms >= squares.big_terms:
            return None
        scale.update(squares.small, squares.small_terms, squares.big, squares.big_terms)
        samples = self.parts.recipe.batch.global_size / squares.big_terms
        return None if scale.value is None else _finite(scale.value * samples)

    def _flags(self) -> tuple[bool, ...]:
        """This worker's flags for the agreement, in the order of `step.FLAGS`."""
        return (self.parts.stop.asked, self.parts.summoned(), *self.saving.flags())

    def _judge(self, step: int, outcome: Outcome) -> None:
        """The guard's turn: take note, and roll back when too many steps in a row were skipped."""
        scale, progress = self.parts.scale, self.progress
        if outcome.skipped is None:
            scale.update(overflow=False)
            progress.skipped_in_a_row = 0
            return
        overflow = outcome.skipped == "non-finite gradient" and not scale.at_bottom
        scale.update(overflow=True)
        progress.guards += 1
        action, progress.skipped_in_a_row = judge(progress.skipped_in_a_row, curable=overflow)
        event = NonFiniteStep(step=step, reason=outcome.skipped, action=action, num_skipped=progress.guards)
        self._remember(event)
        self._tell(event)
        if action == "rollback":
            self._roll_back(outcome.skipped)

    def _roll_back(self, why: str) -> None:
        """Go back to the last good checkpoint's weights. Samples are not repeated: they would poison it again."""
        parts, progress = self.parts, self.progress
        self._back_for = why  # also for who is torn out of waiting
        self.saving.finish()
        self._changing = True
        if progress.missed:
            # Another in its place would be another run; so all start again from before it, and come by it once more.
            self.saving.undo(progress.missed)
            raise RuntimeError(
                f"step {progress.step}: {why} {LIMIT} times in a row, and the checkpoint to go back to, of step "
                f"{progress.missed}, was lost together with a worker: restarting from the one before it"
            )
        held = (parts.divided, parts.optimizer, parts.scale)
        loaded = restore(parts.run, parts.place, *held, self._reject, in_place=True)
        if loaded is None:
            raise GaveUpError(
                f"step {progress.step}: {why} {LIMIT} times in a row, and no checkpoint to go back to; {CURE}"
            )
        progress.step = parts.callbacks.view.step = loaded.manifest.meta["step"]
        progress.units = loaded.manifest.meta["units"]
        progress.saved = self._settled = self._scored = progress.step
        self._back_for, self._changing = "", False
        self.keeping.was_restored()
        self.saving.roll_back(progress.step)
        self._rollbacks[progress.step] += 1
        if self._rollbacks[progress.step] > LIMIT:
            raise GaveUpError(f"step {progress.step}: rolled back to it {LIMIT} times and {why} came again; {CURE}")

    def _evaluate_if_due(self) -> bool:
        """Score held-out data if it is time; whether the score is the best so far."""
        parts, recipe, progress = self.parts, self.parts.recipe, self.progress
        every = recipe.evaluation.every
        due = every is not None and (self.keeping.due(lambda step: step % every == 0) or progress.step == recipe.steps)
        if not due or progress.step == 0:
            return False
        with parts.divided.agreed():
            scores = parts.score()
        if scores is None:  # nothing to score, or asked to stop
            return False
        improved = math.isfinite(scores.loss) and (progress.best is None or scores.loss < progress.best)
        if improved:
            progress.best = scores.loss
        self._tell(
            EvaluationDone(
                step=progress.step,
                loss=_finite(scores.loss),
                metrics={name: _finite(value) for name, value in scores.metrics.items()},
                num_samples=scores.samples,
                duration_s=scores.seconds,
                is_best=improved,
            )
        )
        return improved

    def _reject(self, path: Path, file: str, reason: str) -> None:
        reject(self.parts, path, file, reason)

    def _tell(self, event: Event) -> None:
        """Report an event, and call the callbacks that wait for it."""
        if self.parts.place.leads:
            self.parts.reporter.event(event)
        elif isinstance(event, StepDone):
            self.parts.reporter.keep(event)
        self.parts.callbacks.call(event)


def phases_of(times: Mapping[str, float]) -> StepPhases:
    """The parts of a stopwatch."""
    return StepPhases(
        data_wait=times["data"],
        forward=times["forward"],
        backward=times["backward"],
        grad_sync=times["exchange"],
        optimizer=times["optimizer"],
        checkpoint_stall=times["checkpoint"],
        other=times["other"],
    )


def _finite(value: float) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return value if math.isfinite(value) else None
