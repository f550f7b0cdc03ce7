"""Where the time of a step goes: laps of a stopwatch, summed by part."""

import time
from collections.abc import Callable
from typing import Protocol

import torch

PARTS = ("data", "forward", "backward", "exchange", "optimizer", "checkpoint", "other")


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


class CudaStopwatch:
    """For GPUs, which run behind the host: events in the stream, read once the step has ended."""

    def start(self) -> None:
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self.lap("start")

    def lap(self, part: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((part, event))

    def skip(self) -> None:
        self.lap("skip")

    def stop(self) -> tuple[float, dict[str, float]]:
        self.lap("other")
        self._marks[-1][1].synchronize()
        parts = dict.fromkeys(PARTS, 0.0)
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            if part != "skip":
                parts[part] += before.elapsed_time(after) / 1000
        return sum(parts.values()), parts


def stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch for a device."""
    return CudaStopwatch() if device.type == "cuda" else HostStopwatch()
