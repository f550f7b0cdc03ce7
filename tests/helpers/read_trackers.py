"""Reads back what trackers have of a run, with their own libraries where they can."""

import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

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
    paths = sorted(run.path.glob(f"wandb/offline-run-*-{run_id}*/run-{run_id}.wandb"))
    rows = [row for path in paths for row in _read_wandb_rows(path.read_bytes())]
    return [(int(row["_step"]), row[metric]) for row in rows if metric in row]


def _read_wandb_rows(content: bytes) -> Iterator[dict[str, float]]:
    """Rows of an offline file, which no public function of W&B reads. It has LevelDB's log format: after 7 bytes blocks
    of 32 KiB, in them parts (CRC-32, length, type) of records."""
    from wandb.proto.wandb_internal_pb2 import Record

    position, encoded = 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:  # padding
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        encoded = (b"" if kind in (1, 2) else encoded) + content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(encoded)
            if record.WhichOneof("record_type") == "history":
                yield {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}


def read_trackio(folder: Path, metric: str) -> Points:
    """The points of a metric in trackio's only project of a folder."""
    (database,) = folder.glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    connection.close()
    return [(step, json.loads(values)[metric]) for step, values in rows if metric in json.loads(values)]
