"""Choose the checkpoint interval during training, from the measured cost of a save.

Two parts of the cost are measured directly: the stall of training and, on a CPU, the core time of the thread that
copies. The rest (memory, disk and network bandwidth that the save takes from training) is measured as how much longer
than usual steps take while a save is in flight. Each worker measures for itself; all decide on the maximum over
workers, so they make the same decision.
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
"""First steps of an attempt, which are slower than usual and not measured."""
NUM_STEPS_REMEMBERED = 32
"""Number of last steps without a save, the median of which is the usual step time."""
MIN_RUNS_TO_MEASURE = 4
"""Number of saves (or copies) after which the duration of concurrent steps is used."""
FIRST_INTERVAL_STEPS = 50
"""Steps until the first save, when its cost is not known yet."""
MIN_INTERVAL_PER_WRITE_TIME = 2.0
"""Minimum interval, as a multiple of the time that writing a checkpoint takes."""
MIN_INTERVAL_CHANGE = 1.2
"""Minimum ratio of new to old interval for the new one to be used."""


class Overhead:
    """Time that one kind of background work (saves or in-memory copies) adds to concurrent steps."""

    def __init__(self) -> None:
        self.reset()
        self.is_running = self._ends_this_step = False

    def begin(self) -> None:
        """Record that the work starts, between two steps."""
        self.is_running, self._ends_this_step = True, False

    def record_done(self, known_s: float) -> None:
        """Record that the work finished in the current step. `known_s` is its directly measured cost."""
        self.num_done += 1
        self._known_s += known_s
        self._ends_this_step = True

    def record_failed(self) -> None:
        """Record that the work was given up during the current step."""
        self._ends_this_step = True

    def reset(self) -> None:
        """Forget all measurements: the first run of the work allocates memory that later runs reuse."""
        self.num_done, self._known_s, self._concurrent_s, self._concurrent_steps = 0, 0.0, 0.0, 0

    def record_concurrent_step(self, step_s: float) -> None:
        """Record the duration of a step during which the work was in progress."""
        self._concurrent_s += step_s
        self._concurrent_steps += 1

    def end_step(self) -> None:
        """End a step; if the work finished during it, later steps are not concurrent with it."""
        self.is_running = self.is_running and not self._ends_this_step

    def cost_s(self, usual_step_s: float) -> float:
        """Return the cost of one run in seconds, given the usual step time. A few steps are too noisy to be used."""
        if not self.num_done:
            return 0.0
        extra_s = (
            self._concurrent_s - self._concurrent_steps * usual_step_s if self.num_done >= MIN_RUNS_TO_MEASURE else 0.0
        )
        return max(self._known_s, extra_s) / self.num_done


class StepTimes:
    """Step times, both usual and during a save or an in-memory copy."""

    def __init__(self) -> None:
        self.save_overhead, self.copy_overhead = Overhead(), Overhead()
        self.num_steps = 0
        self._step_times_s: deque[float] = deque(maxlen=NUM_STEPS_REMEMBERED)

    @property
    def usual_step_s(self) -> float:
        """Median seconds of the last steps without a save; 0 before the first."""
        return statistics.median(self._step_times_s) if self._step_times_s else 0.0

    def record_step(self, step_s: float) -> None:
        """Record the duration of a step."""
        self.num_steps += 1
        both = (self.save_overhead, self.copy_overhead)
        running = [overhead for overhead in both if overhead.is_running]
        if self.num_steps > WARMUP_STEPS and not running:
            self._step_times_s.append(step_s)
        elif self.num_steps > WARMUP_STEPS and len(running) == 1:  # with both running, the cost cannot be attributed
            running[0].record_concurrent_step(step_s)
        for overhead in both:
            overhead.end_step()


class CheckpointInterval:
    """Decide when a durable checkpoint is due: every `every` steps, or for `auto` at the interval of Young and Daly.
    With `auto`, every worker must create it and call it at the same steps."""

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
        """Current steps between two checkpoints; None for no checkpoints."""
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
        """Return `interval_steps`."""
        return self.interval_steps

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step."""
        if self.interval_steps is None:
            return False
        return step - self._last_save_step >= self.interval_steps if self._auto else step % self.interval_steps == 0

    def begin_save(self, step: int) -> None:
        """Record that the save of this step starts."""
        self._last_save_step = step
        self._step_times.save_overhead.begin()

    def record_failed(self) -> None:
        """Record that the save failed."""
        self._step_times.save_overhead.record_failed()

    def record_saved(self, step: int, stall_s: float, write_s: float) -> None:
        """Record a checkpoint that stalled training for `stall_s` and took `write_s` to write; adapt the interval."""
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
    """Read a run's failure history.

    Returns the expected seconds between failures on `devices` devices, the failures and seconds of this run so far, and
    the last interval in steps."""
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
