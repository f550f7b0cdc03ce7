"""Run the chosen checks on this machine, each with its timeout. Benchmarks run in a separate process each, the other
checks share one. A check that hangs, dies or raises yields a finding with the verdict ERROR.
"""

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.cluster.health.check_process import CheckAborted, CheckProcess
from phalanx.cluster.health.context import CheckContext
from phalanx.cluster.health.finding import HealthFinding, HealthVerdict, parse_finding, worst_verdict
from phalanx.cluster.health.registry import HealthCheck

REPORT_FORMAT = 1
HEALTH_PACKAGE = "phalanx.cluster.health"
CLEANUP_TIMEOUT_S = 5.0


class CheckRunner(Protocol):
    """Runs `module:function(payload)` within `timeout_s` seconds, or raises CheckAborted."""

    def call(self, function: str, payload: Any, timeout_s: float) -> Any: ...


@dataclass(frozen=True)
class NodeHealthReport:
    """Findings of one node. `written_at`: Unix seconds by the node's own clock."""

    node: str
    written_at: float
    duration_s: float
    findings: tuple[HealthFinding, ...]

    @property
    def verdict(self) -> HealthVerdict:
        """The worst verdict of all findings."""
        return worst_verdict(each.verdict for each in self.findings)

    @property
    def is_fit(self) -> bool:
        """Whether this node may train."""
        return not any(each.verdict.is_unfit for each in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "format": REPORT_FORMAT,
            "node": self.node,
            "written_at": self.written_at,
            "duration_s": round(self.duration_s, 3),
            "verdict": str(self.verdict),
            "fit": self.is_fit,
            "findings": [each.as_json() for each in self.findings],
        }


def parse_report(value: Mapping[str, Any]) -> NodeHealthReport:
    """Parse a report from plain values. Raises KeyError, TypeError or ValueError for invalid ones."""
    if value["format"] != REPORT_FORMAT:
        raise ValueError(f"format {value['format']}: expected {REPORT_FORMAT}")
    findings = tuple(parse_finding(each) for each in value["findings"])
    return NodeHealthReport(str(value["node"]), float(value["written_at"]), float(value["duration_s"]), findings)


def run_checks(
    context: CheckContext,
    checks: Sequence[HealthCheck],
    progress: Callable[[str], None] = lambda name: None,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], float] = time.time,
) -> NodeHealthReport:
    """Run the checks. Ctrl-C leaves no process behind."""
    started, found = clock(), list[HealthFinding]()
    with CheckProcess() as shared_process:
        for check in checks:
            progress(check.name)
            if check.is_benchmark:
                with CheckProcess() as own_process:
                    found += run_check(check, context, own_process)
            else:
                found += run_check(check, context, shared_process)
    return NodeHealthReport(platform.node(), now(), clock() - started, tuple(found))


def run_check(check: HealthCheck, context: CheckContext, runner: CheckRunner) -> list[HealthFinding]:
    """Return the findings of one check, or one that says why it did not finish."""
    payload = {"check": check.name, "site": context.as_json()}
    try:
        return [
            parse_finding(each)
            for each in runner.call(f"{HEALTH_PACKAGE}.registry:run_check_in_process", payload, check.timeout_s)
        ]
    except CheckAborted as error:
        cleanup_note = _clean_up(context, runner) if check.name == "disk-throughput" else ""
        return [HealthFinding(check.name, HealthVerdict.ERROR, f"{error}{cleanup_note}", {"limit": check.timeout_s})]
    except KeyboardInterrupt:
        if check.name == "disk-throughput":
            _clean_up(context, runner)
        raise


def _clean_up(context: CheckContext, runner: CheckRunner) -> str:
    """Remove the file of a killed measurement. Returns a note if that fails, else an empty text."""
    try:
        runner.call(f"{HEALTH_PACKAGE}.checks.disk_throughput:remove_scratch", context.as_json(), CLEANUP_TIMEOUT_S)
    except CheckAborted:
        return f"; its file may be left in {context.run_dir}"
    return ""
