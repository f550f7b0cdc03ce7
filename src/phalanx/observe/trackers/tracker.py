"""The interface of a tracker, and what it gets."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from phalanx.errors import DataError


@dataclass(frozen=True)
class MetricRow:
    """Metrics of one step. `time`: unix seconds at which the step was done."""

    step: int
    time: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """What identifies a run to trackers. `id` is chosen once for its life, `remote_id` is what the tracker calls it;
    `config` is the resolved recipe, `sent_step` the newest step that was sent as far as is known."""

    id: str
    name: str
    project: str
    config: Mapping[str, Any]
    path: Path
    remote_id: str = ""
    sent_step: int = -1


class Tracker(ABC):
    """One run in one tracker. Any method may raise whatever the tracker's library raises: the caller tries again."""

    supersedes: ClassVar[bool]
    """Whether steps that were sent can be taken back. Else only final steps are sent, in ascending order."""

    remote_id: str = ""
    """What the tracker calls the run, if that is another id; set by `open`."""

    @abstractmethod
    def open(self, tracked_run: TrackedRun) -> int:
        """Create the run, or open it again. Returns the newest step that the tracker has, -1 for none; a tracker that
        supersedes may return -1 always."""

    @abstractmethod
    def log_rows(self, rows: Sequence[MetricRow]) -> None:
        """Send rows, each of a step above those before it."""

    def drop_steps_from(self, step: int) -> None:
        """Take back everything of `step` and later steps."""
        raise NotImplementedError(f"{type(self).__name__} cannot take steps back")

    @abstractmethod
    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set what holds for the whole run, such as its status and number of restarts; replaces earlier values."""

    @abstractmethod
    def close(self, status: str | None) -> None:
        """End sending. `status`: how the run ended; None if it did not."""

    @abstractmethod
    def describe_location(self) -> str:
        """Where people find the run."""


def make_own_folder(path: Path) -> Path:
    """Make a folder in a run directory. DataError for a link, as a run directory may come from a stranger: nothing
    outside it is written because of it."""
    path.mkdir(exist_ok=True)
    if path.is_symlink():
        raise DataError(f"{path}: expected a folder, found a link")
    return path


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping with keys such as `optimizer.lr`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten_config(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat
