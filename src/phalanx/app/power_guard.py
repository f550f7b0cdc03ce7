"""Hold the budgets of a fleet, answer load targets from all sources, and report what was done."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.app.power import AuditLog, PowerFleet, open_guard, power_state_dir, read_nodes, run_guard
from phalanx.fleet.power.flex_reports import FeedReport, FlexReporter
from phalanx.fleet.power.flex_source import FlexSource, open_flex_source
from phalanx.fleet.power.guard import GuardStatus
from phalanx.fleet.power.links import NodeLinks
from phalanx.fleet.power.load_targets import LiveTargets, TargetSource
from phalanx.fleet.power.openadr_source import open_openadr_source


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
        found.append(open_openadr_source(settings.openadr, fleet.tree, folder / "openadr-targets.json", environment))
    if settings.flex is not None:
        source: FlexSource = open_flex_source(settings.flex, fleet.tree, folder / "flex-targets.json", environment)
        reporter = FlexReporter(settings.flex.agent, fleet.tree, source.publish, settings.margin)
        found.append(source)
    return TargetSources(found, reporter)


def hold_budgets(
    fleet: PowerFleet, links: NodeLinks, takes_over: bool, duration_s: float | None = None
) -> Iterator[GuardStatus]:
    """Hold the budgets until `duration_s` is over; yield each step with all notices. Errors as of `open_guard`,
    `open_target_sources` and `PowerGuard.step`."""
    sources = open_target_sources(fleet)
    try:
        live = replace(fleet, targets=LiveTargets(fleet.targets, sources.sources))
        guard = open_guard(live, links, read_nodes(live, links), takes_over)
        audit = AuditLog(power_state_dir(fleet) / "audit.jsonl")
        for status in run_guard(live, guard, audit, duration_s):
            notices = [problem for source in sources.sources for problem in source.list_problems()]
            if sources.reporter is not None:
                found = _summarize_feeds(fleet, status)
                notices += map(str, sources.reporter.report(list(live.targets), found, time.time()))
            if notices:
                audit.write(fleet.tree, replace(status, writes=[], unsafe=[], notices=notices))
            yield replace(status, notices=[*status.notices, *notices])
    finally:
        sources.close()


def _summarize_feeds(fleet: PowerFleet, status: GuardStatus) -> FeedReport:
    return FeedReport(
        {each.label: each.watts for each in status.claims},
        {each.label: each.watts for each in status.measured},
        is_changing=bool(status.writes),
    )
