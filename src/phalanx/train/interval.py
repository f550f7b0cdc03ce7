"""How often to save, decided while training from what saving costs it.

Two costs are known at once: how long training stood still, and on a CPU the core's time of the thread that copied. What
else it costs (memory, disk and network that it takes from the steps) shows in how much longer than usual the steps were
meanwhile. Workers measure for themselves and decide on the largest of their numbers, so they decide alike.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from phalanx.cluster.failures import USUAL_RATE, daly_interval, seen_between_failures
from phalanx.run import Event, Run, read_events
from phalanx.run.event_types import AttemptStarted, CheckpointIntervalChosen, StepDone, WorkerFailure
from phalanx.train.nodes import said_by_leader
from phalanx.train.place import Place

UNUSUAL = 2
"""First steps of an attempt, which take longer."""
REMEMBERED = 32
"""Steps without a save from which the usual time follows."""
ENOUGH = 4
"""Times that something must have been done before the steps meanwhile are believed."""
FIRST = 50
"""Steps until the first save, whose cost nobody knows yet."""
BUSY = 2.0
"""The interval is at least so many times what a save takes to be written."""
CHANGED = 1.2
"""By how much an interval must differ to be taken."""


def largest(place: Place, values: Sequence[float]) -> list[float]:
    """The largest that any worker has of each number; every worker calls it."""
    if place.world == 1:
        return list(values)
    found = torch.tensor(list(values), dtype=torch.float64, device=place.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(value) for value in found.tolist()]


class Burden:
    """What one kind of work in the background adds to the steps meanwhile."""

    def __init__(self) -> None:
        self.forget()
        self.running = self._ending = False

    def begins(self) -> None:
        """It begins between two steps."""
        self.running, self._ending = True, False

    def done(self, known: float) -> None:
        """It was done once more, within a step; so many seconds are certain."""
        self.count += 1
        self._known += known
        self._ending = True

    def failed(self) -> None:
        """It was given up within a step."""
        self._ending = True

    def forget(self) -> None:
        """Begin anew: the first time takes memory that later ones find."""
        self.count, self._known, self._seconds, self._steps = 0, 0.0, 0.0, 0

    def meanwhile(self, seconds: float) -> None:
        """A step took so long while it was done."""
        self._seconds += seconds
        self._steps += 1

    def step_ends(self) -> None:
        """The step in which it ended, if it did, is over."""
        self.running = self.running and not self._ending

    def cost(self, usual: float) -> float:
        """Seconds that it costs each time, when a step usually takes so many. How long a few steps took says little."""
        if not self.count:
            return 0.0
        longer = self._seconds - self._steps * usual if self.count >= ENOUGH else 0.0
        return max(self._known, longer) / self.count


class Times:
    """How long steps take, usually and while something is saved or copied."""

    def __init__(self) -> None:
        self.saving, self.copying = Burden(), Burden()
        self.steps = 0
        self._usual: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def usual(self) -> float:
        """Median seconds of the last steps during which nothing was saved; 0 before there was one."""
        return statistics.median(self._usual) if self._usual else 0.0

    def note(self, seconds: float) -> None:
        """A step was done."""
        self.steps += 1
        both = (self.saving, self.copying)
        running = [burden for burden in both if burden.running]
        if self.steps > UNUSUAL and not running:
            self._usual.append(seconds)
        elif self.steps > UNUSUAL and len(running) == 1:  # of both at once nobody knows which it was
            running[0].meanwhile(seconds)
        for burden in both:
            burden.step_ends()


Tell = Callable[[Event], None]


class DurableInterval:
    """When a durable checkpoint is due: every so many steps, or for `auto` by Young and Daly. Then every worker makes
    and asks it at the same steps."""

    def __init__(
        self,
        every: int | Literal["auto"] | None,
        run: Run,
        place: Place,
        begun: int,
        times: Times,
        tell: Tell,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.every: int | None = FIRST if every == "auto" else every
        """Steps between two checkpoints as things stand; None for none."""
        self._auto, self._place, self._times, self._clock = every == "auto", place, times, clock
        self._tell = tell
        self._last = begun
        self._begun = clock()
        self._usual_failures, self._failures, self._seconds = math.inf, 0, 0.0
        if self._auto:
            told = said_by_leader(place, history(run, place.world) if place.leads else None)
            self._usual_failures, self._failures, self._seconds, before = told
            self.every = before or FIRST

    def now(self) -> int | None:
        """`every`."""
        return self.every

    def due(self, step: int) -> bool:
        """Whether it is time to save after this step."""
        if self.every is None:
            return False
        return step - self._last >= self.every if self._auto else step % self.every == 0

    def begins(self, step: int) -> None:
        """A checkpoint of this step is begun."""
        self._last = step
        self._times.saving.begins()

    def failed(self) -> None:
        """The checkpoint was given up."""
        self._times.saving.failed()

    def saved(self, step: int, stall: float, seconds: float) -> None:
        """A checkpoint took training so many seconds of standing still, and so many until it was written."""
        self._times.saving.done(stall)
        if not self._auto:
            return
        usual, lived = self._times.usual, self._seconds + self._clock() - self._begun
        found = largest(self._place, [self._times.saving.cost(usual), seconds, usual, lived])
        cost, seconds, usual, lived = found
        if usual <= 0 or cost <= 0:
            return
        between = seen_between_failures(self._usual_failures, self._failures, lived)
        wanted = max(daly_interval(cost, between), BUSY * seconds)
        every = max(1, round(wanted / usual))
        assert self.every is not None
        if max(every / self.every, self.every / every) < CHANGED:
            return
        self.every = every
        self._tell(
            CheckpointIntervalChosen(
                step=step,
                interval_steps=every,
                interval_s=every * usual,
                cost_s=cost,
                save_s=seconds,
                mean_time_between_failures_s=between,
                num_failures=self._failures,
            )
        )


def history(run: Run, devices: int) -> tuple[float, int, float, int | None]:
    """Seconds between failures that so many devices usually see, failures and seconds of this run so far, and the
    interval that it had last."""
    failures, seconds, every = 0, 0.0, None
    last: float | None = None
    for event in read_events(run.events):
        if isinstance(event, WorkerFailure):
            failures += 1
        elif isinstance(event, CheckpointIntervalChosen):
            every = event.interval_steps
        elif isinstance(event, AttemptStarted):
            last = event.time
        elif isinstance(event, StepDone) and last is not None:
            seconds, last = seconds + max(0.0, event.time - last), event.time
    told = run.read_lossy(run.cluster).get("failures_per_device_s")
    rate = float(told) if isinstance(told, int | float) and told > 0 else USUAL_RATE
    return 1.0 / (rate * devices), failures, seconds, every
