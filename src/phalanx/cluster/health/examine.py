"""All chosen checks of this machine, each within its time: those that only look share a process, those that measure
have one each. A check that hangs, dies or raises is a finding, too, and no pass.
"""

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.cluster.health.checks import Check
from phalanx.cluster.health.finding import Finding, Verdict, finding, worst
from phalanx.cluster.health.helper import Helper, Unfinished
from phalanx.cluster.health.site import Site

FORMAT = 1
HERE = "phalanx.cluster.health"
CLEANING = 5.0


class Caller(Protocol):
    """Who runs `module:function(payload)` within so many seconds, or raises Unfinished."""

    def call(self, function: str, payload: Any, seconds: float) -> Any: ...


@dataclass(frozen=True)
class Report:
    """What was found on one node. `time`: Unix seconds, by its own clock, when it was written."""

    node: str
    time: float
    seconds: float
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        """The gravest of all."""
        return worst(each.verdict for each in self.findings)

    @property
    def fit(self) -> bool:
        """Whether this node may train."""
        return not any(each.verdict.unfit for each in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "format": FORMAT,
            "node": self.node,
            "time": self.time,
            "seconds": round(self.seconds, 3),
            "verdict": str(self.verdict),
            "fit": self.fit,
            "findings": [each.as_json() for each in self.findings],
        }


def report(value: Mapping[str, Any]) -> Report:
    """The report of plain values. KeyError, TypeError or ValueError when they are none."""
    if value["format"] != FORMAT:
        raise ValueError(f"format {value['format']}: expected {FORMAT}")
    findings = tuple(finding(each) for each in value["findings"])
    return Report(str(value["node"]), float(value["time"]), float(value["seconds"]), findings)


def examine(
    site: Site,
    checks: Sequence[Check],
    progress: Callable[[str], None] = lambda name: None,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], float] = time.time,
) -> Report:
    """Do the checks; Ctrl-C leaves no process behind."""
    begun, found = clock(), list[Finding]()
    with Helper() as looker:
        for check in checks:
            progress(check.name)
            if check.measures:
                with Helper() as own:
                    found += one(check, site, own)
            else:
                found += one(check, site, looker)
    return Report(platform.node(), now(), clock() - begun, tuple(found))


def one(check: Check, site: Site, caller: Caller) -> list[Finding]:
    """One check's findings, or that it came to no end."""
    payload = {"check": check.name, "site": site.as_json()}
    try:
        return [finding(each) for each in caller.call(f"{HERE}.checks:run", payload, check.seconds)]
    except Unfinished as error:
        left = _cleaned(site, caller) if check.name == "disk-throughput" else ""
        return [Finding(check.name, Verdict.UNFINISHED, f"{error}{left}", {"limit": check.seconds})]
    except KeyboardInterrupt:
        if check.name == "disk-throughput":
            _cleaned(site, caller)
        raise


def _cleaned(site: Site, caller: Caller) -> str:
    """Remove the file of a measurement that was killed; words where that fails, too."""
    try:
        caller.call(f"{HERE}.disk_rate:clean", site.as_json(), CLEANING)
    except Unfinished:
        return f"; its file may be left in {site.run}"
    return ""
