"""Feeds one tracker from a run directory, and remembers in it what was sent."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from phalanx.errors import DataError, UsageError
from phalanx.observe.goodput import compute_device_time
from phalanx.observe.history import read_history
from phalanx.observe.run_info import read_resolved_recipe
from phalanx.observe.run_progress import read_run_facts
from phalanx.observe.trackers.step_rows import NO_STEP, StepRows
from phalanx.observe.trackers.tracker import TrackedRun, Tracker, make_own_folder
from phalanx.run import EventTail, Run
from phalanx.run.directory import write_json
from phalanx.run.event_types import Event, RunEnded
from phalanx.run.lock import LocksUnsupportedError, acquire_lock

MAX_ROWS_PER_SEND = 500


@dataclass(frozen=True)
class FeedState:
    """What RUN/trackers/NAME.json holds. `num_events`: events of the run that were read when `sent_step` was sent;
    `remote_id`: what the tracker calls the run."""

    id: str
    sent_step: int = NO_STEP
    num_events: int = 0
    remote_id: str = ""


class TrackerFeed:
    """Sends what is new in a run to a tracker. Errors of the tracker come through; what was not sent is sent by the
    next call."""

    def __init__(self, run: Run, name: str, tracker: Tracker):
        self._run, self._tracker, self._path = run, tracker, run.trackers / f"{name}.json"
        self.state = self._read_state()
        self.rows = StepRows(read_run_facts(run))
        self._tail = EventTail(run.events)
        self._num_events = 0
        self._drop_from: int | None = None
        self._tags: dict[str, str] = {}
        self._is_open = False

    def send_new(self) -> None:
        """Read the events that are new, and send what may be sent."""
        try:
            self._send_new()
        except BaseException:  # it may have taken some of it: open it again, which asks it
            self._is_open = False
            raise

    def close(self) -> None:
        """End sending."""
        if self._is_open:
            self._is_open = False
            self._tracker.close(self.rows.status)

    def _send_new(self) -> None:
        if not self._is_open:
            self._open()
        self._send()
        for event in self._tail.read():
            self._add_event(event)
            if self._num_events % MAX_ROWS_PER_SEND == 0:
                self._send()
        self._send()
        if (tags := self.rows.tags()) != self._tags:
            self._tracker.set_tags(tags)
            self._tags = tags

    def _open(self) -> None:
        """Open the tracker, at first or after it has failed, and ask how far it is."""
        make_own_folder(self._run.trackers)
        self._write_state(self.state)  # the id, before the tracker knows it
        recipe, path = read_resolved_recipe(self._run), self._run.path.absolute()
        project, state = str(recipe.get("name", path.name)), self.state
        tracked = TrackedRun(state.id, path.name, project, recipe, path, state.remote_id, state.sent_step)
        newest = self._tracker.open(tracked)
        if not self._tracker.supersedes:
            self.rows.drop_rows_until(newest)
        elif self._num_events == 0:  # more of the newest step may follow, such as its evaluation
            self.rows.sent_step, self._drop_from = state.sent_step - 1, max(0, state.sent_step)
        elif self._drop_from is None:
            self._drop_from = state.sent_step + 1
        self._write_state(replace(state, remote_id=self._tracker.remote_id))
        self._is_open = True

    def _add_event(self, event: Event) -> None:
        self._num_events += 1
        is_new = self._num_events > self.state.num_events  # else an earlier process has sent its effects
        self.rows.can_take_back = is_new and self._tracker.supersedes
        kept_step = self.rows.add_event(event)
        if kept_step is not None and self.rows.can_take_back:
            self._drop_from = kept_step + 1 if self._drop_from is None else min(kept_step + 1, self._drop_from)
        if isinstance(event, RunEnded):
            share = compute_device_time(read_history(self._run.events)).goodput_share
            if share is not None:
                self.rows.add_to_newest(event.time, {"run/goodput": share})

    def _send(self) -> None:
        if self._num_events < self.state.num_events:
            return
        if self._drop_from is not None:
            self._tracker.drop_steps_from(self._drop_from)
            self._drop_from = None
        last_step = self.rows.newest_step if self._tracker.supersedes else self.rows.final_step
        rows = self.rows.take_rows(last_step)
        while rows:
            part, rows = rows[:MAX_ROWS_PER_SEND], rows[MAX_ROWS_PER_SEND:]
            try:
                self._tracker.log_rows(part)
            except BaseException:
                self.rows.put_back(part + rows)
                raise
            sent_step = part[-1].step
            # where steps can be taken back, more of the newest may follow, such as its evaluation
            self.rows.sent_step = sent_step - 1 if self._tracker.supersedes else sent_step
            self._write_state(replace(self.state, sent_step=sent_step, num_events=self._num_events))

    def _read_state(self) -> FeedState:
        found = self._run.read_json_or_empty(self._path)
        try:
            numbers = int(found["sent_step"]), int(found["num_events"])
            return FeedState(uuid.UUID(str(found["id"])).hex, *numbers, str(found["remote_id"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            return FeedState(uuid.uuid4().hex)

    def _write_state(self, state: FeedState) -> None:
        write_json(self._path, asdict(state))
        self.state = state


@contextlib.contextmanager
def lock_feed(run: Run, name: str, timeout_s: float = 0.0) -> Iterator[None]:
    """Exclude other processes that send this run to this tracker. UsageError where there is one after `timeout_s`. On a
    file system without locks none is excluded."""
    try:
        fd = os.open(
            make_own_folder(run.trackers) / f"{name}.lock",
            os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o644,
        )
    except OSError as error:
        raise DataError(f"{run.trackers}: cannot be written: {error.strerror}") from None
    try:
        try:
            is_acquired = acquire_lock(fd, timeout_s)
        except LocksUnsupportedError:
            is_acquired = True
        if not is_acquired:
            raise UsageError(f"{run.path}: another process sends this run to {name}; wait until it ends")
        yield
    finally:
        os.close(fd)
