"""The interface of a tracker and what it gets; and the trackers, each by its own library, which is imported when a run
is sent to it. A tracker that keeps a second value of a step as a second point gets final steps only.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from phalanx.errors import DataError, PhalanxError, UsageError
from phalanx.observe.run_info import flatten_keys
from phalanx.recipe.schema import TrackerName
from phalanx.run import Run
from phalanx.run.boot_clock import unix_now

if TYPE_CHECKING:
    import wandb
    from mlflow import MlflowClient
    from mlflow.entities import Metric
    from tensorboard.compat.proto.event_pb2 import Event as EventProto
    from tensorboard.summary.writer.record_writer import RecordWriter
    from trackio.run import Run as TrackioRun


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


class TensorBoardTracker(Tracker):
    """Event files in RUN/tensorboard. `tensorboard --logdir RUNS` finds them.

    Each process writes a file of its own, since a killed one may end within a record. A SessionLog START record makes
    readers drop what was logged for its step and later ones before (`purge_step` of SummaryWriter)."""

    supersedes: ClassVar[bool] = True

    def __init__(self) -> None:
        self._folder = Path()
        self._writer: RecordWriter | None = None

    def open(self, tracked_run: TrackedRun) -> int:
        """Begin a new file."""
        from tensorboard.compat.proto.event_pb2 import Event as EventProto
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder = make_own_folder(Run(tracked_run.path).tensorboard)
        # readers take files in the order of their names; the usual ones have the time of a clock that may be set
        number = 1 + len(list(self._folder.glob("events.out.tfevents.*")))
        path = self._folder / f"events.out.tfevents.{number:010d}.phalanx"
        self._writer = RecordWriter(open(path, "xb"))  # noqa: SIM115 - `close` closes it
        self._write(EventProto(wall_time=unix_now(), file_version="brain.Event:2"))
        return -1

    def log_rows(self, rows: Sequence[MetricRow]) -> None:
        """Write a record for each row."""
        from tensorboard.compat.proto.event_pb2 import Event as EventProto
        from tensorboard.compat.proto.summary_pb2 import Summary

        def to_event(row: MetricRow) -> EventProto:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.metrics.items()]
            return EventProto(wall_time=row.time, step=row.step, summary=Summary(value=values))

        self._write(*map(to_event, rows))

    def drop_steps_from(self, step: int) -> None:
        """Write the record that makes readers drop them."""
        from tensorboard.compat.proto.event_pb2 import Event as EventProto
        from tensorboard.compat.proto.event_pb2 import SessionLog

        log = SessionLog(status=SessionLog.START)
        self._write(EventProto(wall_time=unix_now(), step=step, session_log=log))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Do nothing: TensorBoard has no tags of a run."""

    def close(self, status: str | None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def describe_location(self) -> str:
        return str(self._folder)

    def _write(self, *events: "EventProto") -> None:
        assert self._writer is not None
        for event in events:
            self._writer.write(event.SerializeToString())
        self._writer.flush()


TASK_STEP = f"{TASK_PREFIX}step"
"""Metric of W&B over which it shows the scores of tasks."""


class WandbTracker(Tracker):
    """A run of W&B, online, or offline in the run directory, as WANDB_MODE says. A step cannot be replaced."""

    supersedes: ClassVar[bool] = False

    def __init__(self) -> None:
        self._tracked_run: TrackedRun | None = None
        self._run: wandb.Run | None = None
        self._location = ""
        self._sent_step = 0

    def open(self, tracked_run: TrackedRun) -> int:
        """Create or resume the run. The server says how far it is; offline nothing does but the feed's own record."""
        self._tracked_run = tracked_run
        directory = make_own_folder(tracked_run.path / "wandb")
        run = self._session()
        self._location = str(directory) if run.offline else str(run.url)
        self._sent_step = max(0, tracked_run.sent_step)
        return tracked_run.sent_step if run.offline else run.step - 1

    def log_rows(self, rows: Sequence[MetricRow]) -> None:
        """Send rows. Offline, only `finish` waits until they are in a file, so each call ends its session."""
        run = self._session()
        for row in rows:
            values: dict[str, Any] = {**row.metrics, "_timestamp": row.time}
            if any(name.startswith(TASK_PREFIX) for name in row.metrics):
                values[TASK_STEP] = row.step
            run.log(values, step=row.step)
            self._sent_step = row.step
        if run.offline:
            self.close(None)

    def log_late_rows(self, rows: Sequence[MetricRow]) -> None:
        """Send rows with the newest step, since a run's steps only increase; TASK_STEP is theirs."""
        run = self._session()
        for row in rows:
            run.log({**row.metrics, TASK_STEP: row.step}, step=max(run.step, self._sent_step))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set them in the summary."""
        self._session().summary.update(dict(tags))

    def close(self, status: str | None) -> None:
        """Wait until everything is stored."""
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=1 if status == "failed" else 0)

    def describe_location(self) -> str:
        return self._location

    def _session(self) -> "wandb.Run":
        """The open session, or a new one."""
        import wandb

        assert self._tracked_run is not None
        if self._run is None:
            self._run = wandb.init(
                id=self._tracked_run.id,
                resume="allow",
                project=os.environ.get("WANDB_PROJECT") or self._tracked_run.project,
                name=self._tracked_run.name,
                config=dict(self._tracked_run.config),
                dir=str(self._tracked_run.path),
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    x_disable_stats=True,
                    x_disable_meta=True,
                    disable_git=True,
                    disable_code=True,
                ),
            )
            self._run.define_metric(f"{TASK_PREFIX}*", step_metric=TASK_STEP)
        return self._run


ID_TAG = "phalanx.id"
METRIC_OF_EACH_STEP = "train/lr"
"""Its history says which steps the server has."""
MAX_METRICS_PER_REQUEST = 1000
MAX_PARAMS_PER_REQUEST = 100
MAX_PARAM_LENGTH = 500
MLFLOW_STATUS = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MlflowTracker(Tracker):
    """A run on the server of MLFLOW_TRACKING_URI, in the experiment of MLFLOW_EXPERIMENT_NAME."""

    supersedes: ClassVar[bool] = False

    def __init__(self) -> None:
        self._client: MlflowClient | None = None
        self._experiment_id = ""

    def open(self, tracked_run: TrackedRun) -> int:
        """Find or create the run on the server."""
        if (problem := describe_problem("mlflow")) is not None:
            raise UsageError(problem)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = self._client = MlflowClient()
        experiment_id = self._find_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or tracked_run.project)
        found = client.search_runs([experiment_id], f"tags.`{ID_TAG}` = '{tracked_run.id}'", max_results=1)
        run = found[0] if found else None
        if run is None:
            run = client.create_run(experiment_id, tags={ID_TAG: tracked_run.id}, run_name=tracked_run.name)
        elif run.info.status != "RUNNING":
            client.update_run(run.info.run_id, status="RUNNING")
        self.remote_id, self._experiment_id = run.info.run_id, run.info.experiment_id
        if not run.data.params:
            flat = flatten_keys(tracked_run.config)
            params = [Param(key, str(value)[:MAX_PARAM_LENGTH]) for key, value in flat.items()]
            for start in range(0, len(params), MAX_PARAMS_PER_REQUEST):
                client.log_batch(self.remote_id, params=params[start : start + MAX_PARAMS_PER_REQUEST])
        history = client.get_metric_history(self.remote_id, METRIC_OF_EACH_STEP)
        return max((metric.step for metric in history), default=-1)

    def log_rows(self, rows: Sequence[MetricRow]) -> None:
        """Send rows in as few requests as the server allows; a row is never divided."""
        from mlflow.entities import Metric

        request: list[Metric] = []
        for row in rows:
            if len(request) + len(row.metrics) > MAX_METRICS_PER_REQUEST:
                self._send(request)
                request = []
            time_ms = int(row.time * 1000)
            request += [Metric(name, value, time_ms, row.step) for name, value in row.metrics.items()]
        self._send(request)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags `phalanx.NAME`."""
        for name, value in tags.items():
            self._opened().set_tag(self.remote_id, f"phalanx.{name}", value)

    def close(self, status: str | None) -> None:
        if status is not None:
            self._opened().set_terminated(self.remote_id, MLFLOW_STATUS[status])

    def describe_location(self) -> str:
        server = os.environ.get("MLFLOW_TRACKING_URI", "the default store")
        return f"{server}, experiment {self._experiment_id}, run {self.remote_id}"

    def _find_experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        client = self._opened()
        if (experiment := client.get_experiment_by_name(name)) is None:
            try:
                return str(client.create_experiment(name))
            except MlflowException:  # another run has just created it
                if (experiment := client.get_experiment_by_name(name)) is None:
                    raise
        return str(experiment.experiment_id)

    def _send(self, metrics: "Sequence[Metric]") -> None:
        if metrics:
            self._opened().log_batch(self.remote_id, metrics=metrics)

    def _opened(self) -> "MlflowClient":
        assert self._client is not None
        return self._client


class TrackioTracker(Tracker):
    """A run of trackio: a local SQLite file (TRACKIO_DIR), or the server or Space of its environment variables."""

    supersedes: ClassVar[bool] = False

    def __init__(self) -> None:
        self._tracked_run: TrackedRun | None = None

    def open(self, tracked_run: TrackedRun) -> int:
        """Create the run, or find how far it is."""
        self._tracked_run = tracked_run
        run = self._start()
        newest = int(run._next_step) - 1
        run.finish()
        return newest

    def log_rows(self, rows: Sequence[MetricRow]) -> None:
        """Send rows. Only `finish` waits until they are stored, so each call is a session of its own."""
        run = self._start()
        for row in rows:
            run.log(row.metrics, step=row.step)
        run.finish()

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Do nothing: trackio has no tags that can be set later. Faults and restarts are metrics, too."""

    def close(self, status: str | None) -> None:
        """Do nothing: every call has ended its session."""

    def describe_location(self) -> str:
        assert self._tracked_run is not None
        place = os.environ.get("TRACKIO_SERVER_URL") or os.environ.get("TRACKIO_SPACE_ID") or "this machine"
        return f"{place}, project {self._tracked_run.project}, run {self._name}"

    @property
    def _name(self) -> str:
        """trackio finds runs by name, so it has a part of the id."""
        assert self._tracked_run is not None
        return f"{self._tracked_run.name}-{self._tracked_run.id[:8]}"

    def _start(self) -> "TrackioRun":
        import trackio

        assert self._tracked_run is not None
        config = flatten_keys(self._tracked_run.config)
        return trackio.init(
            self._tracked_run.project,
            name=self._name,
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )


TRACKER_CLASSES: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}


def make_tracker(name: str) -> Tracker:
    """Make the tracker of a name, not open yet."""
    return TRACKER_CLASSES[name]()
