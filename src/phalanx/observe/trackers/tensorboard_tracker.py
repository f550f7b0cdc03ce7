"""TensorBoard: event files in the run directory, which move with it.

Each process writes a file of its own, since a killed one may end within a record. A SessionLog START record makes
readers drop what was logged for its step and later ones before (`purge_step` of SummaryWriter).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from phalanx.observe.trackers.tracker import MetricRow, TrackedRun, Tracker, make_own_folder
from phalanx.run import Run
from phalanx.run.boot_clock import unix_now

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event as EventProto
    from tensorboard.summary.writer.record_writer import RecordWriter


class TensorBoardTracker(Tracker):
    """Event files in RUN/tensorboard. `tensorboard --logdir RUNS` finds them."""

    supersedes: ClassVar[bool] = True

    def __init__(self) -> None:
        self._folder = Path()
        self._writer: RecordWriter | None = None
        self._last_step = 0
        self._recipe = ""

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
        self._recipe = json.dumps(tracked_run.config, indent=2, default=str)
        return -1

    def log_rows(self, rows: Sequence[MetricRow]) -> None:
        """Write a record for each row."""
        from tensorboard.compat.proto.event_pb2 import Event as EventProto
        from tensorboard.compat.proto.summary_pb2 import Summary

        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.metrics.items()]
            self._write(EventProto(wall_time=row.time, step=row.step, summary=Summary(value=values)))
            self._last_step = row.step
        self._flush()

    def drop_steps_from(self, step: int) -> None:
        """Write the record that makes readers drop them."""
        from tensorboard.compat.proto.event_pb2 import Event as EventProto
        from tensorboard.compat.proto.event_pb2 import SessionLog

        log = SessionLog(status=SessionLog.START)
        self._write(EventProto(wall_time=unix_now(), step=step, session_log=log))
        if step == 0:
            self._write_text("recipe", "".join(f"    {line}\n" for line in self._recipe.splitlines()), 0)
        self._flush()

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Write them as texts of the newest step."""
        self._write_text("run", "".join(f"- {name}: {value}\n" for name, value in tags.items()), self._last_step)
        self._flush()

    def close(self, status: str | None) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def describe_location(self) -> str:
        """The folder."""
        return str(self._folder)

    def _write_text(self, tag: str, markdown: str, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as EventProto
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[markdown.encode()], tensor_shape=shape)
        value = Summary.Value(tag=tag, metadata=create_summary_metadata(tag, ""), tensor=tensor)
        self._write(EventProto(wall_time=unix_now(), step=step, summary=Summary(value=[value])))

    def _write(self, event: "EventProto") -> None:
        assert self._writer is not None
        self._writer.write(event.SerializeToString())

    def _flush(self) -> None:
        assert self._writer is not None
        self._writer.flush()
