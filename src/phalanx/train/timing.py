"""Where the time of a step goes: laps of a stopwatch, summed by part."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import torch

from phalanx.recipe.devices import kind_of
from phalanx.run.pulse import Pulse, Silent

PARTS = ("data", "forward", "backward", "exchange", "optimizer", "checkpoint", "other")
BUSY = ("data", "forward", "backward", "optimizer")
"""In which a worker does its own share; in the others it waits for its peers, or does what only one does."""


class Stopwatch(Protocol):
    """Laps belong to the part that has just ended."""

    def start(self) -> None:
        """A step begins."""

    def lap(self, part: str) -> None:
        """`part` ends here."""

    def skip(self) -> None:
        """What has just ended does not belong to any step (evaluation)."""

    def stop(self) -> tuple[float, dict[str, float]]:
        """Seconds of the whole step and of each part; the parts sum to the whole."""


class HostStopwatch:
    """For devices that compute while the host waits."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock

    def start(self) -> None:
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._begin = self._last = self._clock()

    def lap(self, part: str) -> None:
        now = self._clock()
        self._parts[part] += now - self._last
        self._last = now

    def skip(self) -> None:
        now = self._clock()
        self._begin += now - self._last
        self._last = now

    def stop(self) -> tuple[float, dict[str, float]]:
        self.lap("other")
        return self._last - self._begin, self._parts


class Beating:
    """A stopwatch that also gives a sign of life at the end of every part, and tells how long the worker was busy."""

    def __init__(self, watch: Stopwatch, pulse: Pulse | Silent):
        self._watch, self._pulse = watch, pulse

    def start(self) -> None:
        self._watch.start()

    def lap(self, part: str) -> None:
        self._watch.lap(part)
        self._pulse.beat(part)

    def skip(self) -> None:
        self._watch.skip()
        self._pulse.beat("evaluation")

    def stop(self) -> tuple[float, dict[str, float]]:
        seconds, parts = self._watch.stop()
        # saves, callbacks and events are the leading worker's: they would make it look slower than its peers
        self._pulse.busy += sum(parts[part] for part in BUSY)
        return seconds, parts


class Event(Protocol):
    """A mark in a GPU's stream of work, as torch.Event is one."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


def _gpu_event() -> Event:
    event: Event = torch.get_device_module().Event(enable_timing=True)
    return event


class CudaStopwatch:
    """For GPUs, which run behind the host: events in the stream.

    `stop` waits for nothing: it would leave the GPU without work. It reads the laps that the GPU has passed (in a
    training step at least all up to the agreement, where host and GPU meet); the rest, a step's update as a rule, goes
    to the next step. So a step lasts from agreement to agreement, and over many steps nothing is lost.
    """

    def __init__(self, event: Callable[[], Event] = _gpu_event):
        self._event = event
        self._marks: list[tuple[str, Event]] = []

    def start(self) -> None:
        if not self._marks:
            self.lap("start")

    def lap(self, part: str) -> None:
        event = self._event()
        event.record()
        self._marks.append((part, event))

    def skip(self) -> None:
        self.lap("skip")

    def stop(self) -> tuple[float, dict[str, float]]:
        self.lap("other")
        passed = 1
        while passed < len(self._marks) and self._marks[passed][1].query():
            passed += 1
        if passed == 1:
            self._marks[-1][1].synchronize()
            passed = len(self._marks)
        parts = dict.fromkeys(PARTS, 0.0)
        for (_, before), (part, after) in pairwise(self._marks[:passed]):
            if part != "skip":
                parts[part] += before.elapsed_time(after) / 1000
        del self._marks[: passed - 1]
        return sum(parts.values()), parts


def stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch for a device."""
    return CudaStopwatch() if kind_of(device.type).is_gpu else HostStopwatch()
