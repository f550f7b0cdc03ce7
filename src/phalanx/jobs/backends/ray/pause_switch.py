"""Whether a job on Ray is paused: an actor next to the job's driver, which others reach by the job's id. Does not
import Ray; the driver turns the class into an actor."""

import time
from collections.abc import Callable
from typing import Any

from phalanx.jobs.backends.ray.driver_spec import NO_NODE, NOT_PAUSED

RAY_NAMESPACE = "phalanx"
PAUSE_POLL_INTERVAL_S = 1.0
"""Seconds between two questions of a driver."""


class PauseSwitch:
    """The actor."""

    def __init__(self) -> None:
        self._reason: str | None = None

    def get_reason(self) -> str | None:
        """Return why the job is paused; None if it is not."""
        return self._reason

    def set_reason(self, reason: str | None) -> str | None:
        """Pause the job, or with None resume it. Returns the reason of before."""
        before, self._reason = self._reason, reason
        return before


class PauseReader:
    """Reads the switch of a job, at most once a second. An actor that is restarted has forgotten the reason: the job
    resumes."""

    def __init__(self, ray: Any, switch: Any, clock: Callable[[], float] = time.monotonic):
        self._ray, self._switch, self._clock = ray, switch, clock
        self._reason: str | None = None
        self._next_poll = clock()

    def __call__(self) -> str | None:
        """Return why the job is paused; None if it is not."""
        if self._clock() >= self._next_poll:
            self._next_poll = self._clock() + PAUSE_POLL_INTERVAL_S
            try:
                self._reason = self._ray.get(self._switch.get_reason.remote())
            except self._ray.exceptions.ActorUnavailableError:
                return self._reason  # it is being restarted
        return self._reason


def open_pause_switch(ray: Any, job_id: str) -> PauseReader:
    """Start the switch of a job on the machine of its driver, which it does not outlive."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    options = {"name": _switch_name(job_id), "num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here}
    return PauseReader(ray, ray.remote(PauseSwitch).options(**options).remote())


def set_pause(ray: Any, job_id: str, reason: str | None) -> int:
    """Pause a job, or resume it with None: 0, NO_NODE if it has no driver, NOT_PAUSED if it was not paused."""
    try:
        switch = ray.get_actor(_switch_name(job_id), namespace=RAY_NAMESPACE)
        before = ray.get(switch.set_reason.remote(reason))
    except (ValueError, ray.exceptions.RayActorError):  # there is no such actor, or it has just ended
        return NO_NODE
    return NOT_PAUSED if reason is None and before is None else 0


def _switch_name(job_id: str) -> str:
    return f"{job_id}/pause"
