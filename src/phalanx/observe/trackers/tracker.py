"""The interface of a tracker, and what it gets."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, get_args

from phalanx.errors import DataError, PhalanxError
from phalanx.recipe.schema import TrackerName

TRACKER_NAMES: tuple[str, ...] = get_args(TrackerName)
"""Names as in the recipe. Each is also the name of its package and of the extra that installs it."""

LIBRARY_DEFAULTS = {
    # MLflow would otherwise try 7 times for 2 minutes each
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Environment variables of the trackers' libraries, unless they are set."""
TASK_PREFIX = "tasks/"
"""How the names of metrics of `evaluation.tasks` begin."""


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

    def log_late_rows(self, rows: Sequence[MetricRow]) -> None:
        """Send rows of steps that were sent before, with other metrics."""
        self.log_rows(rows)

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


def describe_problem(name: str) -> str | None:
    """Say what a tracker lacks on this machine, such as its package; None if nothing."""
    if find_spec(name) is None:
        return f"{name} needs the `{name}` package: pip install 'phalanx[{name}]'"
    if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI") and find_spec("sqlalchemy") is None:
        return (
            "mlflow: MLFLOW_TRACKING_URI is not set; set it to the URL of your server, such as http://localhost:5000, "
            "or install `mlflow` for a local store"
        )
    return None


def set_library_defaults() -> None:
    """Set LIBRARY_DEFAULTS in this process."""
    for variable, value in LIBRARY_DEFAULTS.items():
        os.environ.setdefault(variable, value)


def describe_error(error: BaseException) -> str:
    """Describe an error in one line: its kind, and the first line of its message. Our own errors are whole."""
    if isinstance(error, PhalanxError):
        return str(error)
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
