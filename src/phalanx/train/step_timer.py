"""Measure the time of a step by phase."""

import functools
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from phalanx.recipe.devices import device_kind_of
from phalanx.run.heartbeat import HeartbeatWriter, NullHeartbeat

STEP_PHASES = ("data_wait", "forward", "backward", "grad_sync", "optimizer", "checkpoint_stall", "other")
OWN_WORK_PHASES = ("data_wait", "forward", "backward", "optimizer")
"""Phases of a worker's own work; in the others it waits for peers, or does work that only one worker does."""


class HostStepTimer:
    """For devices that compute while the host waits. Phases are recorded when they end."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock

    def start(self) -> None:
        """Start a step."""
        self._seconds_by_phase = dict.fromkeys(STEP_PHASES, 0.0)
        self._start_time = self._last_time = self._clock()

    def lap(self, phase: str) -> None:
        """End `phase`."""
        now = self._clock()
        self._seconds_by_phase[phase] += now - self._last_time
        self._last_time = now

    def skip(self) -> None:
        """Exclude the time since the last call from the step (evaluation)."""
        now = self._clock()
        self._start_time += now - self._last_time
        self._last_time = now

    def stop(self) -> tuple[float, dict[str, float]]:
        """Return the seconds of the whole step and of each phase, which sum to the whole."""
        self.lap("other")
        return self._last_time - self._start_time, self._seconds_by_phase


class GpuStepTimer:
    """For GPUs, which run asynchronously to the host: uses events in the stream.

    `stop` does not synchronize, because the GPU would run out of work. It reads the events that the GPU has passed (in
    a training step at least all up to the metrics all-reduce, where host and GPU synchronize); the rest, usually the
    optimizer phase, counts to the next step. So a step lasts from all-reduce to all-reduce, and the sum over steps is
    complete.
    """

    def __init__(self, make_event: Callable[[], Any] | None = None):
        self._make_event = make_event or functools.partial(torch.get_device_module().Event, enable_timing=True)
        self._marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        if not self._marks:
            self.lap("start")

    def lap(self, phase: str) -> None:
        event = self._make_event()
        event.record()
        self._marks.append((phase, event))

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
        seconds_by_phase = dict.fromkeys(STEP_PHASES, 0.0)
        for (_, before), (phase, after) in pairwise(self._marks[:passed]):
            if phase != "skip":
                seconds_by_phase[phase] += before.elapsed_time(after) / 1000
        del self._marks[: passed - 1]
        return sum(seconds_by_phase.values()), seconds_by_phase


class HeartbeatTimer:
    """A timer that also sends a heartbeat at the end of every phase, and sums up the worker's own work."""

    def __init__(self, timer: HostStepTimer | GpuStepTimer, heartbeat: HeartbeatWriter | NullHeartbeat):
        self._timer, self._heartbeat = timer, heartbeat

    def start(self) -> None:
        self._timer.start()

    def lap(self, phase: str) -> None:
        self._timer.lap(phase)
        self._heartbeat.record(phase)

    def skip(self) -> None:
        self._timer.skip()
        self._heartbeat.record("evaluation")

    def stop(self) -> tuple[float, dict[str, float]]:
        step_s, seconds_by_phase = self._timer.stop()
        # Saves, callbacks and events take time on rank 0 only: they would make it look slower than its peers.
        self._heartbeat.busy_s += sum(seconds_by_phase[phase] for phase in OWN_WORK_PHASES)
        return step_s, seconds_by_phase


StepTimer = HostStepTimer | GpuStepTimer | HeartbeatTimer


def make_step_timer(device: torch.device) -> HostStepTimer | GpuStepTimer:
    """Make the timer for a device."""
    return GpuStepTimer() if device_kind_of(device.type).is_gpu else HostStepTimer()
