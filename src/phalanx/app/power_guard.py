"""Hold the budgets of a fleet, answer load targets, and pause jobs for them."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from phalanx.app.power import AuditLog, PowerFleet, open_guard, power_state_dir, read_nodes, run_guard
from phalanx.fleet.power.guard import GuardStatus, PowerGuard
from phalanx.fleet.power.job_control import BackendJobControl
from phalanx.fleet.power.job_shedder import JobShedder, ShedInput
from phalanx.fleet.power.links import NodeLinks
from phalanx.fleet.power.load_targets import LoadTarget, find_active_budgets, find_active_targets
from phalanx.fleet.telemetry.polling import PollingThread
from phalanx.run.boot_clock import seconds_since_boot, unix_now

SHED_INTERVAL_S = 0.5
"""Seconds between two looks at which jobs a load target leaves power for."""


class _Notices:
    """What is to be said about the next step."""

    def __init__(self) -> None:
        self._texts: deque[str] = deque()

    def add(self, text: str) -> None:
        self._texts.append(text)

    def take(self) -> list[str]:
        return [self._texts.popleft() for _ in range(len(self._texts))]


@dataclass
class _Shedding:
    """Pauses jobs in a thread of its own, by the newest step: a backend that hangs must not stop the guard."""

    shedder: JobShedder
    newest: ShedInput | None = None

    def update(self) -> None:
        if self.newest is not None:
            self.shedder.update(self.newest)


def open_shedder(fleet: PowerFleet, notices: _Notices) -> JobShedder:
    """Return what pauses the jobs that have a handle in the jobs file. Raises UsageError for a handle of no job."""
    control = BackendJobControl(f"for power, by the guard of {fleet.file.name}")
    handles = {job.name: job.handle for job in fleet.jobs if job.handle is not None}
    for handle in handles.values():
        control.check_handle(handle)
    return JobShedder(fleet.tree, fleet.settings, fleet.jobs, handles, control, notices.add)


def hold_budgets(
    fleet: PowerFleet, links: NodeLinks, takes_over: bool, duration_s: float | None = None
) -> Iterator[GuardStatus]:
    """Hold the budgets until `duration_s` is over; yield each step with all notices. Jobs that are paused at the end
    stay paused: the fallback of nodes fits the fleet file, not a load target. Errors as of `open_guard`,
    `open_shedder` and `PowerGuard.step`."""
    notices = _Notices()
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
            for problem in fleet.targets.list_problems():
                notices.add(problem)
            if texts := notices.take():
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
