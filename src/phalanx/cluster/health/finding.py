"""Result of a check: a verdict, a reason, and the figures behind it. Values only."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

FindingValue = float | int | str | bool | None


class HealthVerdict(StrEnum):
    """Verdict of a check on a machine."""

    PASS = "PASS"
    UNKNOWN = "UNKNOWN"  # cannot be determined on this machine: reported, but does not make it unfit
    WARN = "WARN"
    ERROR = "ERROR"  # the check raised, hung or died: makes the machine unfit
    FAIL = "FAIL"

    @property
    def is_unfit(self) -> bool:
        """Whether a machine with this verdict must not train."""
        return self in (HealthVerdict.ERROR, HealthVerdict.FAIL)


@dataclass(frozen=True)
class HealthFinding:
    """One result of a check. `values` holds the figures of the reason in base units, to compare nodes."""

    check: str
    verdict: HealthVerdict
    reason: str
    values: Mapping[str, FindingValue] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        figures = dict(self.values)
        return {"check": self.check, "verdict": str(self.verdict), "reason": self.reason, "figures": figures}


def parse_finding(value: Mapping[str, Any]) -> HealthFinding:
    """Parse a finding from plain values. Raises KeyError, TypeError or ValueError for invalid ones."""
    figures: Mapping[str, FindingValue] = value["figures"]
    return HealthFinding(str(value["check"]), HealthVerdict(value["verdict"]), str(value["reason"]), dict(figures))


def worst_verdict(verdicts: Iterable[HealthVerdict]) -> HealthVerdict:
    """Return the worst verdict; PASS for none."""
    order = list(HealthVerdict)
    return max(verdicts, key=order.index, default=HealthVerdict.PASS)
