"""What a check says of a machine: a verdict, the reason in words, and the figures behind it. Values only."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Figure = float | int | str | bool | None


class Verdict(StrEnum):
    """How fit a machine is by one check."""

    OK = "PASS"
    UNKNOWN = "UNKNOWN"  # nothing here tells: said, and neither passed nor held against the machine
    WARN = "WARN"
    UNFINISHED = "ERROR"  # the check raised, hung or died: no pass
    BAD = "FAIL"

    @property
    def unfit(self) -> bool:
        """Whether nothing should be trained on a machine of which this is said."""
        return self in (Verdict.UNFINISHED, Verdict.BAD)


@dataclass(frozen=True)
class Finding:
    """One thing that a check says. Its figures are what the reason was made of, in base units, for comparing."""

    check: str
    verdict: Verdict
    reason: str
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        figures = dict(self.figures)
        return {"check": self.check, "verdict": str(self.verdict), "reason": self.reason, "figures": figures}


def finding(value: Mapping[str, Any]) -> Finding:
    """The finding of plain values. KeyError, TypeError or ValueError when they are none."""
    figures: Mapping[str, Figure] = value["figures"]
    return Finding(str(value["check"]), Verdict(value["verdict"]), str(value["reason"]), dict(figures))


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The gravest of them; OK of none."""
    order = list(Verdict)
    return max(verdicts, key=order.index, default=Verdict.OK)
