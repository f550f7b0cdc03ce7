"""What a check says of a machine: a verdict, the reason in words, and the figures behind it. Values only."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

FindingValue = float | int | str | bool | None


class HealthVerdict(StrEnum):
    """How fit a machine is by one check."""

    PASS = "PASS"
    UNKNOWN = "UNKNOWN"  # nothing here tells: said, and neither passed nor held against the machine
    WARN = "WARN"
    ERROR = "ERROR"  # the check raised, hung or died: no pass
    FAIL = "FAIL"

    @property
    def is_unfit(self) -> bool:
        """Whether nothing should be trained on a machine of which this is said."""
        return self in (HealthVerdict.ERROR, HealthVerdict.FAIL)


@dataclass(frozen=True)
class HealthFinding:
    """One thing that a check says. Its figures are what the reason was made of, in base units, for comparing."""

    check: str
    verdict: HealthVerdict
    reason: str
    values: Mapping[str, FindingValue] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        figures = dict(self.values)
        return {"check": self.check, "verdict": str(self.verdict), "reason": self.reason, "figures": figures}


def parse_finding(value: Mapping[str, Any]) -> HealthFinding:
    """The finding of plain values. KeyError, TypeError or ValueError when they are none."""
    figures: Mapping[str, FindingValue] = value["figures"]
    return HealthFinding(str(value["check"]), HealthVerdict(value["verdict"]), str(value["reason"]), dict(figures))


def worst_verdict(verdicts: Iterable[HealthVerdict]) -> HealthVerdict:
    """The gravest of them; OK of none."""
    order = list(HealthVerdict)
    return max(verdicts, key=order.index, default=HealthVerdict.PASS)
