"""Which trackers there are, and how one is opened."""

import os
from importlib import import_module
from importlib.util import find_spec
from typing import get_args

from phalanx.observe.trackers.mlflow_tracker import describe_missing_server
from phalanx.observe.trackers.tracker import Tracker
from phalanx.recipe.schema import TrackerName

TRACKER_NAMES: tuple[str, ...] = get_args(TrackerName)
"""Names as in the recipe. Each is also the name of its package and of the extra that installs it."""
TRACKER_CLASSES = {
    "tensorboard": "tensorboard_tracker:TensorBoardTracker",
    "wandb": "wandb_tracker:WandbTracker",
    "mlflow": "mlflow_tracker:MlflowTracker",
    "trackio": "trackio_tracker:TrackioTracker",
}

LIBRARY_DEFAULTS = {
    # MLflow would otherwise try 7 times for 2 minutes each
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Environment variables of the trackers' libraries, unless they are set."""


def describe_problem(name: str) -> str | None:
    """Say what a tracker lacks on this machine, such as its package; None if nothing."""
    if find_spec(name) is None:
        return f"{name} needs the `{name}` package: pip install 'phalanx[{name}]'"
    return describe_missing_server() if name == "mlflow" else None


def make_tracker(name: str) -> Tracker:
    """Make the tracker of a name, not open yet."""
    module, _, class_name = TRACKER_CLASSES[name].partition(":")
    tracker: Tracker = getattr(import_module(f"phalanx.observe.trackers.{module}"), class_name)()
    return tracker


def set_library_defaults() -> None:
    """Set LIBRARY_DEFAULTS in this process."""
    for variable, value in LIBRARY_DEFAULTS.items():
        os.environ.setdefault(variable, value)
