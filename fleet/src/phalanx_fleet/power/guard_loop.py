"""Hold the budgets of a fleet, answer load targets, and pause jobs for them by handles such as local:7."""

import contextlib
import sqlite3
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import PAUSED_PREFIX, Backend, open_backend
from phalanx.jobs.spec import JobState
from phalanx.run.boot_clock import seconds_since_boot, unix_now
from phalanx_fleet.power.control import AuditLog, PowerFleet, open_guard, power_state_dir, read_nodes, run_guard
from phalanx_fleet.power.guard import GuardStatus, PowerGuard
from phalanx_fleet.power.job_shedder import JobShedder, PausableState, ShedInput
from phalanx_fleet.power.links import NodeLinks
from phalanx_fleet.power.load_targets import LoadTarget, find_active_budgets, find_active_targets
from phalanx_fleet.telemetry.polling import PollingThread

SHED_INTERVAL_S = 0.5
"""Seconds between two looks at which jobs a load target leaves power for."""


@dataclass
class _Shedding:
    """Pauses jobs in a thread of its own, by the newest step: a backend that hangs must not stop the guard."""

    shedder: JobShedder
    newest: ShedInput | None = None

    def update(self) -> None:
        if self.newest is not None:
            self.shedder.update(self.newest)


def open_shedder(fleet: PowerFleet, notices: deque[str]) -> JobShedder:
    """Return what pauses the jobs that have a handle in the jobs file, and adds notices of the next step. Raises
    UsageError for a handle of no job."""
    control = BackendJobControl(f"for power, by the guard of {fleet.file.name}")
    handles = {job.name: job.handle for job in fleet.jobs if job.handle is not None}
    for handle in handles.values():
        control.check_handle(handle)
    return JobShedder(fleet.tree, fleet.settings, fleet.jobs, handles, control, notices.append)


def hold_budgets(
    fleet: PowerFleet, links: NodeLinks, takes_over: bool, duration_s: float | None = None
) -> Iterator[GuardStatus]:
    """Hold the budgets until `duration_s` is over; yield each step with all notices. Jobs that are paused at the end
    stay paused: the fallback of nodes fits the fleet file, not a load target. Errors as of `open_guard`,
    `open_shedder` and `PowerGuard.step`."""
    notices: deque[str] = deque()
    shedder = open_shedder(fleet, notices)
    shedding = _Shedding(shedder)
    polling: PollingThread | None = None
    try:
        audit = AuditLog(power_state_dir(fleet) / "audit.jsonl")
        guard = open_guard(fleet, links, read_nodes(fleet, links), takes_over, shedder.list_running)
        shedder.adopt_paused_jobs()
        if shedder.handles:
            polling = PollingThread(shedding.update, SHED_INTERVAL_S)
        for status in run_guard(fleet, guard, audit, duration_s):
            shedding.newest = _describe_step(fleet, guard, list(fleet.targets), unix_now())
            notices.extend(fleet.targets.list_problems())
            if texts := [notices.popleft() for _ in range(len(notices))]:
                texts = audit.write(fleet.tree, replace(status, writes=[], unsafe=[], notices=texts)).notices
            yield replace(status, notices=[*status.notices, *texts])
    finally:
        if polling is not None:
            polling.stop()


def _describe_step(
    fleet: PowerFleet, guard: PowerGuard, targets: Sequence[LoadTarget], unix_time_s: float
) -> ShedInput:
    now = seconds_since_boot()
    return ShedInput(
        guard.find_limits(now),
        find_active_budgets(fleet.tree, targets, unix_time_s),
        find_active_targets(targets, unix_time_s),
        now,
    )


class BackendJobControl:
    """A `JobControl` of all backends. `reason`: why, as `phalanx jobs status` shows it; jobs that are
    paused for another reason stay paused."""

    def __init__(self, reason: str):
        self._reason = reason
        self._open = cache(lambda name, thread: open_backend(name))
        """A database of a queue belongs to the thread that opened it."""

    def check_handle(self, handle: str) -> None:
        """Raise UsageError for a handle of no backend or no job."""
        backend, job_id = self._find(handle)
        backend.poll(job_id)

    def read_state(self, handle: str) -> PausableState:
        """Return the state of a job."""
        backend, job_id = self._find(handle)
        with _translate_storage_errors(handle):
            backend.restart_dead_daemon()
            status = backend.poll(job_id)
        if status.state.is_final:
            return PausableState.ENDED
        if status.state is JobState.RUNNING:
            return PausableState.RUNNING
        if status.reason == f"{PAUSED_PREFIX}{self._reason}":
            return PausableState.PAUSED
        return PausableState.HELD if (status.reason or "").startswith(PAUSED_PREFIX) else PausableState.WAITING

    def pause(self, handle: str) -> None:
        """Ask a job to save and stop; one that is paused already keeps its reason."""
        backend, job_id = self._find(handle)
        if self.read_state(handle) is PausableState.HELD:
            return
        with _translate_storage_errors(handle):
            backend.pause(job_id, self._reason)

    def resume(self, handle: str) -> None:
        """Let a job start that was paused for this reason."""
        backend, job_id = self._find(handle)
        if self.read_state(handle) is not PausableState.PAUSED:
            return
        with _translate_storage_errors(handle):
            backend.resume(job_id)

    def _find(self, handle: str) -> tuple[Backend, str]:
        name, _, job_id = handle.partition(":")
        return self._open(name, threading.get_ident()), job_id


@contextlib.contextmanager
def _translate_storage_errors(handle: str) -> Iterator[None]:
    """Raise UsageError for a full disk and the like: a guard that ends by it holds no budget."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise UsageError(f"{handle}: {error}") from None
