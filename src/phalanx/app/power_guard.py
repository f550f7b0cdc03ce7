"""Hold the budgets of a fleet, answer load targets from all sources, pause jobs for them, and report what was done."""

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.app.power import AuditLog, PowerFleet, open_guard, power_state_dir, read_nodes, run_guard
from phalanx.fleet.power.flex_reports import FeedReport, FlexReporter
from phalanx.fleet.power.flex_source import FlexSource, open_flex_source
from phalanx.fleet.power.guard import GuardStatus, PowerGuard
from phalanx.fleet.power.job_control import BackendJobControl
from phalanx.fleet.power.job_shedder import JobShedder, ShedInput
from phalanx.fleet.power.links import NodeLinks
from phalanx.fleet.power.load_targets import (
    LiveTargets,
    LoadTarget,
    TargetSource,
    find_active_budgets,
    find_active_targets,
)
from phalanx.fleet.power.openadr_source import open_openadr_source
from phalanx.fleet.telemetry.polling import PollingThread
from phalanx.run.boot_clock import seconds_since_boot, unix_now

SHED_INTERVAL_S = 0.5
"""Seconds between two looks at which jobs a load target leaves power for."""


@dataclass(frozen=True)
class TargetSources:
    """Sources of load targets, and the one that takes reports."""

    sources: Sequence[TargetSource] = ()
    reporter: FlexReporter | None = None

    def close(self) -> None:
        """Leave all sources."""
        for source in self.sources:
            source.close()


def open_target_sources(fleet: PowerFleet, environment: Mapping[str, str] = os.environ) -> TargetSources:
    """Open the sources that the fleet file names; they connect in the background. Raises UsageError for settings that
    are wrong."""
    found: list[TargetSource] = []
    settings, folder, reporter = fleet.settings, power_state_dir(fleet), None
    if settings.openadr is not None:
        record = folder / "openadr-targets.json"
        found.append(open_openadr_source(settings.openadr, fleet.tree, record, environment))
    if settings.flex is not None:
        source: FlexSource = open_flex_source(settings.flex, fleet.tree, folder / "flex-targets.json", environment)
        reporter = FlexReporter(settings.flex.agent, fleet.tree, source.queue_message, settings.margin)
        found.append(source)
    return TargetSources(found, reporter)


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
    `open_target_sources`, `open_shedder` and `PowerGuard.step`."""
    notices = _Notices()
    shedder = open_shedder(fleet, notices)
    sources, shedding = open_target_sources(fleet), _Shedding(shedder)
    polling: PollingThread | None = None
    try:
        live = replace(fleet, targets=LiveTargets([*fleet.targets.sources, *sources.sources]))
        audit = AuditLog(power_state_dir(fleet) / "audit.jsonl")
        guard = open_guard(live, links, read_nodes(live, links), takes_over, shedder.list_running)
        shedder.adopt_paused_jobs()
        if shedder.handles:
            polling = PollingThread(shedding.update, SHED_INTERVAL_S)
        for status in run_guard(live, guard, audit, duration_s):
            targets, unix_time_s = list(live.targets), unix_now()
            shedding.newest = _describe_step(live, guard, targets, unix_time_s)
            for problem in live.targets.list_problems():
                notices.add(problem)
            if sources.reporter is not None:
                found = FeedReport(
                    {each.label: each.watts for each in status.claims},
                    {each.label: each.watts for each in status.measured},
                    is_changing=bool(status.writes),
                    paused_nodes=shedder.list_paused_nodes(),
                )
                for breach in sources.reporter.report(targets, found, unix_time_s):
                    notices.add(str(breach))
            if texts := notices.take():
                texts = audit.write(fleet.tree, replace(status, writes=[], unsafe=[], notices=texts)).notices
            yield replace(status, notices=[*status.notices, *texts])
    finally:
        if polling is not None:
            polling.stop()
        sources.close()


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
