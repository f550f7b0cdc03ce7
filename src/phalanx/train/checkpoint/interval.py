"""How often to save, decided while training from what saving costs it.

Two costs are known at once: how long training stood still, and on a CPU the core's time of the thread that copied. What
else it costs (memory, disk and network that it takes from the steps) shows in how much longer than usual the steps were
meanwhile. Workers measure for themselves and decide on the largest of their numbers, so they decide alike.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from phalanx.cluster.checkpoint_interval import DEFAULT_DEVICE_FAILURES_PER_S, daly_interval, estimate_mtbf
from phalanx.run import Run, read_events
from phalanx.run.event_types import AttemptStarted, CheckpointIntervalChosen, StepDone, WorkerFailure
from phalanx.run.events import ReportEventFn
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.object_collectives import all_reduce_max, broadcast_json_from_rank_zero

WARMUP_STEPS = 2
"""First steps of an attempt, which take longer."""
NUM_STEPS_REMEMBERED = 32
"""Steps without a save from which the usual time follows."""
MIN_RUNS_TO_MEASURE = 4
"""Times that something must have been done before the steps meanwhile are believed."""
FIRST_INTERVAL_STEPS = 50
"""Steps until the first save, whose cost nobody knows yet."""
MIN_INTERVAL_PER_WRITE_TIME = 2.0
"""The interval is at least so many times what a save takes to be written."""
MIN_INTERVAL_CHANGE = 1.2
"""By how much an interval must differ to be taken."""


class Overhead:
    """What one kind of work in the background adds to the steps meanwhile."""

    def __init__(self) -> None:
        self.reset()
        self.is_running = self._ends_this_step = False

    def begin(self) -> None:
        """It begins between two steps."""
        self.is_running, self._ends_this_step = True, False

    def record_done(self, known_s: float) -> None:
        """It was done once more, within a step; so many seconds are certain."""
        self.num_done += 1
        self._known_s += known_s
        self._ends_this_step = True

    def record_failed(self) -> None:
        """It was given up within a step."""
        self._ends_this_step = True

    def reset(self) -> None:
        """Begin anew: the first time takes memory that later ones find."""
        self.num_done, self._known_s, self._concurrent_s, self._concurrent_steps = 0, 0.0, 0.0, 0

    def record_concurrent_step(self, step_s: float) -> None:
        """A step took so long while it was done."""
        self._concurrent_s += step_s
        self._concurrent_steps += 1

    def end_step(self) -> None:
        """The step in which it ended, if it did, is over."""
        self.is_running = self.is_running and not self._ends_this_step

    def cost_s(self, usual_step_s: float) -> float:
        """Seconds that it costs each time, when a step usually takes so many. How long a few steps took says little."""
        if not self.num_done:
            return 0.0
        extra_s = (
            self._concurrent_s - self._concurrent_steps * usual_step_s if self.num_done >= MIN_RUNS_TO_MEASURE else 0.0
        )
        return max(self._known_s, extra_s) / self.num_done


class StepTimes:
    """How long steps take, usually and while something is saved or copied."""

    def __init__(self) -> None:
        self.save_overhead, self.copy_overhead = Overhead(), Overhead()
        self.num_steps = 0
        self._step_times_s: deque[float] = deque(maxlen=NUM_STEPS_REMEMBERED)

    @property
    def usual_step_s(self) -> float:
        """Median seconds of the last steps during which nothing was saved; 0 before there was one."""
        return statistics.median(self._step_times_s) if self._step_times_s else 0.0

    def record_step(self, step_s: float) -> None:
        """A step was done."""
        self.num_steps += 1
        both = (self.save_overhead, self.copy_overhead)
        running = [overhead for overhead in both if overhead.is_running]
        if self.num_steps > WARMUP_STEPS and not running:
            self._step_times_s.append(step_s)
        elif self.num_steps > WARMUP_STEPS and len(running) == 1:  # of both at once nobody knows which it was
            running[0].record_concurrent_step(step_s)
        for overhead in both:
            overhead.end_step()


class CheckpointInterval:
    """When a durable checkpoint is due: every so many steps, or for `auto` by Young and Daly. Then every worker makes
    and asks it at the same steps."""

    def __init__(
        self,
        every: int | Literal["auto"] | None,
        run: Run,
        dist_env: DistEnv,
        start_step: int,
        step_times: StepTimes,
        report_event: ReportEventFn,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.interval_steps: int | None = FIRST_INTERVAL_STEPS if every == "auto" else every
        """Steps between two checkpoints as things stand; None for none."""
        self._auto, self._dist_env, self._step_times, self._clock = every == "auto", dist_env, step_times, clock
        self._report_event = report_event
        self._last_save_step = start_step
        self._start_time = clock()
        self._usual_failure_interval_s, self._failures, self._earlier_run_s = math.inf, 0, 0.0
        if self._auto:
            history_values = broadcast_json_from_rank_zero(
                dist_env, read_failure_history(run, dist_env.world_size) if dist_env.is_rank_zero else None
            )
            self._usual_failure_interval_s, self._failures, self._earlier_run_s, last_interval = history_values
            self.interval_steps = last_interval or FIRST_INTERVAL_STEPS

    def current_interval(self) -> int | None:
        """`interval_steps`."""
        return self.interval_steps

    def is_due(self, step: int) -> bool:
        """Whether it is time to save after this step."""
        if self.interval_steps is None:
            return False
        return step - self._last_save_step >= self.interval_steps if self._auto else step % self.interval_steps == 0

    def begin_save(self, step: int) -> None:
        """A checkpoint of this step is begun."""
        self._last_save_step = step
        self._step_times.save_overhead.begin()

    def record_failed(self) -> None:
        """The checkpoint was given up."""
        self._step_times.save_overhead.record_failed()

    def record_saved(self, step: int, stall_s: float, write_s: float) -> None:
        """A checkpoint took training so many seconds of standing still, and so many until it was written."""
        self._step_times.save_overhead.record_done(stall_s)
        if not self._auto:
            return
        usual_step_s, run_s = self._step_times.usual_step_s, self._earlier_run_s + self._clock() - self._start_time
        found = all_reduce_max(
            self._dist_env, [self._step_times.save_overhead.cost_s(usual_step_s), write_s, usual_step_s, run_s]
        )
        save_cost_s, write_s, usual_step_s, run_s = found
        if usual_step_s <= 0 or save_cost_s <= 0:
            return
        failure_interval_s = estimate_mtbf(self._usual_failure_interval_s, self._failures, run_s)
        target_interval_s = max(daly_interval(save_cost_s, failure_interval_s), MIN_INTERVAL_PER_WRITE_TIME * write_s)
        every = max(1, round(target_interval_s / usual_step_s))
        assert self.interval_steps is not None
        if max(every / self.interval_steps, self.interval_steps / every) < MIN_INTERVAL_CHANGE:
            return
        self.interval_steps = every
        self._report_event(
            CheckpointIntervalChosen(
                step=step,
                interval_steps=every,
                interval_s=every * usual_step_s,
                cost_s=save_cost_s,
                save_s=write_s,
                mean_time_between_failures_s=failure_interval_s,
                num_failures=self._failures,
            )
        )


def read_failure_history(run: Run, devices: int) -> tuple[float, int, float, int | None]:
    """Seconds between failures that so many devices usually see, failures and seconds of this run so far, and the
    interval that it had last."""
    failures, run_s, every = 0, 0.0, None
    last: float | None = None
    for event in read_events(run.events):
        if isinstance(event, WorkerFailure):
            failures += 1
        elif isinstance(event, CheckpointIntervalChosen):
            every = event.interval_steps
        elif isinstance(event, AttemptStarted):
            last = event.time
        elif isinstance(event, StepDone) and last is not None:
            run_s, last = run_s + max(0.0, event.time - last), event.time
    failure_rate = run.read_json_or_empty(run.cluster).get("failures_per_device_s")
    rate = (
        float(failure_rate)
        if isinstance(failure_rate, int | float) and failure_rate > 0
        else DEFAULT_DEVICE_FAILURES_PER_S
    )
    return 1.0 / (rate * devices), failures, run_s, every
