"""Evaluations and saves of a job take turns with those of other jobs, where their site limits the swing of power."""

import time
from collections.abc import Callable, Sequence
from functools import partial

from phalanx.errors import UsageError
from phalanx.run.event_types import RunWarning
from phalanx.run.stall_slots import MAX_STALL_S, StallSlots, SwingShare
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.object_collectives import all_reduce_max

RETRY_INTERVAL_S = 1.0
FIRST_STALL_S = 600.0
"""For how long the slots of the first evaluation and of the first save are taken; they are given back after it. The
next ones of its kind are twice as long, plus MIN_STALL_S."""
MIN_STALL_S = 10.0
LAST_LOCK_TIMEOUT_S = 2.0
"""Seconds for which a job that ends waits for the lock, to give its slot back."""


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
        self._durations_s = {False: FIRST_STALL_S, True: FIRST_STALL_S}  # of saves, and of evaluations
        self._has_slots = bool(shares) and dist_env.is_rank_zero  # at the start of a job those of when it died
        self._evaluates = False
        self._began_at: float | None = None  # of the stall, on rank 0
        self._asked_at = self._next_step = 0  # when this job asked, and is to ask again
        self._reported: set[str] = set()

    def may_stall(
        self, step: int, waited: int, patience: int, step_s: float, evaluates: bool, must: bool = False
    ) -> bool:
        """Return whether to save, and to evaluate if that is due (`evaluates`), after this step, which takes `step_s`
        seconds; on all workers the same. They were due `waited` steps ago. After `patience` steps without a slot, and
        if it `must`, training stalls in any case."""
        is_late = waited >= patience
        if self._asked_at < step < self._next_step and not (is_late or must):  # it is before that after a rollback
            return False
        wait_steps = 0
        if self._dist_env.is_rank_zero:
            full_site = self._take(max(RETRY_INTERVAL_S, step_s), evaluates, is_late or must)
            if full_site is not None and not must:
                text = f"evaluations and saves wait for those of other jobs: max_swing of site {full_site}"
                if is_late:
                    text = f"evaluating and saving without a slot, as the next is due: max_swing of site {full_site}"
                else:
                    wait_steps = max(1, round(RETRY_INTERVAL_S / step_s)) if step_s > 0 else 1
                self._warn_once(text, f"step {step}: ")
        (agreed,) = all_reduce_max(self._dist_env, [wait_steps])
        self._asked_at, self._next_step = step, step + int(agreed)
        return not agreed

    def end_stall(self, lock_timeout_s: float = 0.0) -> None:
        """Give the slots back, if there are some. Call it after each step: it waits for no lock of another job."""
        if not self._has_slots:
            return
        freed = [self._use(partial(slots.free, lock_timeout_s)) for slots in self._slots]  # each, whatever the others
        if not all(freed):
            return
        if self._began_at is not None:
            stall_s = max(0.0, self._clock() - self._began_at)  # the clock may have been set back
            self._durations_s[self._evaluates] = min(MIN_STALL_S + 2 * stall_s, MAX_STALL_S)
        self._has_slots, self._began_at = False, None

    def _take(self, retry_s: float, evaluates: bool, must: bool) -> str | None:
        """Take slots of all sites or, unless it `must`, of none. Return a site where the stall does not fit,
        None if it does everywhere."""
        duration_s, full_site = self._durations_s[evaluates], None
        for number, slots in enumerate(self._slots):
            if not self._use(partial(slots.take, duration_s, retry_s, must)):
                full_site = slots.share.site
                if not must:
                    for taken in self._slots[:number]:
                        self._use(taken.free)
                    self._has_slots = False
                    return full_site
        self._has_slots, self._evaluates, self._began_at = True, evaluates, self._clock()
        return full_site

    def _use(self, change: Callable[[], bool]) -> bool:
        """Change the slots of a site; a site of which the file cannot be written sets no limit."""
        try:
            return change()
        except UsageError as error:
            self._warn_once(f"{error}; evaluating and saving without regard to max_swing")
            return True

    def _warn_once(self, text: str, where: str = "") -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._warn(RunWarning(text=where + text))
