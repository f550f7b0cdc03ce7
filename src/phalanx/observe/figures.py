"""Which plots a run's page has: what is drawn in each, from History to figures in HTML. How to draw is in `svg.py`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from phalanx.observe import units
from phalanx.observe.history import PARTS, Floats, History, number
from phalanx.observe.metrics import smooth, split_course
from phalanx.observe.report import PART_NAMES
from phalanx.observe.summary import Summary
from phalanx.observe.svg import Line, Mark, line_plot, stacked_plot
from phalanx.run.event_types import CheckpointSaved, NonFiniteStep

WIDE, HALF = (964, 320), (468, 220)
_MOST_MARKS = 80

Key = tuple[str, str]


def run_figures(summary: Summary, history: History) -> str:
    """All figures of one run; an empty text when it has no step to show."""
    steps = history.steps
    if not len(steps):
        return ""
    span = (0.0, float(max(1.0, steps.step[-1])))
    lives = _restarts(history)
    figures = [_loss(summary, history, span, lives)]
    if np.isfinite(steps.lr).any():
        line = Line("learning rate", steps.step, steps.lr, "train")
        plot = line_plot("Learning rate", [line], lives, span=span, width=HALF[0], height=HALF[1], zero=True)
        figures.append(figure("Learning rate", plot))
    if np.isfinite(steps.grad_norm).any():
        log = wants_log(steps.grad_norm)
        plot = line_plot(
            "Gradient norm", _noisy("gradient norm", steps.step, steps.grad_norm), [*lives, *_guards(history)],
            span=span, width=HALF[0], height=HALF[1], log=log, robust=True, zero=True,
        )  # fmt: skip
        figures.append(figure(f"Gradient norm{', log scale' if log else ''}", plot))
    with np.errstate(divide="ignore", invalid="ignore"):
        pace = np.where(steps.seconds > 0, steps.tokens / steps.seconds, np.nan)
    if np.isfinite(pace).any():
        unit = f"{summary.speed.unit}/s"
        lines = _noisy("speed", steps.step, pace)
        plot = line_plot(
            "Speed", lines, lives, span=span, width=HALF[0], height=HALF[1], zero=True, robust=True, unit=unit
        )
        figures.append(figure(f"Speed, {unit}", plot))
        figures.append(_split(history, span, lives))
    return "".join(figures)


def figure(title: str, plot: str, keys: Sequence[Key] = (), wide: bool = False) -> str:
    """A plot with its title and legend; a key is (label, HTML of its sign)."""
    legend = "".join(f"<span>{sign}{escape(label)}</span>" for label, sign in keys)
    legend = f'<span class="keys">{legend}</span>' if keys else ""
    size = ' class="wide"' if wide else ""
    return f"<figure{size}><figcaption><h3>{escape(title)}</h3>{legend}</figcaption>{plot}</figure>"


def stroke(colour: str) -> str:
    """The sign of a line in a legend."""
    return f'<i class="stroke" style="color:var(--{colour})"></i>'


def wants_log(values: Floats) -> bool:
    """Whether a linear axis would hide most of a positive series."""
    values = values[np.isfinite(values)]
    return bool(len(values)) and values.min() > 0 and values.max() > 20 * np.median(values)


def _noisy(label: str, x: Floats, y: Floats) -> list[Line]:
    """The values themselves, faintly, and their running mean."""
    if np.isfinite(y).sum() < 20:
        return [Line(label, x, y, "train", dots=True)]
    return [Line("", x, y, "train raw"), Line(label, x, smooth(y), "train")]


def _loss(summary: Summary, history: History, span: tuple[float, float], lives: Sequence[Mark]) -> str:
    steps = history.steps
    lines = _noisy("training", steps.step, steps.loss)
    keys = [("training, running mean over single steps" if len(lines) > 1 else "training", stroke("train"))]
    if history.evals:
        at = np.array([float(event.step) for event in history.evals])
        lines.append(Line("validation", at, np.array([number(event.loss) for event in history.evals]), "held", True))
        keys.append(("validation", stroke("held")))
    log = wants_log(steps.loss)
    marks = [*lives, *_guards(history), *_not_finite(history), *_checkpoints(history)]
    best, step = summary.loss.held_out_best, summary.loss.held_out_best_step
    if best is not None and step is not None:
        marks.append(Mark("best", step, f"best validation loss {units.loss(best)} at step {step}", y=best))
    signs = {mark.kind for mark in marks}
    keys += [(label, sign) for kind, label, sign in _SIGNS if kind in signs]
    plot = line_plot("Loss", lines, marks, span=span, width=WIDE[0], height=WIDE[1], log=log)
    return figure(f"Loss{', log scale' if log else ''}", plot, keys, wide=True)


def _sign(shape: str) -> str:
    return f'<svg width="13" height="10" viewBox="0 0 13 10" aria-hidden="true">{shape}</svg> '


_SIGNS = (
    ("best", "best", _sign('<circle class="best" cx="6" cy="5" r="4"/>')),
    ("restart", "restart", _sign('<path class="restart" d="M6,-1V11"/>')),
    ("redone", "done again", _sign('<rect class="redone" width="12" height="10"/>')),
    ("guard", "guard: not finite", _sign('<path class="guard" d="M2,1h8l-4,8z"/>')),
    ("checkpoint", "checkpoint", _sign('<path class="checkpoint" d="M6,2l-4,7h8z"/>')),
)


def _split(history: History, span: tuple[float, float], lives: Sequence[Mark]) -> str:
    at, parts = split_course(history.steps)
    milli = float(np.median(parts.sum(axis=1))) < 1.0
    parts = parts * 1000 if milli else parts
    layers = [
        (PART_NAMES.get(part, part), f"p-{part}", parts[:, index])
        for index, part in enumerate(PARTS)
        if parts[:, index].any()
    ]
    unit = "ms" if milli else "s"
    if len(at) == 1:
        at, layers = np.array([0.0, at[0]]), [(label, css, np.repeat(height, 2)) for label, css, height in layers]
    plot = stacked_plot(
        "Time of a step by part", at, layers, lives, span=span, width=HALF[0], height=HALF[1], unit=unit
    )
    return figure(f"Time of a step by part, {unit}", plot)


def _restarts(history: History) -> list[Mark]:
    marks = [
        Mark("redone", first - 0.5, f"steps {first} to {last} were done again", to=last + 0.5)
        for first, last in history.redone
    ]
    marks += [
        Mark("restart", life.from_step, f"attempt {life.number} went on from step {life.from_step}")
        for life in history.attempts[1:]
    ]
    return marks[:_MOST_MARKS]


def _guards(history: History) -> list[Mark]:
    return [
        Mark("guard", event.step, f"step {event.step}: {event.reason}, {event.action}")
        for event in history.of(NonFiniteStep)[:_MOST_MARKS]
    ]


def _not_finite(history: History) -> list[Mark]:
    steps = history.steps
    guarded = {event.step for event in history.of(NonFiniteStep)}
    bad = np.array([step for step in steps.step[~np.isfinite(steps.loss)] if step not in guarded])
    stretches = np.split(bad, np.flatnonzero(np.diff(bad) > 1) + 1) if len(bad) else []
    return [
        Mark("guard", float(stretch.mean()), f"{_steps(stretch)}: the loss is not finite")
        for stretch in stretches[:_MOST_MARKS]
    ]


def _steps(stretch: Floats) -> str:
    first, last = int(stretch[0]), int(stretch[-1])
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _checkpoints(history: History) -> list[Mark]:
    saves = history.of(CheckpointSaved)
    saves = saves[:: max(1, -(-len(saves) // _MOST_MARKS))]
    return [
        Mark("checkpoint", event.step, f"step {event.step}: checkpoint, {units.size(event.size_bytes)}")
        for event in saves
    ]
