"""What runs say about nodes: the minutes that their agents write and the events of the run, read as they are added."""

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

from phalanx.errors import DataError
from phalanx.jobs.spec import JobState, JobStatus
from phalanx.run import Run
from phalanx.run.event_types import Event, StragglerDetected, WorkerFailure, WorkerStarted
from phalanx.run.events import LineTail, parse_event
from phalanx.run.telemetry_minutes import NodeMinute, NodeMinuteTail
from phalanx_fleet.evidence import NodeEvidence, find_evidence, has_errors, may_have_errors

logger = logging.getLogger(__name__)

MAX_MINUTES_BYTES = 16 << 20
"""Bytes of a node's minutes that are read at first, from the end: more than a day with 8 accelerators."""
MAX_EVENTS_BYTES = 16 << 20
"""Bytes of a run's events that are read at first, from the end: 40,000 steps."""
RELEVANT_EVENTS = (WorkerStarted, StragglerDetected, WorkerFailure)
RELEVANT_KINDS_PATTERN = re.compile(rb'"(?:%s)"' % "|".join(each.kind for each in RELEVANT_EVENTS).encode())
MAX_JOB_AGE_S = 24 * 3600.0
"""Seconds since the end of a job for which its run is read: what ended it may be its node's fault."""


def list_run_directories(folder: Path) -> list[Path]:
    """Return the run directories in a folder; the folder itself, if it is one."""
    if _is_run(folder):
        return [folder]
    return sorted(path for path in folder.iterdir() if path.is_dir() and _is_run(path))


def select_recent_runs(statuses: Iterable[JobStatus], now: float) -> list[Path]:
    """Return the run directories of the jobs that run, or ended within the last day."""
    found: dict[Path, None] = {}
    for status in statuses:
        is_recent = status.ended_at is not None and now - status.ended_at < MAX_JOB_AGE_S
        if status.run_dir is not None and (status.state is JobState.RUNNING or is_recent):
            found[Path(status.run_dir)] = None
    return list(found)


class RunReadings:
    """The newest minutes of a run's nodes; what may be evidence against a node is kept."""

    def __init__(self, run: Run):
        self._run = run
        self._tails: dict[Path, NodeMinuteTail] = {}
        self._events: LineTail | None = None
        self._suspicious_minutes: list[NodeMinute] = []
        self._relevant_events: list[Event] = []

    def list_evidence(self) -> list[NodeEvidence]:
        """Return the evidence against nodes in what was read of minutes so far, and in the events until now."""
        self._read_events()
        return find_evidence(self._suspicious_minutes, self._relevant_events)

    def read_minutes(self) -> list[NodeMinute]:
        """Return the newest minute of each node, and those with errors before it since the last call, of each node in
        order. A file that is no file is left out."""
        found: list[NodeMinute] = []
        for path in self._list_minute_files():
            try:
                if path not in self._tails:
                    self._tails[path] = NodeMinuteTail(path, MAX_MINUTES_BYTES)
                found += self._tails[path].read_chosen(may_have_errors)
            except (OSError, DataError) as error:
                logger.debug("%s is not read: %s", path, error)
        self._suspicious_minutes += filter(has_errors, found)
        return found

    def _list_minute_files(self) -> list[Path]:
        folder = self._run.telemetry
        try:
            return [folder / name for name in sorted(os.listdir(folder)) if name.endswith(".jsonl")]
        except OSError as error:  # there are none yet, or this user may not read them
            logger.debug("%s is not read: %s", folder, error)
            return []

    def _read_events(self) -> None:
        try:
            if self._events is None:
                events = LineTail(self._run.events)
                events.skip(MAX_EVENTS_BYTES)
                self._events = events
            for line in self._events.read():
                if RELEVANT_KINDS_PATTERN.search(line) is None:  # most are steps, and to parse them takes seconds
                    continue
                event = parse_event(line.decode(errors="replace"))
                if isinstance(event, RELEVANT_EVENTS):
                    self._relevant_events.append(event)
        except (OSError, DataError) as error:
            logger.debug("%s is not read: %s", self._run.events, error)


def _is_run(path: Path) -> bool:
    """Whether a run is there that this user may read."""
    try:
        return Run(path).has_started()
    except PermissionError:
        return False
