"""Turns events into rows of metrics, and knows which are final.

A step is final when it is covered by the newest durable checkpoint, or when the run has ended as `done` or `failed`. A
later step may be done again after a restart. The newest step is held until the next begins, as its evaluation may come
after its checkpoint.
"""

import math
from dataclasses import replace

from phalanx.observe.history import STEP_COMPONENTS
from phalanx.observe.peak_rate import PeakRate
from phalanx.observe.run_progress import RunFacts
from phalanx.observe.trackers.tracker import MetricRow
from phalanx.run import Event
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointSaved,
    EvaluationDone,
    RunEnded,
    StepDone,
    WorkerFailure,
)

NO_STEP = -1
"""Before any step: evaluations before training are of step 0."""
PHASE_METRICS = tuple(f"time/{phase}_s" for phase in STEP_COMPONENTS)
"""Metrics of StepPhases, in its order. Made once: many rows may be held."""


class StepRows:
    """The rows that are not sent yet, kept up to date event by event."""

    def __init__(self, facts: RunFacts, sent_step: int = NO_STEP):
        self.facts, self.sent_step = facts, sent_step
        self.newest_step = self.durable_step = self._evaluated_step = NO_STEP
        self.status: str | None = None
        self.num_faults = self.num_restarts = 0
        self.last_fault = ""
        self._rows: dict[int, MetricRow] = {}
        self._world_size, self._speed_metric = 1, f"train/{facts.unit}_per_s"
        self._is_counter_due = False
        rate = facts.matmul_flops_per_worker
        self._peak_of_worker = PeakRate(rate) if rate else None
        self.can_take_back = False
        """Whether steps that were sent and are done again are sent again."""

    def add_event(self, event: Event) -> int | None:
        """Count an event in. Returns the last step that is kept, if later ones are going to be done again."""
        kept_step = None
        if isinstance(event, AttemptStarted):
            kept_step = self._start_attempt(event)
        elif isinstance(event, StepDone):
            kept_step = self._drop_rows_after(event.step - 1)
            self._add_row(event.step, event.time, self._step_metrics(event))
            self.newest_step, self.status = event.step, None
        elif isinstance(event, EvaluationDone):
            self._add_evaluation(event)
        elif isinstance(event, CheckpointSaved):
            self.durable_step = max(self.durable_step, event.step)
        elif isinstance(event, WorkerFailure):
            self.num_faults += 1
            self.last_fault, self._is_counter_due = event.message, True
        elif isinstance(event, RunEnded):
            self.status = event.status
        return kept_step

    def add_to_newest(self, time: float, metrics: dict[str, float]) -> None:
        """Add metrics to the row of the newest step."""
        if self.newest_step != NO_STEP:
            self._add_row(self.newest_step, time, metrics)

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

    def _start_attempt(self, event: AttemptStarted) -> int | None:
        self._world_size, self.status = event.world_size, None
        if event.attempt and not event.scaled_up:
            self.num_restarts += 1
            self._is_counter_due = True
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

    def _add_evaluation(self, event: EvaluationDone) -> None:
        """Add an evaluation. A restart may repeat one that was sent: it has the same result."""
        if event.step <= self._evaluated_step and event.step not in self._rows:
            return
        self._evaluated_step = max(self._evaluated_step, event.step)
        self.newest_step = max(self.newest_step, event.step)
        scores = {"loss": event.loss, **event.metrics}
        metrics = {f"val/{name}": math.nan if value is None else value for name, value in scores.items()}
        self._add_row(event.step, event.time, metrics)

    def _add_row(self, step: int, time: float, metrics: dict[str, float]) -> None:
        if step <= self.sent_step:
            return
        row = self._rows.get(step)
        self._rows[step] = (
            MetricRow(step, time, metrics) if row is None else replace(row, metrics=row.metrics | metrics)
        )

    def _step_metrics(self, event: StepDone) -> dict[str, float]:
        metrics = {"train/loss": math.nan if event.loss is None else event.loss, "train/lr": event.lr}
        if event.grad_norm is not None:
            metrics["train/grad_norm"] = event.grad_norm
        metrics["time/step_s"] = event.duration_s
        metrics |= zip(PHASE_METRICS, vars(event.breakdown_s).values(), strict=True)
        if event.duration_s > 0:
            units_per_s = event.units / event.duration_s
            metrics[self._speed_metric] = units_per_s
            if self.facts.flops_per_sample and self._peak_of_worker is not None:
                flops_per_s = self.facts.flops_per_sample * units_per_s / self.facts.units_per_sample
                metrics["train/mfu"] = self._peak_of_worker.compute_mfu(flops_per_s / self._world_size)
        if self._is_counter_due:
            metrics |= {"run/restarts": float(self.num_restarts), "run/faults": float(self.num_faults)}
            self._is_counter_due = False
        return metrics
