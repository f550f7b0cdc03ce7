"""When the state of a run is kept: in checkpoints, and in copies in the nodes' memory.

It tells its `Saving` when to begin. Of a checkpoint that was lost together with a worker who wrote it, it remembers
that one is owed in its place, and that a guard would have to go back before it.
"""

from collections.abc import Callable
from typing import Any

from phalanx.errors import ExitCode, PhalanxError
from phalanx.run import Event
from phalanx.run.event_types import CheckpointFailed, CheckpointSaved, RunWarning
from phalanx.train.forward_state import weights_now
from phalanx.train.hot import HotCopies
from phalanx.train.interval import DurableInterval, Tell, Times
from phalanx.train.parallel.divided import Held
from phalanx.train.parts import Parts
from phalanx.train.saving import Saving
from phalanx.train.state import Standing, held_state


class NotSaved(PhalanxError):
    """The state with which a run ended could not be written."""

    code = ExitCode.UNFINISHED


class Keeping:
    """One worker's part."""

    def __init__(self, parts: Parts, standing: Standing, common_meta: dict[str, Any], times: Times, tell: Tell):
        self._parts, self._progress, self._tell = parts, standing.progress, tell
        recipe, place, mesh = parts.recipe, parts.place, parts.divided.mesh
        told = (common_meta, self._told, parts.reporter.flush)
        progress = self._progress
        self.interval = DurableInterval(recipe.checkpoint.every, parts.run, place, progress.saved, times, self._told)
        durable = self.interval.now
        copies = HotCopies(
            parts.run, place, mesh, recipe.checkpoint.in_memory_every, progress.step, times, durable, *told
        )
        self.saving = Saving(parts.run, place, mesh, recipe.checkpoint.keep, *told, copies, parts.heed)
        self.saving.tidies = not progress.missed
        if progress.saved:
            self.saving.resume(progress.saved)
        self._taken = standing.unfinished and standing.unfinished.step
        if standing.unfinished is not None:
            self.interval.begins(standing.unfinished.step)
            self.saving.take_along(standing.unfinished)
        self._owes = progress.missed > progress.saved  # a save in place of one that was lost
        self._buffers = list(parts.divided.buffers())
        self._frozen = self._frozen_now(values=True)
        self._moved: set[str] | None = None  # of these, what forwards change; to be found
        self._checked = False  # that the workers together save everything once
        self._prepared = place.device.type == "cpu"  # there memory is quickly had

    def save_if_due(self, improved: bool) -> None:
        """Begin a save if it is time, or if the state is the best so far; not while steps are skipped."""
        step = self._progress.step
        if not self._checked and not self._progress.skipped_in_a_row:
            self._checked = True
            self.saving.check_whole(step, self._state())
        owed = self._owes and self.saving.in_flight is None
        due = self.due(self.interval.due) or improved
        if self.interval.every is None or self._progress.skipped_in_a_row:  # weights in doubt are nothing to go back to
            return
        if not self._prepared:
            self._prepared = True
            self.saving.prepare(self._state())
        if not (due or owed):
            return
        if self.saving.in_flight is not None and not improved:
            busy = f"step {step}: not saved, because step {self.saving.in_flight} is still being written"
            self._tell(RunWarning(text=f"{busy}; a larger checkpoint.every would suit this disk"))
            return
        if improved:
            self.saving.finish()
        self._start_save(improved, regular=due)

    def due(self, due: Callable[[int], bool]) -> bool:
        """Whether something is due after this step: or was, while each worker trained apart, and now all hold the same
        weights again."""
        step, apart = self._progress.step, self._parts.divided.apart
        return any(due(each) for each in (range(step, step + 1) if apart is None else apart.due(step)))

    def copy_if_due(self) -> None:
        """Begin a copy into the nodes' memory if it is time; not while steps are skipped."""
        hot, progress = self.saving.hot, self._progress
        if self.saving.in_flight is not None:  # who goes on from a copy must have all checkpoints before it
            return
        if hot is None or progress.skipped_in_a_row:
            return
        if self.due(lambda step: hot.due(step, self._parts.recipe.steps)):
            hot.start(progress, self._state(), self._changing_early())

    def save_last(self, improved: bool) -> None:
        """Save the state with which the run ends, unless it is saved already."""
        self.saving.finish()
        if self.saving.last_saved != self._progress.step:
            self._start_save(improved, regular=True)
            self.saving.finish()
        self.saving.close()
        if self.saving.last_saved != self._progress.step:
            where = (
                ""
                if self.saving.last_saved is None
                else f"; the last good checkpoint is of step {self.saving.last_saved}"
            )
            raise NotSaved(f"step {self._progress.step}: the last checkpoint could not be written{where}")

    def _start_save(self, improved: bool, regular: bool) -> None:
        """Begin a save; `regular` ones are those that a run has in which nobody is lost."""
        self._owes = False
        if regular:
            self._miss(0)
        self.interval.begins(self._progress.step)
        self.saving.start(self._progress, self._state(), self._changing_early(), improved)

    def _changing_early(self) -> list[str]:
        """What a step changes before its update, while a snapshot may still be copied: buffers, what the exchange
        holds back, and parameters that are not trained if forwards have changed them."""
        residuals = self._parts.divided.residuals
        first = self._moved is None  # what is written to `weight.data` shows in values only, which are looked at once
        now = self._frozen_now(values=first)
        known = now.keys() & self._frozen.keys()  # FSDP may have some gathered at one time only
        moved = {name for name in known if now[name][0] != self._frozen[name][0]}
        self._moved = (self._moved or set()) | moved
        if first:
            self._moved |= {name for name in known if now[name][1] != self._frozen[name][1]}
        return [*self._buffers, *sorted(self._moved), *([] if residuals is None else residuals.held())]

    def was_restored(self) -> None:
        """Parameters that are not trained were written to by no forward, but from a checkpoint."""
        self._frozen = self._frozen_now(values=self._moved is None)

    def _frozen_now(self, values: bool) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for module in self._parts.divided.modules:
            found |= weights_now(module, values, frozen=True)
        return found

    def _miss(self, step: int) -> None:
        """The checkpoint of this step is missing if a guard has to go back to it: what it was before it stays."""
        self._progress.missed = step
        self.saving.tidies = not step

    def _state(self) -> dict[str, Held]:
        return held_state(self._parts.divided, self._parts.optimizer, self._parts.scale)

    def _told(self, event: Event) -> None:
        if isinstance(event, CheckpointSaved):
            self._taken = None
            self._progress.saved = event.step
            self._owes = False
            self.interval.saved(event.step, event.stall_s, event.duration_s)
        elif isinstance(event, CheckpointFailed):
            taken, self._taken = self._taken, None
            self.interval.failed()
            if taken is not None:
                self._owes = True
                if not self._progress.missed:  # else it was itself in the place of one
                    self._miss(event.step)
        self._tell(event)
