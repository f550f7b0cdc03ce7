"""Which trackers there are, and how one is opened."""

from importlib import import_module
from importlib.util import find_spec
from typing import get_args

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


def describe_missing_package(name: str) -> str | None:
    """Say how to install the package of a tracker; None if it is installed."""
    if find_spec(name) is not None:
        return None
    return f"{name} needs the `{name}` package: pip install 'phalanx[{name}]'"


def make_tracker(name: str) -> Tracker:
    """Make the tracker of a name, not open yet."""
    module, _, class_name = TRACKER_CLASSES[name].partition(":")
    tracker: Tracker = getattr(import_module(f"phalanx.observe.trackers.{module}"), class_name)()
    return tracker
