"""How often the state is copied to memory, from the measured cost of copies.

Two parts of the cost are measured directly: the stall of training and, on a CPU, the core time of the thread that
copies. The rest (memory, disk and network bandwidth that the save takes from training) is measured as how much longer
than usual steps take while a save is in flight. Each worker measures for itself. Nothing here communicates: `choose`
takes the maximum over all workers of what they measured, so that all choose the same.
"""

import math
import statistics
from collections import deque

from phalanx.run.event_types import InMemoryIntervalChosen

WARMUP_STEPS = 2
"""First steps of an attempt, which are slower than usual and not measured."""
NUM_STEPS_REMEMBERED = 32
"""Number of last steps without a save, the median of which is the usual step time."""
MIN_COPIES_TO_MEASURE = 4
"""Number of copies after which the duration of concurrent steps is used."""
MIN_COPY_INTERVAL_S = 1.0
"""Minimum seconds between copies: a restart takes about as long, so more frequent copies save nothing."""
MIN_STEPS_TO_CHOOSE = 4
"""Steps of an attempt before the interval of copies is chosen."""
MIN_RETRY_STEPS = 500
"""Minimum steps before copies that were too expensive are tried again: the trial must stay within the time budget."""
TRIAL_COPIES = 3
"""Copies during a trial, plus one as a margin."""


class StepTimes:
    """Step times: the usual ones, and those during a copy. A save to disk or a copy is in progress from `begin` to the
    step in which it `end`s."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._usual_s: deque[float] = deque(maxlen=NUM_STEPS_REMEMBERED)
        self._running = self._ended = frozenset[str]()
        self.reset_copies()

    def reset_copies(self) -> None:
        """Forget the steps during copies."""
        self._copy_steps_s = 0.0
        self._num_copy_steps = 0

    def begin(self, kind: str) -> None:
        """Record that a save (`disk`) or a copy (`memory`) starts, between two steps."""
        self._running |= {kind}
        self._ended -= {kind}

    def end(self, kind: str) -> None:
        """Record that it finished, or was given up, in the current step."""
        self._ended |= {kind}

    def record_step(self, step_s: float) -> None:
        """Record the duration of a step."""
        self.num_steps += 1
        if self.num_steps > WARMUP_STEPS and not self._running:
            self._usual_s.append(step_s)
        elif self.num_steps > WARMUP_STEPS and self._running == {"memory"}:  # with both, the cost has two causes
            self._copy_steps_s += step_s
            self._num_copy_steps += 1
        self._running, self._ended = self._running - self._ended, frozenset()

    @property
    def usual_step_s(self) -> float:
        """Median seconds of the last steps without a save; 0 before the first."""
        return statistics.median(self._usual_s) if self._usual_s else 0.0

    @property
    def extra_copy_s(self) -> float:
        """Seconds that steps during copies took longer than usual."""
        return self._copy_steps_s - self._num_copy_steps * self.usual_step_s


class InMemoryInterval:
    """How often the state is copied to memory: every `every` steps, or as often as takes this part of the training time
    ("1%"); None for never. If the number of steps is chosen (`is_auto`), it counts from the last copy."""

    def __init__(self, every: int | str | None, start_step: int, step_times: StepTimes):
        self.steps, self.is_auto = every if isinstance(every, int) else None, isinstance(every, str)
        self._last_step = start_step
        self._overhead_fraction = parse_percent(every) if isinstance(every, str) else 0.0
        self._step_times = step_times
        self._must_choose, self._last_choice_step = self.is_auto, start_step
        self._retry_steps, self._usual_step_s = MIN_RETRY_STEPS, 1.0
        self._first_copy_done = False
        self._reset()

    def _reset(self) -> None:
        self._num_copies = 0
        self._known_s = 0.0
        self._step_times.reset_copies()

    def is_due(self, step: int) -> bool:
        """Return whether to copy after this step."""
        if self.steps is None:
            return False
        return step - self._last_step >= self.steps if self.is_auto else step % self.steps == 0

    def begin(self, step: int) -> None:
        """Record that the copy of this step starts."""
        self._last_step = step
        self._step_times.begin("memory")

    @property
    def cost_s(self) -> float:
        """Cost of one copy in seconds. A few steps are too noisy to be used."""
        extra_s = self._step_times.extra_copy_s if self._num_copies >= MIN_COPIES_TO_MEASURE else 0.0
        return max(self._known_s, extra_s) / self._num_copies if self._num_copies else 0.0

    def restart(self, step: int) -> None:
        """Count from this step, which training went back to."""
        self._last_step = step

    def delay_first(self, step: int, seconds: float) -> None:
        """Let the first copy be due an interval after this step, or after `seconds` if that is later."""
        assert self.steps is not None
        self._last_step = max(step, step - self.steps + math.ceil(seconds / self._usual_step_s))

    def record_copied(self, known_s: float) -> None:
        """Record a copy that cost training at least `known_s`."""
        self._step_times.end("memory")
        self._num_copies += 1
        self._known_s += known_s
        if not self._first_copy_done:  # it allocates memory that later copies reuse
            self._first_copy_done = True
            self._reset()
        self._must_choose = self.is_auto and self._num_copies.bit_count() == 1

    def must_choose(self, step: int) -> bool:
        """Return whether `choose` is due after this step."""
        if self.is_auto and self.steps is None and step - self._last_choice_step >= self._retry_steps:
            # The copies may have been measured at a bad moment: try again.
            self._reset()
            self._must_choose = True
        return self._must_choose and self._step_times.num_steps >= MIN_STEPS_TO_CHOOSE

    def choose(
        self, step: int, last_step: int, durable_steps: int | None, copy_cost_s: float, usual_step_s: float
    ) -> InMemoryIntervalChosen | None:
        """Choose the interval after `step` of a run that ends with `last_step` and saves to disk every `durable_steps`.
        Return the change, None if there is none."""
        self._must_choose, self._last_choice_step = False, step
        before = self.steps
        if usual_step_s <= 0:
            return None
        self._usual_step_s = usual_step_s
        affordable_steps = copy_cost_s / (self._overhead_fraction * usual_step_s)
        self.steps = math.ceil(max(affordable_steps, MIN_COPY_INTERVAL_S / usual_step_s, 1.0))
        self._retry_steps = max(MIN_RETRY_STEPS, TRIAL_COPIES * math.ceil(affordable_steps))
        # A copy is useful only if it is well before the next durable checkpoint and before the end of the run.
        if (durable_steps is not None and 2 * self.steps > durable_steps) or step + self.steps >= last_step:
            self.steps = None
        if self.steps == before:
            return None
        return InMemoryIntervalChosen(step=step, interval_steps=self.steps, cost_s=copy_cost_s)


def parse_percent(text: str) -> float:
    """Parse a percentage: "1%" is 0.01."""
    return float(text.strip().removesuffix("%")) / 100.0
