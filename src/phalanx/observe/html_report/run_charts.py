"""Which charts a run's page has, and what each shows: from RunHistory to Chart values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx import formatting
from phalanx.observe.history import STEP_COMPONENTS, Floats, RunHistory, as_float
from phalanx.observe.html_report.chart import Chart, ChartMark, ChartSeries, linear_range, log_range, needs_log_scale
from phalanx.observe.metrics import breakdown_over_time, smooth_series
from phalanx.observe.summary import RunSummary
from phalanx.observe.text_report import COMPONENT_LABELS
from phalanx.run.event_types import CheckpointSaved, NonFiniteStep

MIN_STEPS_TO_SMOOTH = 20
_MAX_MARKS = 80
_TASK_COLORS = ("train", "validation", "optimizer", "grad-sync", "checkpoint-stall", "data-wait", "backward", "other")
"""One for each task in a chart; more tasks are not shown: of a group the scores of the whole come first."""


def build_run_charts(summary: RunSummary, history: RunHistory) -> list[Chart]:
    """All charts of one run; none when it has no step to show."""
    return list(_RunCharts(summary, history).build()) if len(history.steps) else []


def validation_series(label: str, history: RunHistory, color: str) -> ChartSeries:
    """The validation loss of a run."""
    at = np.array([float(event.step) for event in history.evaluations])
    return ChartSeries(label, at, np.array([as_float(event.loss) for event in history.evaluations]), color, "dots")


@dataclass(frozen=True)
class _RunCharts:
    summary: RunSummary
    history: RunHistory

    def build(self) -> Iterator[Chart]:
        steps = self.history.steps
        restarts = _restart_marks(self.history)
        nonfinite = [
            ChartMark("nonfinite", event.step, f"step {event.step}: {event.reason}, {event.action}")
            for event in self.history.of(NonFiniteStep)[:_MAX_MARKS]
        ]
        yield self.loss([*restarts, *nonfinite])
        if np.isfinite(steps.lr).any():
            lr = ChartSeries("learning rate", steps.step, steps.lr, "train")
            yield Chart("Learning rate", [lr], self.x_range, linear_range([steps.lr], from_zero=True), restarts)
        if np.isfinite(steps.grad_norm).any():
            log = needs_log_scale(steps.grad_norm)
            yield self.values_from_zero("Gradient norm", steps.grad_norm, [*restarts, *nonfinite], log=log)
        with np.errstate(divide="ignore", invalid="ignore"):
            speed = np.where(steps.step_s > 0, steps.tokens / steps.step_s, np.nan)
        if np.isfinite(speed).any():
            yield self.values_from_zero("Speed", speed, restarts, unit=f"{self.summary.speed.unit}/s")
            yield self.step_time(restarts)
        yield from self.task_scores(restarts)

    @property
    def x_range(self) -> tuple[float, float]:
        return 0.0, float(max(1.0, self.history.steps.step[-1]))

    def loss(self, marks: Sequence[ChartMark]) -> Chart:
        steps, loss = self.history.steps, self.summary.loss
        series = self.with_mean("training", steps.loss)
        if self.history.evaluations:
            series.append(validation_series("validation", self.history, "validation"))
        marks = [*marks, *_checkpoint_marks(self.history)]
        best, step = loss.validation_best, loss.validation_best_step
        if best is not None and step is not None:
            label = f"best validation loss {formatting.format_loss(best)} at step {step}"
            marks.append(ChartMark("best", step, label, y=best))
        log = needs_log_scale(steps.loss)
        values = [line.y for line in series]
        y_range = log_range(values) if log else linear_range(values)
        return Chart("Loss", series, self.x_range, y_range, marks, log=log, wide=True)

    def task_scores(self, marks: Sequence[ChartMark]) -> Iterator[Chart]:
        """A chart for each metric of `evaluation.tasks`."""
        scored = self.history.task_scores
        names = dict.fromkeys(name for event in scored for name in event.metrics)
        at = np.array([float(event.step) for event in scored])
        for metric in dict.fromkeys(name.partition("/")[2] for name in names):
            shown = [name for name in names if name.partition("/")[2] == metric]
            lines = [np.array([as_float(event.metrics.get(name)) for event in scored]) for name in shown]
            series = [
                ChartSeries(name.partition("/")[0], at, line, color, "dots")
                for name, line, color in zip(shown, lines, _TASK_COLORS, strict=False)
            ]
            yield Chart(f"Tasks: {metric}", series, self.x_range, linear_range(lines), marks)

    def values_from_zero(
        self, title: str, y: Floats, marks: Sequence[ChartMark], unit: str = "", log: bool = False
    ) -> Chart:
        series = self.with_mean(title.lower(), y)
        values = [line.y for line in series]
        y_range = log_range(values) if log else linear_range(values, from_zero=True, robust=True)
        return Chart(title, series, self.x_range, y_range, marks, unit, log)

    def with_mean(self, label: str, y: Floats) -> list[ChartSeries]:
        """The values themselves, faintly, and their running mean."""
        at = self.history.steps.step
        if np.isfinite(y).sum() < MIN_STEPS_TO_SMOOTH:
            return [ChartSeries(label, at, y, "train", "dots")]
        mean = ChartSeries(f"{label}, running mean", at, smooth_series(y), "train")
        return [ChartSeries(f"{label}, single steps", at, y, "train", "faint"), mean]

    def step_time(self, marks: Sequence[ChartMark]) -> Chart:
        at, parts = breakdown_over_time(self.history.steps)
        in_ms = float(np.median(parts.sum(axis=1))) < 1.0
        parts = parts * 1000 if in_ms else parts
        if len(at) == 1:
            at, parts = np.array([0.0, at[0]]), np.repeat(parts, 2, axis=0)
        areas = [
            ChartSeries(COMPONENT_LABELS.get(part, part), at, parts[:, index], part.replace("_", "-"), "area")
            for index, part in enumerate(STEP_COMPONENTS)
            if parts[:, index].any()
        ]
        y_range = linear_range([parts.sum(axis=1)], from_zero=True, robust=True)
        return Chart("Time of a step by part", areas, self.x_range, y_range, marks, "ms" if in_ms else "s")


def _restart_marks(history: RunHistory) -> list[ChartMark]:
    marks = [
        ChartMark("repeated", first - 0.5, f"steps {first} to {last} were repeated", x_end=last + 0.5)
        for first, last in history.wasted_ranges
    ]
    marks += [
        ChartMark("restart", attempt.start_step, f"attempt {attempt.number} resumed at step {attempt.start_step}")
        for attempt in history.attempts[1:]
    ]
    return marks[:_MAX_MARKS]


def _checkpoint_marks(history: RunHistory) -> list[ChartMark]:
    events = history.of(CheckpointSaved)
    events = events[:: max(1, -(-len(events) // _MAX_MARKS))]
    return [
        ChartMark(
            "checkpoint", event.step, f"step {event.step}: checkpoint, {formatting.format_bytes(event.size_bytes)}"
        )
        for event in events
    ]
