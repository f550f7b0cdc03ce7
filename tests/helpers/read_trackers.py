"""Reads back what trackers have of a run, with their own libraries where they can."""

import json
import sqlite3
from pathlib import Path

from phalanx.observe.trackers.wandb_files import find_offline_files, read_history_rows
from phalanx.run import Run

Points = list[tuple[int, float]]


def read_tensorboard(run: Run, metric: str) -> Points:
    """The points of a metric that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run.tensorboard), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(metric)]


def read_wandb(run: Run, metric: str) -> Points:
    """The points of a metric in W&B's offline files."""
    run_id = json.loads((run.trackers / "wandb.json").read_text())["id"]
    rows = [row for path in find_offline_files(run.path, run_id) for row in read_history_rows(path)]
    return [(int(row["_step"]), row[metric]) for row in rows if metric in row]


def read_trackio(folder: Path, metric: str) -> Points:
    """The points of a metric in trackio's only project of a folder."""
    (database,) = folder.glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    connection.close()
    return [(step, json.loads(values)[metric]) for step, values in rows if metric in json.loads(values)]
