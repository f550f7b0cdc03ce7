"""Evaluations and saves of a job take turns with those of other jobs, where their site limits the swing of power."""

import time
from collections.abc import Callable, Sequence

from phalanx.errors import UsageError
from phalanx.run.event_types import RunWarning
from phalanx.run.stall_slots import StallSlots, SwingShare
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.object_collectives import all_reduce_max

RETRY_INTERVAL_S = 1.0
FIRST_STALL_S = 600.0
"""For how long the first slot is taken; it is given back after the stall. The next ones are twice as long as the stall
before, plus MIN_STALL_S."""
MIN_STALL_S = 10.0


class StallTurns:
    """The turns of one worker. Every worker makes the same calls at the same step; rank 0 asks for all."""

    def __init__(
        self,
        shares: Sequence[SwingShare],
        dist_env: DistEnv,
        warn: Callable[[RunWarning], None],
        clock: Callable[[], float] = time.time,
    ):
        self.are_taken = bool(shares)
        """Whether a site limits the swing; the same on all workers."""
        self._slots = [StallSlots(share, clock) for share in shares]
        self._dist_env, self._warn, self._clock = dist_env, warn, clock
        self._duration_s = FIRST_STALL_S
        self._began_at: float | None = None  # of the stall, on rank 0
        self._first_step: int | None = None  # at which a stall was due
        self._next_step = 0
        self._reported: set[str] = set()

    def may_stall(self, step: int, step_s: float, patience_steps: int, must: bool) -> bool:
        """Return whether to evaluate or save after this step, which takes `step_s` seconds; on all workers the same.
        After `patience_steps` without a slot, and if it `must`, training stalls in any case."""
        self._first_step = step if self._first_step is None else self._first_step
        waited = step - self._first_step
        must = must or waited >= patience_steps
        if step < self._next_step and not must:
            return False
        wait_steps = 0
        if self._dist_env.is_rank_zero and not self._take(step, step_s, must):
            wait_steps = max(1, round(RETRY_INTERVAL_S / step_s)) if step_s > 0 else 1
        (agreed,) = all_reduce_max(self._dist_env, [wait_steps])
        if agreed:
            self._next_step = step + int(agreed)
            return False
        if self._dist_env.is_rank_zero and waited and waited >= patience_steps:
            self._warn_once(f"max_swing left no slot for {waited} steps: evaluating and saving all the same", step)
        self._first_step, self._next_step = None, 0
        return True

    def end_stall(self) -> None:
        """Give the slot back, if there is one. Call it after each step: it waits for no lock of another job."""
        if self._began_at is None:
            return
        try:
            if not all(slots.free() for slots in self._slots):
                return
        except UsageError as error:
            self._give_up(error)
        self._duration_s = MIN_STALL_S + 2 * (self._clock() - self._began_at)
        self._began_at = None

    def _take(self, step: int, step_s: float, must: bool) -> bool:
        """Take a slot of each site, or of none."""
        try:
            for number, slots in enumerate(self._slots):
                if not slots.take(self._duration_s, max(RETRY_INTERVAL_S, step_s), must):
                    for taken in self._slots[:number]:
                        taken.free()
                    self._warn_once(
                        f"evaluations and saves wait for those of other jobs: max_swing of site {slots.share.site}",
                        step,
                    )
                    return False
        except UsageError as error:
            self._give_up(error)
            return True
        self._began_at = self._clock()
        return True

    def _give_up(self, error: UsageError) -> None:
        """Take turns no more, because the file cannot be written."""
        self._slots, self._began_at = [], None
        self._warn(RunWarning(text=f"{error}; evaluating and saving without regard to max_swing"))

    def _warn_once(self, text: str, step: int) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._warn(RunWarning(text=f"step {step}: {text}"))
