"""trackio: a local SQLite file (TRACKIO_DIR), or the server or Space that its environment variables name.

A second value of a step is a second point, so only final steps are sent.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from phalanx.observe.trackers.tracker import MetricRow, TrackedRun, Tracker, flatten_config

if TYPE_CHECKING:
    from trackio.run import Run as TrackioRun


class TrackioTracker(Tracker):
    """A run of trackio."""

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
        """Project and run."""
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
        config = flatten_config(self._tracked_run.config)
        return trackio.init(
            self._tracked_run.project,
            name=self._name,
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
