"""Checkpoints of a run as the training loop sees them: all workers save together, and agree on how it went.

Each worker writes its share in the background (`checkpoint.Saver`). Its state travels as flags in the per-step
agreement (`step.FLAGS`); `settle` acts on the sums of all workers, so every worker takes the same turn at the same
step: written by all -> rank 0 commits -> committed; or failed on one -> all drop it and training goes on.

When workers are lost meanwhile the others take the save along into their next world and end it there. Nothing waits for
it: threads go on writing while the workers meet. Whether the lost ones had written their parts is seen where it is
committed, when nobody who is left writes any more; if not, all drop it then, and no thread is waited for either.
"""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ValidationError

from phalanx.errors import UsageError, storage_failed, words_of
from phalanx.run import Event, Run
from phalanx.run.directory import write_json
from phalanx.run.event_types import CheckpointFailed, CheckpointSaved, RunWarning
from phalanx.train.checkpoint import (
    Phase,
    Piece,
    Saver,
    checkpoint_name,
    discard,
    list_checkpoints,
    retain,
    share_out,
    step_of,
)
from phalanx.train.checkpoint.format import Share, merge
from phalanx.train.hot import HOT_FLAGS, HotCopies
from phalanx.train.nodes import dtype_name, exchanged, heard_from, said_by_leader, say_to
from phalanx.train.parallel.divided import Held
from phalanx.train.parallel.mesh import Mesh
from phalanx.train.place import Place
from phalanx.train.state import Progress, Unfinished

LOOK = 0.02
"""Seconds after which one who waits for the disk looks whether the others are still there."""
SAVE_FLAGS = ("written", "failed", "committed", *HOT_FLAGS)


class _Claim(BaseModel):
    """What one worker holds (dtype and shape of each logical tensor), and what it would save of that."""

    held: dict[str, str]
    share: Share


class Saving:
    """Saves of one worker. `tell(event)` reports what became of them: CheckpointSaved and CheckpointFailed on every
    worker, RunWarning on the leading one. `flush()` sends the events told so far: a run that dies goes on
    from what was committed, so the events of the steps until then must not die with it. `hot` are copies in the nodes'
    memory besides: they go along with whatever is done here. `heed` is called while this waits for the disk, and raises
    where somebody is gone with whom it would go on."""

    def __init__(
        self,
        run: Run,
        place: Place,
        mesh: Mesh,
        keep: int,
        common: dict[str, Any],
        tell: Callable[[Event], None],
        flush: Callable[[], None],
        hot: HotCopies | None = None,
        heed: Callable[[], None] = lambda: None,
    ):
        self._run = run
        self._place = place
        self._mesh = mesh
        self._keep = keep
        self._common = common
        self._tell = tell
        self._flush = flush
        self.hot = hot
        self._heed = heed
        self._saver = Saver(run.checkpoints, place.rank, place.world, place.attempt)
        self._later: Saver | None = None  # this world's, while one of the world before has something in flight
        self._janitor = ThreadPoolExecutor(1, thread_name_prefix="retention")
        self._removals: list[Future[list[Path]]] = []  # of old checkpoints, not known to be done
        self._stall = 0.0
        self._waiting_for_copy = self._warned = False
        self._sizes: dict[str, int] = {}  # of what was saved last
        self._own: set[str] = set()  # what this worker saves of it
        self.in_flight: int | None = None  # the step being saved, alike on all workers
        self._best: float | None = None
        self.last_saved: int | None = None
        self.reason = ""  # why the last save failed, where this worker knows
        self.tidies = True
        """Whether a new checkpoint makes old ones superfluous."""

    def resume(self, step: int) -> None:
        """Go on from a checkpoint that was read. Others are removed as after a save, since `keep` may be smaller now
        and a disk too full for a save."""
        self.last_saved = step
        if self._place.leads:
            self._tidy(step)

    def take_along(self, unfinished: Unfinished) -> None:
        """Go on with a save that was begun in the world before, by all who are here and by others who were lost."""
        self._saver, self._later = unfinished.saver, self._saver
        self.in_flight, self.reason = unfinished.step, unfinished.reason
        self._best, self._stall = unfinished.best, unfinished.stall

    def undo(self, step: int) -> None:
        """Make it as if nothing had ever been saved after this step; for workers who all end now."""
        if self._place.leads:
            self._janitor.submit(self._remove_new, step).result()  # it may be removing old ones
        if self.hot is not None:
            self.hot.roll_back(step)
        exchanged(self._place, None)  # the first who ends is the end of all

    def roll_back(self, step: int) -> None:
        """Go back to the checkpoint of this step: what came after it is undone."""
        self.resume(step)
        if self.hot is not None:
            self.hot.roll_back(step)

    def start(self, progress: Progress, state: Mapping[str, Held], eager: list[str], best: bool) -> None:
        """Begin to save. Nothing else may be in flight. Workers that hold the same share it out."""
        assert self.in_flight is None
        step = progress.step
        self.in_flight = step
        self._best = progress.best if best else None
        pieces = self._pieces(state)
        meta = {**self._common, **asdict(progress), "saved": step}
        begun = time.perf_counter()
        try:
            self._saver.start(step, pieces, meta, eager=[name for name in eager if name in self._own])
            self._waiting_for_copy = True
        except UsageError as error:  # no room on the disk: training goes on
            self.reason = str(error)
        except OSError as error:
            if not storage_failed(error):
                raise
            self.reason = words_of(error)
        self._stall = time.perf_counter() - begun
        if self._saver.holds_up and not self._warned and self._place.leads:
            self._warned = True
            text = "host memory for checkpoints could not be page-locked, so training waits while they are copied"
            self._tell(RunWarning(text=f"{text}: raise the limit of locked memory (ulimit -l)"))

    def check_whole(self, step: int, state: Mapping[str, Held]) -> None:
        """See that the workers together would save each element of each tensor once: an optimizer or a module of the
        user's may hold something else on each. Every worker calls it, after an update. UsageError where they do not."""
        held = {name: f"{dtype_name(each.tensor.dtype)}{list(each.holding.shape)}" for name, each in state.items()}
        claim = _Claim(held=held, share=self._saver.share(self._pieces(state)))
        if not self._place.leads:
            say_to(0, claim.model_dump(mode="json"), None)
        problem = self._not_whole(claim) if self._place.leads else None
        if self._place.world > 1:
            problem = said_by_leader(self._place, problem)
        if problem:
            raise UsageError(
                f"step {step}: a checkpoint would not hold the state of all workers: {problem}; let the model and the "
                "optimizer hold tensors of the same names, shapes and dtypes on every worker"
            )

    def _not_whole(self, claim: _Claim) -> str:
        """What is wrong with what all workers hold and would save, on the leading one."""
        others = (_Claim.model_validate(heard_from(rank, None)) for rank in range(1, self._place.world))
        claims = [claim, *others]
        first: dict[str, tuple[int, str]] = {}
        for rank, each in enumerate(claims):
            for name, what in each.held.items():
                before, known = first.setdefault(name, (rank, what))
                if known != what:
                    return f"{name} is {known} on worker {before} and {what} on worker {rank}"
        try:
            left = first.keys() - merge((each.share for each in claims), {}).tensors.keys()
        except ValueError as error:
            problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        else:
            if not left:
                return ""
            problem = f"no worker would save {min(left)}"
        if lone := sorted(name for name in first if sum(name in each.held for each in claims) == 1):
            problem += f", and one worker alone holds {lone[0]}"
        return problem

    def prepare(self, state: Mapping[str, Held]) -> None:
        """Allocate what the first save needs, in the background."""
        self._saver.prepare(self._pieces(state))

    def _pieces(self, state: Mapping[str, Held]) -> list[Piece]:
        """What this worker writes."""
        sizes = {name: held.tensor.numel() * held.tensor.element_size() for name, held in state.items()}
        if sizes != self._sizes:  # an optimizer has no state before its first update, which a guard may put off
            self._sizes, self._own = sizes, self._share_of(state, sizes)
        return [
            Piece(name, block.of(state[name].tensor), state[name].holding.shape, block.offset)
            for name in sorted(self._own)
            for block in state[name].holding.blocks
        ]

    def wait_copied(self) -> None:
        """Call before tensors change."""
        if self._waiting_for_copy:
            self._stall += self._saver.wait_copied()
            self._waiting_for_copy = False
        if self.hot is not None:
            self.hot.wait_copied()

    def flags(self) -> tuple[bool, ...]:
        """This worker's SAVE_FLAGS now."""
        return (*self._flags(), *((False, False) if self.hot is None else self.hot.flags()))

    def _flags(self) -> tuple[bool, bool, bool]:
        if self.in_flight is None:
            return (False, False, False)
        state = self._saver.poll()
        if state.phase is Phase.FAILED:
            self.reason = state.reason
        failed = state.phase is Phase.FAILED or (state.phase is Phase.IDLE and bool(self.reason))
        return (state.phase is Phase.WRITTEN, failed, state.phase is Phase.COMMITTED)

    def settle(self, flags: Mapping[str, int]) -> None:
        """Take the next turn, given the flags of all workers."""
        if self.hot is not None:
            self.hot.settle(flags)
        step = self.in_flight
        if step is None:
            return
        if flags["failed"]:
            self._saver.abandon()
            reason = self.reason or "another worker could not write its part"
            self._end()
            self._tell(CheckpointFailed(step=step, reason=reason))
        elif flags["committed"]:
            self._committed(step)
        elif flags["written"] == self._place.world and self._place.leads:
            self._flush()
            self._saver.commit_async()

    def finish(self) -> None:
        """Block until nothing is in flight."""
        while self.in_flight is not None:
            while self._saver.wait(LOOK).busy:
                self._heed()
            self.settle(self._agree())

    def close(self) -> None:
        """Finish, and wait until old checkpoints, and all hot copies, are removed."""
        self.finish()
        self._saver.sweep()
        if self.hot is not None:
            self.hot.close()
        self._janitor.shutdown()
        self._look_after_removals()

    def leave(self) -> Unfinished | None:
        """Leave this world, waiting for no other worker: some are gone. Whole copies stay. The checkpoint that is being
        written, if any, is returned; its thread goes on, but reads none of the state's tensors any more."""
        self.wait_copied()
        if self.hot is not None:
            self.hot.abandon()
        self._janitor.shutdown()
        if self.in_flight is None:
            return None
        return Unfinished(self._saver, self.in_flight, self._best, self._stall, self.reason)

    def _share_of(self, state: Mapping[str, Held], sizes: Mapping[str, int]) -> set[str]:
        """What this worker saves of what it holds."""
        own: set[str] = set()
        for copies in {held.copies for held in state.values()}:
            alike = {name: sizes[name] for name, held in state.items() if held.copies == copies}
            index, count = self._mesh.number(copies)
            own.update(share_out(alike, count)[index])
        return own

    def _agree(self) -> dict[str, int]:
        flags = torch.tensor([float(flag) for flag in self.flags()], device=self._place.device)
        if self._place.world > 1:
            dist.all_reduce(flags)
        return {name: round(value) for name, value in zip(SAVE_FLAGS, flags.tolist(), strict=True)}

    def _committed(self, step: int) -> None:
        state = self._saver.poll()
        event = CheckpointSaved(
            step=step,
            path=os.path.join(self._run.checkpoints.name, checkpoint_name(step)),
            size_bytes=state.bytes,
            duration_s=state.seconds,
            stall_s=self._stall,
        )
        if self._place.leads:
            if self._best is not None:
                self._remember_best(step, self._best)
            self._tidy(step)
        self._end()
        self.last_saved = step
        if self.hot is not None:
            self.hot.saved(step)
        self._tell(event)

    def _remember_best(self, step: int, loss: float) -> None:
        try:
            write_json(best_file(self._run), {"step": step, "loss": loss})
        except OSError as error:  # the checkpoint may have taken the last room; training goes on
            text = f"step {step} is the best so far, but this could not be written: {error}"
            self._tell(RunWarning(text=text))

    def _tidy(self, step: int) -> None:
        """Have old checkpoints removed in the background; `step` is one that is good, and stays."""
        self._look_after_removals()
        if self.tidies:
            self._removals.append(self._janitor.submit(self._remove_old, step))

    def _remove_old(self, step: int) -> list[Path]:
        best = self._run.read_lossy(best_file(self._run)).get("step")
        protected = [step, best] if isinstance(best, int) else [step]
        return retain(self._run.checkpoints, self._keep, protected)

    def _remove_new(self, step: int) -> None:
        for path in list_checkpoints(self._run.checkpoints):
            if step_of(path) > step:
                discard(path)

    def _look_after_removals(self) -> None:
        """Tell of an old checkpoint that could not be removed, on the leading worker; training goes on."""
        done = [removal for removal in self._removals if removal.done()]
        self._removals = [removal for removal in self._removals if removal not in done]
        for removal in done:
            try:
                removal.result()
            except OSError as error:
                self._tell(RunWarning(text=f"an old checkpoint could not be removed: {error}"))

    def _end(self) -> None:
        self._saver.abandon()
        if self._later is not None:
            self._saver, self._later = self._later, None
        self.in_flight = None
        self._stall = 0.0
        self._waiting_for_copy = False
        self.reason = ""


def best_file(run: Run) -> Path:
    """Where it stands which checkpoint had the lowest held-out loss."""
    return run.checkpoints / "best.json"
