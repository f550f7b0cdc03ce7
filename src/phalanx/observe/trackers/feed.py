"""Feeds one tracker from a run directory with rows of metrics, and remembers in it what was sent.

A step is final when it is covered by the newest durable checkpoint, or when the run has ended as `done` or `failed`. A
later step may be done again after a restart.

`python -m phalanx.observe.trackers.feed RUN NAME PARENT` does so while a run trains. It ends when standard input is
closed, after what is left was sent. Each line that it writes to standard output is a message for the user; everything
that the tracker's library prints goes to standard error.
"""

import contextlib
import math
import os
import re
import select
import signal
import sys
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

from phalanx.errors import DataError, UsageError
from phalanx.formatting import format_plural
from phalanx.observe.history import STEP_COMPONENTS, as_float
from phalanx.observe.progress import RunFacts, read_run_facts
from phalanx.observe.run_info import read_resolved_recipe
from phalanx.observe.trackers.tracker import (
    TASK_PREFIX,
    MetricRow,
    TrackedRun,
    Tracker,
    describe_error,
    make_own_folder,
    make_tracker,
    set_library_defaults,
)
from phalanx.process_lifetime import die_with_parent, prefer_oom_kill
from phalanx.run import EventTail, Run, event_types
from phalanx.run.directory import write_json
from phalanx.run.lock import LocksUnsupportedError, acquire_lock
from phalanx.std_streams import word_of

NO_STEP = -1
"""Before any step: evaluations before training are of step 0."""
PHASE_METRICS = tuple(f"time/{phase}_s" for phase in STEP_COMPONENTS)
"""Metrics of StepPhases, in its order. Made once: many rows may be held."""
NOT_IN_NAMES = re.compile(r"[^-\w./: ]")
"""What MLflow allows in no name of a metric."""


class StepRows:
    """The rows that are not sent yet, kept up to date event by event."""

    def __init__(self, facts: RunFacts, sent_step: int = NO_STEP):
        self.facts, self.sent_step = facts, sent_step
        self.newest_step = self.durable_step = self._evaluated_step = NO_STEP
        self.status: str | None = None
        self.num_faults = self.num_restarts = 0
        self.last_fault = ""
        self._rows: dict[int, MetricRow] = {}
        self.late_rows: list[MetricRow] = []
        """Scores of tasks that came after the row of their step was sent."""
        self._world_size, self._speed_metric = 1, f"train/{facts.unit}_per_s"
        self.can_take_back = False
        """Whether steps that were sent and are done again are sent again."""

    def add_event(self, event: event_types.Event) -> int | None:
        """Count an event in. Returns the last step that is kept, if later ones are going to be done again."""
        kept_step = None
        if isinstance(event, event_types.AttemptStarted):
            kept_step = self._start_attempt(event)
        elif isinstance(event, event_types.StepDone):
            kept_step = self._drop_rows_after(event.step - 1)
            self._add_row(event.step, event.time, self._step_metrics(event))
            self.newest_step, self.status = event.step, None
        elif isinstance(event, event_types.EvaluationDone):
            self._add_evaluation(event)
        elif isinstance(event, event_types.TasksEvaluated):
            self._add_scores(event)
        elif isinstance(event, event_types.CheckpointSaved):
            self.durable_step = max(self.durable_step, event.step)
        elif isinstance(event, event_types.WorkerFailure):
            self.num_faults += 1
            self.last_fault = event.message
        elif isinstance(event, event_types.RunEnded):
            self.status = event.status
        return kept_step

    @property
    def final_step(self) -> int:
        """The last step that will not be done again."""
        if self.status in ("done", "failed"):
            return self.newest_step
        newest = self.newest_step if self.status == "interrupted" else self.newest_step - 1
        return min(self.durable_step, newest)

    @property
    def num_held(self) -> int:
        """Rows that are not final."""
        return sum(step > self.final_step for step in self._rows)

    def take_rows(self, last_step: int) -> list[MetricRow]:
        """Remove and return the rows up to a step, ascending."""
        first_step = next(iter(self._rows), None)  # held rows are in ascending order, and may be many
        if first_step is None or first_step > last_step:
            return []
        steps = sorted(step for step in self._rows if step <= last_step)
        return [self._rows.pop(step) for step in steps]

    def put_back(self, rows: list[MetricRow]) -> None:
        """Return rows that could not be sent."""
        self._rows = {row.step: row for row in rows} | self._rows

    def drop_rows_until(self, sent_step: int) -> None:
        """Drop rows that turn out to have been sent."""
        self.sent_step = sent_step
        self._rows = {step: row for step, row in self._rows.items() if step > sent_step}

    def tags(self) -> dict[str, str]:
        """What holds for the whole run so far."""
        tags = {"status": self.status or "running", "restarts": str(self.num_restarts), "faults": str(self.num_faults)}
        return {**tags, "last_fault": self.last_fault} if self.last_fault else tags

    def _start_attempt(self, event: event_types.AttemptStarted) -> int | None:
        self._world_size, self.status = event.world_size, None
        if event.attempt:
            self.num_restarts += 1
        self.durable_step = min(self.durable_step, event.start_step)
        return self._drop_rows_after(event.start_step)

    def _drop_rows_after(self, kept_step: int) -> int | None:
        if kept_step >= self.newest_step:
            return None
        self._rows = {step: row for step, row in self._rows.items() if step <= kept_step}
        self.newest_step = kept_step
        self.durable_step = min(self.durable_step, kept_step)
        self._evaluated_step = min(self._evaluated_step, kept_step)
        if self.can_take_back:
            self.sent_step = min(self.sent_step, kept_step)
        return kept_step

    def _add_evaluation(self, event: event_types.EvaluationDone) -> None:
        """Add an evaluation. A restart may repeat one that was sent: it has the same result."""
        if event.step <= self._evaluated_step and event.step not in self._rows:
            return
        self._evaluated_step = max(self._evaluated_step, event.step)
        self.newest_step = max(self.newest_step, event.step)
        scores = {"loss": event.loss, **event.metrics}
        metrics = {f"val/{name}": math.nan if value is None else value for name, value in scores.items()}
        self._add_row(event.step, event.time, metrics)

    def _add_scores(self, event: event_types.TasksEvaluated) -> None:
        """Add the scores of tasks, which come when training is steps ahead."""
        metrics = {
            f"{TASK_PREFIX}{NOT_IN_NAMES.sub('', name)}": as_float(value) for name, value in event.metrics.items()
        }
        if event.step in self._rows:
            self._add_row(event.step, event.time, metrics)
        else:
            self.late_rows.append(MetricRow(event.step, event.time, metrics))

    def _add_row(self, step: int, time: float, metrics: dict[str, float]) -> None:
        if step <= self.sent_step:
            return
        row = self._rows.get(step)
        self._rows[step] = replace(row, metrics=row.metrics | metrics) if row else MetricRow(step, time, metrics)

    def _step_metrics(self, event: event_types.StepDone) -> dict[str, float]:
        metrics = {"train/loss": math.nan if event.loss is None else event.loss, "train/lr": event.lr}
        if event.grad_norm is not None:
            metrics["train/grad_norm"] = event.grad_norm
        metrics["time/step_s"] = event.duration_s
        metrics |= zip(PHASE_METRICS, vars(event.breakdown_s).values(), strict=True)
        if event.duration_s > 0:
            units_per_s = event.units / event.duration_s
            metrics[self._speed_metric] = units_per_s
            if (mfu := self.facts.compute_mfu(units_per_s, self._world_size)) is not None:
                metrics["train/mfu"] = mfu
        return metrics


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

    def _add_event(self, event: event_types.Event) -> None:
        self._num_events += 1
        is_new = self._num_events > self.state.num_events  # else an earlier process has sent its effects
        self.rows.can_take_back = is_new and self._tracker.supersedes
        kept_step = self.rows.add_event(event)
        if not is_new:
            self.rows.late_rows.clear()
        if kept_step is not None and self.rows.can_take_back:
            self._drop_from = kept_step + 1 if self._drop_from is None else min(kept_step + 1, self._drop_from)

    def _send(self) -> None:
        if self._num_events < self.state.num_events:
            return
        if self._drop_from is not None:
            self._tracker.drop_steps_from(self._drop_from)
            self._drop_from = None
        if self.rows.late_rows:
            self._tracker.log_late_rows(self.rows.late_rows)
            self.rows.late_rows.clear()
            self._write_state(replace(self.state, num_events=self._num_events))
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
        path = make_own_folder(run.trackers) / f"{name}.lock"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
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


POLL_INTERVAL_S = 1.0
MAX_RETRY_INTERVAL_S = 60.0
LOCK_TIMEOUT_S = 30.0
"""Seconds that the process of an agent that was killed may take to end."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
INCOMPLETE_EXIT_CODE = 3
"""Exit code of a process that could not send everything and has said why. Python's own for an exception is 1."""


class FeedLoop:
    """Sends what is new again and again, and reports what fails once until it works again."""

    def __init__(self, run: Run, name: str, messages: TextIO):
        self._run, self._name, self._messages = run, name, messages
        self._feed = TrackerFeed(run, name, make_tracker(name))
        self._has_failed = False
        self.interval_s = POLL_INTERVAL_S
        """Seconds until the next try."""

    def send(self) -> bool:
        """Send what is new; return whether that worked."""
        try:
            self._feed.send_new()
        except Exception as error:  # noqa: BLE001 - libraries of trackers raise anything; training continues without it
            traceback.print_exc()
            if not self._has_failed:
                self._report(f"cannot send, training continues without it: {describe_error(error)}")
            self._has_failed, self.interval_s = True, min(2 * self.interval_s, MAX_RETRY_INTERVAL_S)
            return False
        if self._has_failed:
            self._report("works again")
        self._has_failed, self.interval_s = False, POLL_INTERVAL_S
        return True

    def finish(self) -> bool:
        """Send the rest and close; report what is not sent."""
        is_sent = self.send()
        try:
            self._feed.close()
        except Exception as error:  # noqa: BLE001 - as above
            traceback.print_exc()
            self._report(f"was not closed properly: {describe_error(error)}")
            is_sent = False
        if not is_sent:
            resend = f"phalanx report --to {self._name} {word_of(self._run.path)}"
            self._report(f"is not complete; send the rest with: {resend}")
        elif held := self._feed.rows.num_held:
            steps = format_plural(held, "step")
            self._report(f"{steps} after the last checkpoint held back: the run repeats them when it resumes")
        return is_sent

    def _report(self, text: str) -> None:
        print(f"{self._name}: {text}", file=self._messages, flush=True)


def main(run_path: str, name: str, parent: int) -> int:
    """Feed a tracker until standard input is closed."""
    die_with_parent(parent)
    for number in STOP_SIGNALS:  # a scheduler sends them to all processes of a job; the agent says when this one ends
        signal.signal(number, signal.SIG_IGN)
    prefer_oom_kill()
    os.nice(19)
    set_library_defaults()
    messages = open(os.dup(1), "w")  # noqa: SIM115 - lives as long as the process
    os.dup2(2, 1)
    run = Run(Path(run_path))
    with lock_feed(run, name, LOCK_TIMEOUT_S):
        loop = FeedLoop(run, name, messages)
        while not select.select([sys.stdin], [], [], loop.interval_s)[0]:
            loop.send()
        return 0 if loop.finish() else INCOMPLETE_EXIT_CODE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
