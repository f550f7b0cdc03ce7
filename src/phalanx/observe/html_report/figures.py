"""Which plots a run's page has: what is drawn in each, from History to figures in HTML. How to draw is in `svg.py`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from phalanx import formatting
from phalanx.observe.history import STEP_COMPONENTS, Floats, RunHistory, as_float
from phalanx.observe.html_report.svg import PlotFrame, PlotLine, PlotMark, render_line_plot, render_stacked_plot
from phalanx.observe.metrics import breakdown_over_time, smooth_series
from phalanx.observe.summary import RunSummary
from phalanx.observe.text_report import COMPONENT_LABELS
from phalanx.run.event_types import CheckpointSaved, NonFiniteStep

WIDE_PLOT_SIZE, HALF_PLOT_SIZE = (964, 320), (468, 220)
_MAX_MARKS = 80

LegendEntry = tuple[str, str]


def render_run_figures(summary: RunSummary, history: RunHistory) -> str:
    """All figures of one run; an empty text when it has no step to show."""
    steps = history.steps
    if not len(steps):
        return ""
    span = (0.0, float(max(1.0, steps.step[-1])))
    attempt_marks = _restart_marks(history)
    figures = [_render_loss(summary, history, span, attempt_marks)]
    if np.isfinite(steps.lr).any():
        line = PlotLine("learning rate", steps.step, steps.lr, "train")
        plot = render_line_plot(PlotFrame("Learning rate", span, HALF_PLOT_SIZE), [line], attempt_marks, from_zero=True)
        figures.append(render_figure("Learning rate", plot))
    if np.isfinite(steps.grad_norm).any():
        log = needs_log_scale(steps.grad_norm)
        plot = render_line_plot(
            PlotFrame("Gradient norm", span, HALF_PLOT_SIZE),
            _lines_with_mean("gradient norm", steps.step, steps.grad_norm),
            [*attempt_marks, *_nonfinite_step_marks(history)],
            log=log,
            robust=True,
            from_zero=True,
        )
        figures.append(render_figure(f"Gradient norm{', log scale' if log else ''}", plot))
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = np.where(steps.step_s > 0, steps.tokens / steps.step_s, np.nan)
    if np.isfinite(speed).any():
        unit = f"{summary.speed.unit}/s"
        lines = _lines_with_mean("speed", steps.step, speed)
        plot = render_line_plot(
            PlotFrame("Speed", span, HALF_PLOT_SIZE, unit), lines, attempt_marks, from_zero=True, robust=True
        )
        figures.append(render_figure(f"Speed, {unit}", plot))
        figures.append(_render_time_breakdown(history, span, attempt_marks))
    return "".join(figures)


def render_figure(title: str, plot: str, legend_entries: Sequence[LegendEntry] = (), is_wide: bool = False) -> str:
    """A plot with its title and legend; a key is (label, HTML of its sign)."""
    legend = "".join(f"<span>{sign}{escape(label)}</span>" for label, sign in legend_entries)
    legend = f'<span class="keys">{legend}</span>' if legend_entries else ""
    size = ' class="wide"' if is_wide else ""
    return f"<figure{size}><figcaption><h3>{escape(title)}</h3>{legend}</figcaption>{plot}</figure>"


def render_line_sign(colour: str) -> str:
    """The sign of a line in a legend."""
    return f'<i class="stroke" style="color:var(--{colour})"></i>'


def needs_log_scale(values: Floats) -> bool:
    """Whether a linear axis would hide most of a positive series."""
    values = values[np.isfinite(values)]
    return bool(len(values)) and values.min() > 0 and values.max() > 20 * np.median(values)


def _lines_with_mean(label: str, x: Floats, y: Floats) -> list[PlotLine]:
    """The values themselves, faintly, and their running mean."""
    if np.isfinite(y).sum() < 20:
        return [PlotLine(label, x, y, "train", has_dots=True)]
    return [PlotLine("", x, y, "train raw"), PlotLine(label, x, smooth_series(y), "train")]


def _render_loss(
    summary: RunSummary, history: RunHistory, span: tuple[float, float], attempt_marks: Sequence[PlotMark]
) -> str:
    steps = history.steps
    lines = _lines_with_mean("training", steps.step, steps.loss)
    keys = [("training, running mean over single steps" if len(lines) > 1 else "training", render_line_sign("train"))]
    if history.evaluations:
        eval_steps = np.array([float(event.step) for event in history.evaluations])
        lines.append(
            PlotLine(
                "validation",
                eval_steps,
                np.array([as_float(event.loss) for event in history.evaluations]),
                "held",
                True,
            )
        )
        keys.append(("validation", render_line_sign("held")))
    log = needs_log_scale(steps.loss)
    marks = [
        *attempt_marks,
        *_nonfinite_step_marks(history),
        *_nonfinite_loss_marks(history),
        *_checkpoint_marks(history),
    ]
    best, step = summary.loss.validation_best, summary.loss.validation_best_step
    if best is not None and step is not None:
        marks.append(
            PlotMark("best", step, f"best validation loss {formatting.format_loss(best)} at step {step}", y=best)
        )
    signs = {mark.kind for mark in marks}
    keys += [(label, sign) for kind, label, sign in _LEGEND_SIGNS if kind in signs]
    plot = render_line_plot(PlotFrame("Loss", span, WIDE_PLOT_SIZE), lines, marks, log=log)
    return render_figure(f"Loss{', log scale' if log else ''}", plot, keys, is_wide=True)


def _render_sign(shape: str) -> str:
    return f'<svg width="13" height="10" viewBox="0 0 13 10" aria-hidden="true">{shape}</svg> '


_LEGEND_SIGNS = (
    ("best", "best", _render_sign('<circle class="best" cx="6" cy="5" r="4"/>')),
    ("restart", "restart", _render_sign('<path class="restart" d="M6,-1V11"/>')),
    ("redone", "done again", _render_sign('<rect class="redone" width="12" height="10"/>')),
    ("guard", "guard: not finite", _render_sign('<path class="guard" d="M2,1h8l-4,8z"/>')),
    ("checkpoint", "checkpoint", _render_sign('<path class="checkpoint" d="M6,2l-4,7h8z"/>')),
)


def _render_time_breakdown(history: RunHistory, span: tuple[float, float], attempt_marks: Sequence[PlotMark]) -> str:
    at, parts = breakdown_over_time(history.steps)
    milli = float(np.median(parts.sum(axis=1))) < 1.0
    parts = parts * 1000 if milli else parts
    layers = [
        (COMPONENT_LABELS.get(part, part), f"p-{part}", parts[:, index])
        for index, part in enumerate(STEP_COMPONENTS)
        if parts[:, index].any()
    ]
    unit = "ms" if milli else "s"
    if len(at) == 1:
        at, layers = np.array([0.0, at[0]]), [(label, css, np.repeat(height, 2)) for label, css, height in layers]
    frame = PlotFrame("Time of a step by part", span, HALF_PLOT_SIZE, unit)
    plot = render_stacked_plot(frame, at, layers, attempt_marks)
    return render_figure(f"Time of a step by part, {unit}", plot)


def _restart_marks(history: RunHistory) -> list[PlotMark]:
    marks = [
        PlotMark("redone", first - 0.5, f"steps {first} to {last} were repeated", x_end=last + 0.5)
        for first, last in history.wasted_ranges
    ]
    marks += [
        PlotMark("restart", attempt.start_step, f"attempt {attempt.number} resumed at step {attempt.start_step}")
        for attempt in history.attempts[1:]
    ]
    return marks[:_MAX_MARKS]


def _nonfinite_step_marks(history: RunHistory) -> list[PlotMark]:
    return [
        PlotMark("guard", event.step, f"step {event.step}: {event.reason}, {event.action}")
        for event in history.of(NonFiniteStep)[:_MAX_MARKS]
    ]


def _nonfinite_loss_marks(history: RunHistory) -> list[PlotMark]:
    steps = history.steps
    reported_steps = {event.step for event in history.of(NonFiniteStep)}
    nonfinite_steps = np.array([step for step in steps.step[~np.isfinite(steps.loss)] if step not in reported_steps])
    stretches = (
        np.split(nonfinite_steps, np.flatnonzero(np.diff(nonfinite_steps) > 1) + 1) if len(nonfinite_steps) else []
    )
    return [
        PlotMark("guard", float(stretch.mean()), f"{_format_step_range(stretch)}: the loss is not finite")
        for stretch in stretches[:_MAX_MARKS]
    ]


def _format_step_range(stretch: Floats) -> str:
    first, last = int(stretch[0]), int(stretch[-1])
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _checkpoint_marks(history: RunHistory) -> list[PlotMark]:
    events = history.of(CheckpointSaved)
    events = events[:: max(1, -(-len(events) // _MAX_MARKS))]
    return [
        PlotMark(
            "checkpoint", event.step, f"step {event.step}: checkpoint, {formatting.format_bytes(event.size_bytes)}"
        )
        for event in events
    ]
