"""Values of the health checks: their input, which can be sent to other processes; thresholds, of which
docs/reference/health-checks.md has the reasons; and findings with a verdict, a reason, and the figures behind it.
"""

import os
import secrets
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from phalanx.formatting import BYTES_PER_GIB, BYTES_PER_MIB
from phalanx.recipe.locations import StorageLocation
from phalanx.run.cache import cache_root
from phalanx.storage.store import PROBE_PREFIX

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


@dataclass(frozen=True)
class CheckContext:
    """Input of the checks. `root`: the directory that contains /proc and /sys."""

    run_dir: Path
    """The directory that a run writes to; it need not exist yet."""
    cache_dir: Path = field(default_factory=cache_root)
    temp_dir: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    root: Path = Path("/")
    uid: int = field(default_factory=os.getuid)
    expected_devices: int | None = None
    locations: tuple[StorageLocation, ...] = ()
    """What a recipe names."""
    probe_name: str = field(default_factory=lambda: f"{PROBE_PREFIX}{secrets.token_hex(8)}")
    """How the names of files and objects begin that are written there."""

    def as_json(self) -> dict[str, Any]:
        values = {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}
        return {**values, "locations": [asdict(place) for place in self.locations]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        paths = {name: Path(part) for name, part in value.items() if isinstance(part, str) and name != "probe_name"}
        locations = tuple(StorageLocation(**place) for place in value["locations"])
        return cls(**{**value, **paths, "locations": locations})


@dataclass(frozen=True)
class Threshold:
    """Limits `warn` and `fail` in `unit`, None for no such verdict: upper limits if `is_upper`, else lower ones."""

    unit: str
    warn: float | None
    fail: float | None
    is_upper: bool = True


THRESHOLD_BY_NAME = {
    "matmul slowdown": Threshold("share", 0.05, 0.20),
    "busy cores": Threshold("cores", 0.3, None),
    "run disk free": Threshold("bytes", 10 * BYTES_PER_GIB, BYTES_PER_GIB, is_upper=False),
    "cache disk free": Threshold("bytes", BYTES_PER_GIB, 100 * BYTES_PER_MIB, is_upper=False),
    "inodes free": Threshold("files", 10_000, 1_000, is_upper=False),
    "memory free": Threshold("share", 0.25, 0.05, is_upper=False),
    "/dev/shm free": Threshold("bytes", BYTES_PER_GIB, 32 * BYTES_PER_MIB, is_upper=False),
    "GPU memory in use": Threshold("share", 0.05, 0.5),
    "GPU temperature margin": Threshold("degrees below slow-down", 5, 0, is_upper=False),
    "corrected ECC errors": Threshold("errors", None, 20e6),
    "open files": Threshold("files", 1024, 256, is_upper=False),
    "XID age": Threshold("s", None, 3600, is_upper=False),
}


def evaluate_threshold(name: str, value: float) -> HealthVerdict:
    """Return the verdict of the named threshold for a value."""
    threshold = THRESHOLD_BY_NAME[name]
    for verdict, bound in ((HealthVerdict.FAIL, threshold.fail), (HealthVerdict.WARN, threshold.warn)):
        if bound is not None and (value > bound if threshold.is_upper else value < bound):
            return verdict
    return HealthVerdict.PASS
