"""The training loop: which step is next, and what happens between steps. The step itself is `step.py`.

Between two steps, in this order: the guard judges, progress counts, evaluation and checkpoint if they are due, a wish
to stop is obeyed. All decisions rest on numbers that all workers share, so all take the same turn.
"""

import gc
import math
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.data import Data, Feed
from phalanx.errors import ExitCode, GaveUpError, PhalanxError
from phalanx.recipe import Recipe
from phalanx.run import Run
from phalanx.train.callbacks import Callbacks
from phalanx.train.checkpoint import Loaded, checkpoint_name, load_newest, load_tensors, read_manifest, step_of
from phalanx.train.evaluation import evaluate
from phalanx.train.guards import LIMIT, judge
from phalanx.train.optimizers import Optimizer
from phalanx.train.place import Place
from phalanx.train.precision import LossScale
from phalanx.train.reporter import Reporter
from phalanx.train.saving import Saving
from phalanx.train.schedule import factor
from phalanx.train.state import Progress, buffer_names, load_state, state_tensors
from phalanx.train.step import Outcome, Stepper
from phalanx.train.tasks import Task
from phalanx.train.timing import stopwatch

CURE = "lower optim.lr, lengthen optim.schedule.warmup, or look at the data of these steps"


class NotSaved(PhalanxError):
    """The state with which a run ended could not be written."""

    code = ExitCode.UNFINISHED


class StopRequest:
    """Set by SIGTERM, SIGUSR1 or SIGINT; read at every boundary. Installing it lets held-back signals through."""

    def __init__(self) -> None:
        self.asked = False

    def install(self) -> None:
        """Handle the signals in this process (main thread only)."""
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        for number in numbers:
            signal.signal(number, self._ask)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def _ask(self, *_: object) -> None:
        self.asked = True


@dataclass
class Parts:
    """What a loop works with, built by the worker."""

    run: Run
    recipe: Recipe
    place: Place
    data: Data
    model: nn.Module
    task: Task
    optimizer: Optimizer
    scale: LossScale
    stepper: Stepper
    callbacks: Callbacks
    reporter: Reporter
    stop: StopRequest
    units_per_sample: int


class Loop:
    """Trains from `progress` to the last step, or until a worker is asked to stop."""

    def __init__(self, parts: Parts, progress: Progress, common_meta: dict[str, Any]):
        self.parts = parts
        self.progress = progress
        self._rollbacks: Counter[int] = Counter()
        recipe, place = parts.recipe, parts.place
        self.saving = Saving(
            parts.run, place, recipe.checkpoint.keep, common_meta, self._tell_save, parts.reporter.flush
        )
        if progress.step:
            self.saving.resume(progress.step)
        self.watch = stopwatch(place.device)
        self._buffers = buffer_names(parts.model)

    def run(self) -> str:
        """Train; returns `done` or `stopped`. The last state is saved either way."""
        improved = False
        for best in self.steps():
            improved = best
        self._save_last(improved)
        status = "done" if self.progress.step >= self.parts.recipe.steps else "stopped"
        self._tell("end", {"status": status, "step": self.progress.step}, moment="end")
        return status

    def steps(self) -> Iterator[bool]:
        """Train step by step, for whoever wants to do something between them. Handed out is a whole step, with the
        evaluation and checkpoint that were due, as whether its held-out score was the best so far. Nothing is saved
        at the end."""
        recipe, parts, progress = self.parts.recipe, self.parts, self.progress
        parts.callbacks.view.step = progress.step
        parts.callbacks.start()
        gc.collect()
        gc.freeze()  # what exists now stays; later collections need not look at it again
        stopping = False
        with Feed(
            parts.data,
            global_batch=recipe.batch.global_,
            micro=recipe.batch.global_ // parts.stepper.micro_batches,
            rank=parts.place.rank,
            world=parts.place.world,
            consumed=progress.samples,
        ) as feed:
            self.watch.start()
            while progress.step < recipe.steps and not stopping:
                before = progress.step
                outcome = self._step(feed)
                # Alone there is nobody to agree with, so a request that came late in the step is obeyed at once.
                stopping = bool(outcome.flags["stop"]) or (parts.place.world == 1 and parts.stop.asked)
                self.watch.lap("other")
                advanced = progress.step > before  # after a rollback nothing is due: it was done when it was new
                improved = advanced and self._evaluate_if_due()
                self.watch.skip()
                if advanced and progress.step < recipe.steps and not stopping:
                    self._save_if_due(improved)
                    self.watch.lap("checkpoint")
                yield improved

    def _step(self, feed: Feed) -> Outcome:
        """One step: compute, agree, judge, update, count, report."""
        parts, recipe, progress, watch = self.parts, self.parts.recipe, self.progress, self.watch
        batches = next(feed)
        watch.lap("data")
        step = progress.step + 1
        agreement = parts.stepper.gradients(step, batches, self._flags, watch)
        outcome, scale = parts.stepper.settle(agreement)
        lr = recipe.optim.lr * factor(recipe.optim.schedule, step, recipe.steps)
        watch.lap("optimizer")
        self.saving.wait_copied()
        watch.lap("checkpoint")
        if outcome.skipped is None:
            parts.stepper.update(scale, lr)
        watch.lap("optimizer")
        self.saving.settle(outcome.flags)
        watch.lap("checkpoint")
        units = recipe.batch.global_ * parts.units_per_sample
        progress.step = parts.callbacks.view.step = step
        progress.samples += recipe.batch.global_
        if outcome.skipped is None:
            progress.last_loss = outcome.loss
            progress.units += units
        seconds, times = watch.stop()
        watch.start()
        event: dict[str, Any] = {
            "step": step,
            "loss": _finite(outcome.loss),
            "grad_norm": _finite(outcome.grad_norm),
            "lr": lr,
        }
        event |= {"tokens": units, "seconds": seconds, "parts": times}
        if outcome.skipped is not None:
            event["skipped"] = outcome.skipped
        self._tell("step", event, moment="step")
        self._judge(step, outcome)
        return outcome

    def _flags(self) -> tuple[bool, ...]:
        """This worker's flags for the agreement, in the order of `step.FLAGS`."""
        return (self.parts.stop.asked, *self.saving.flags())

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
        event = {"step": step, "what": outcome.skipped, "action": action, "count": progress.guards}
        self._tell("guard", event, moment="fault")
        if action == "rollback":
            self._roll_back(outcome.skipped)

    def _roll_back(self, why: str) -> None:
        """Go back to the last good checkpoint's weights. Samples are not repeated: they would poison it again."""
        parts, progress = self.parts, self.progress
        self.saving.finish()
        loaded = restore(parts, self._reject)
        if loaded is None:
            raise GaveUpError(
                f"step {progress.step}: {why} {LIMIT} times in a row, and no checkpoint to go back to; {CURE}"
            )
        progress.step = parts.callbacks.view.step = loaded.manifest.meta["step"]
        progress.units = loaded.manifest.meta["units"]
        self.saving.resume(progress.step)
        self._rollbacks[progress.step] += 1
        if self._rollbacks[progress.step] > LIMIT:
            raise GaveUpError(f"step {progress.step}: rolled back to it {LIMIT} times and {why} came again; {CURE}")

    def _evaluate_if_due(self) -> bool:
        """Score held-out data if it is time; whether the score is the best so far."""
        parts, recipe, progress = self.parts, self.parts.recipe, self.progress
        every = recipe.evaluate.every
        due = every is not None and (progress.step % every == 0 or progress.step == recipe.steps)
        if not due or progress.step == 0 or parts.data.held_out_samples == 0:
            return False
        assert isinstance(recipe.batch.micro, int)
        scores = evaluate(
            parts.model,
            parts.task,
            parts.data,
            place=parts.place,
            precision=recipe.precision,
            samples=recipe.evaluate.samples,
            micro=recipe.batch.micro,
            stop=lambda: parts.stop.asked,
        )
        if scores is None:  # asked to stop
            return False
        improved = math.isfinite(scores.loss) and (progress.best is None or scores.loss < progress.best)
        if improved:
            progress.best = scores.loss
        event = {"step": progress.step, **asdict(scores), "loss": _finite(scores.loss), "best": improved}
        event["metrics"] = {name: _finite(value) for name, value in scores.metrics.items()}
        self._tell("eval", event, moment="evaluation")
        return improved

    def _save_if_due(self, improved: bool) -> None:
        """Begin a save if it is time, or if the state is the best so far; not while steps are skipped."""
        every, step = self.parts.recipe.checkpoint.every, self.progress.step
        if every is None or (step % every and not improved):
            return
        if self.progress.skipped_in_a_row:  # weights in doubt are nothing to go back to
            return
        if self.saving.in_flight is not None and not improved:
            busy = f"step {step}: not saved, because step {self.saving.in_flight} is still being written"
            self._tell("warning", {"text": f"{busy}; a larger checkpoint.every would suit this disk"})
            return
        self.saving.finish()
        self._start_save(improved)

    def _save_last(self, improved: bool) -> None:
        """Save the state with which the run ends, unless it is saved already."""
        self.saving.finish()
        if self.saving.last_saved != self.progress.step:
            self._start_save(improved)
            self.saving.finish()
        self.saving.close()
        if self.saving.last_saved != self.progress.step:
            where = (
                ""
                if self.saving.last_saved is None
                else f"; the last good checkpoint is of step {self.saving.last_saved}"
            )
            raise NotSaved(f"step {self.progress.step}: the last checkpoint could not be written{where}")

    def _start_save(self, improved: bool) -> None:
        tensors = state_tensors(self.parts.model, self.parts.optimizer, self.parts.scale)
        self.saving.start(self.progress, tensors, self._buffers, improved)

    def _tell_save(self, kind: str, event: dict[str, Any]) -> None:
        self._tell(kind, event, moment={"checkpoint": "checkpoint", "checkpoint_failed": "fault"}.get(kind))

    def _reject(self, path: Path, file: str, reason: str) -> None:
        reject(self.parts, path, file, reason)

    def _tell(self, kind: str, event: dict[str, Any], moment: str | None = None) -> None:
        """Report an event, and call the callbacks that wait for it."""
        if self.parts.place.leads:
            self.parts.reporter.event(kind, **event)
        if moment is not None:
            self.parts.callbacks.call(moment, {"kind": kind, **event})


def reject(parts: Parts, path: Path, file: str, reason: str) -> None:
    """Say that a checkpoint is damaged and will not be used."""
    if parts.place.leads:
        relative = str(path.relative_to(parts.run.path))
        parts.reporter.event("checkpoint_rejected", path=relative, file=file, reason=reason)


def restore(parts: Parts, on_reject: Callable[[Path, str, str], None]) -> Loaded | None:
    """Load the newest checkpoint that is good for every worker into the model, optimizer and scale."""
    loaded = load_newest(parts.run.checkpoints, on_reject)
    if parts.place.world > 1:
        newest = torch.tensor(-1 if loaded is None else step_of(loaded.path), device=parts.place.device)
        dist.all_reduce(newest, dist.ReduceOp.MIN)
        step = int(newest)
        if step < 0:
            loaded = None
        elif loaded is not None and step_of(loaded.path) != step:  # another worker could not read a newer one
            path = parts.run.checkpoints / checkpoint_name(step)
            manifest = read_manifest(path)
            loaded = Loaded(path, manifest, load_tensors(path, manifest=manifest))
    if loaded is not None:
        load_state(parts.model, parts.optimizer, parts.scale, loaded.tensors, str(loaded.path))
    return loaded


def _finite(value: float) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return value if math.isfinite(value) else None
