"""MLflow: a run on the server of MLFLOW_TRACKING_URI, in the experiment of MLFLOW_EXPERIMENT_NAME.

A second value of a step is a second point, so only final steps are sent.
"""

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from phalanx.errors import UsageError
from phalanx.observe.trackers.tracker import MetricRow, TrackedRun, Tracker, flatten_config

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

ID_TAG = "phalanx.id"
METRIC_OF_EACH_STEP = "train/lr"
"""Its history says which steps the server has."""
MAX_METRICS_PER_REQUEST = 1000
MAX_PARAMS_PER_REQUEST = 100
MAX_PARAM_LENGTH = 500
MLFLOW_STATUS = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MlflowTracker(Tracker):
    """A run on an MLflow server."""

    supersedes: ClassVar[bool] = False

    def __init__(self) -> None:
        self._client: MlflowClient | None = None
        self._experiment_id = ""

    def open(self, tracked_run: TrackedRun) -> int:
        """Find or create the run on the server."""
        if (problem := describe_missing_server()) is not None:
            raise UsageError(problem)
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        client = self._client = MlflowClient()
        run = None
        if tracked_run.remote_id:
            try:
                run = client.get_run(tracked_run.remote_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        if run is None:
            experiment_id = self._find_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or tracked_run.project)
            found = client.search_runs([experiment_id], f"tags.`{ID_TAG}` = '{tracked_run.id}'", max_results=1)
            run = found[0] if found else None
        if run is not None and run.info.lifecycle_stage == "deleted":
            raise UsageError(
                f"mlflow: run {run.info.run_name} ({run.info.run_id}) is deleted: restore it, or remove "
                f"{tracked_run.path}/trackers/mlflow.json to send another one"
            )
        if run is None:
            run = client.create_run(experiment_id, tags={ID_TAG: tracked_run.id}, run_name=tracked_run.name)
        elif run.info.status != "RUNNING":
            client.update_run(run.info.run_id, status="RUNNING")
        self.remote_id, self._experiment_id = run.info.run_id, run.info.experiment_id
        if not run.data.params:
            flat = flatten_config(tracked_run.config)
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
        """Set the run's status."""
        if status is not None:
            self._opened().set_terminated(self.remote_id, MLFLOW_STATUS[status])

    def describe_location(self) -> str:
        """Server and page."""
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
        if experiment.lifecycle_stage == "deleted":
            raise UsageError(f"mlflow: experiment {name} is deleted: restore it, or set MLFLOW_EXPERIMENT_NAME")
        return str(experiment.experiment_id)

    def _send(self, metrics: "Sequence[Metric]") -> None:
        if metrics:
            self._opened().log_batch(self.remote_id, metrics=metrics)

    def _opened(self) -> "MlflowClient":
        assert self._client is not None
        return self._client


def describe_missing_server() -> str | None:
    """Say what is missing where no server is named, and MLflow has no store of its own here."""
    if os.environ.get("MLFLOW_TRACKING_URI") or find_spec("sqlalchemy") is not None:
        return None
    return (
        "mlflow: MLFLOW_TRACKING_URI is not set; set it to the URL of your server, such as http://localhost:5000, or "
        "install `mlflow` for a local store"
    )
