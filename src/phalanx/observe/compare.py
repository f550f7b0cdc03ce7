"""Runs side by side: where their recipes differ, and what came of it; as text, as JSON, as a page with both losses."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from phalanx.errors import UsageError
from phalanx.observe import units
from phalanx.observe.figures import WIDE, figure, wants_log
from phalanx.observe.history import PARTS, History, number, read_history
from phalanx.observe.html import document
from phalanx.observe.metrics import smooth
from phalanx.observe.report import PART_NAMES
from phalanx.observe.summary import Summary, summary_of
from phalanx.observe.svg import Line, line_plot
from phalanx.observe.what import flat, read_recipe
from phalanx.run import Run

_COLOURS = 6
_WIDEST = 30

Row = tuple[str, list[str]]


@dataclass(frozen=True)
class Comparison:
    """Two runs or more. `differing` holds the recipe's dotted keys that are not the same everywhere, one value a run
    (None where a run has no such key)."""

    names: list[str]
    summaries: list[Summary]
    histories: list[History]
    differing: dict[str, list[Any]]

    @property
    def same_digest(self) -> bool | None:
        """Whether all runs ended in the same weights; None when not every run has a digest."""
        digests = {summary.digest for summary in self.summaries}
        return None if None in digests else len(digests) == 1

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "runs": [summary.to_json() for summary in self.summaries],
            "differing": self.differing,
            "same_digest": self.same_digest,
        }


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Read the runs. UsageError for fewer than two, or where there is no run."""
    if len(runs) < 2:
        raise UsageError("compare needs at least two runs: phalanx compare RUN RUN ...")
    runs = [Run.existing(run.path) for run in runs]
    histories = [read_history(run.events) for run in runs]
    recipes = [flat(read_recipe(run)) for run in runs]
    keys = sorted({key for recipe in recipes for key in recipe})
    columns = {key: [recipe.get(key) for recipe in recipes] for key in keys}
    return Comparison(
        names=short_names([str(run.path) for run in runs]),
        summaries=[summary_of(run, history) for run, history in zip(runs, histories, strict=True)],
        histories=histories,
        differing={key: values for key, values in columns.items() if any(value != values[0] for value in values)},
    )


def short_names(paths: Sequence[str]) -> list[str]:
    """The shortest tails of paths that tell them apart: [runs/a, runs/b] -> [a, b]; equal paths stay equal."""
    split = [os.path.normpath(path).split(os.sep) for path in paths]
    for length in range(1, max(map(len, split)) + 1):
        tails = [os.sep.join(parts[-length:]) for parts in split]
        if len(set(tails)) == len({tuple(parts) for parts in split}):
            return tails
    return list(paths)


def result_rows(comparison: Comparison) -> list[Row]:
    """What came of the runs: one row a measure, one column a run."""
    all_ = comparison.summaries
    base = all_[0].speed.median

    def speed(summary: Summary) -> str:
        median = summary.speed.median
        times = f" ({median / base:.2f}x)" if median and base and summary is not all_[0] else ""
        return units.rate(median, summary.speed.unit) + times

    def held_out(summary: Summary) -> str:
        loss = summary.loss
        step = f" at {loss.held_out_best_step}" if loss.held_out_best_step is not None else ""
        return units.loss(loss.held_out_best) + step

    measures: list[tuple[str, Callable[[Summary], str]]] = [
        ("status", lambda s: s.status),
        ("steps", lambda s: str(s.last_step)),
        ("final loss", lambda s: units.loss(s.loss.last)),
        ("mean of last steps", lambda s: units.loss(s.loss.end)),
        ("best validation loss", held_out),
        ("last validation loss", lambda s: units.loss(s.loss.held_out_last)),
        ("speed", speed),
        ("step", lambda s: units.duration(s.speed.step_median)),
        *((_part_name(part), _part_share(part)) for part in PARTS if any(_has(s, part) for s in all_)),
        ("MFU (measured peak)", lambda s: units.percent(s.speed.mfu_measured)),
        ("MFU (data-sheet peak)", lambda s: units.percent(s.speed.mfu_data_sheet)),
        ("wall time", lambda s: units.duration(s.durations.wall) if s.durations.wall else units.UNKNOWN),
        ("restarts", lambda s: str(s.restarts)),
        ("guards", lambda s: str(sum(s.guards.values()))),
        ("digest", lambda s: s.digest[:16] if s.digest else "none"),
    ]
    return [(label, [value(summary) for summary in all_]) for label, value in measures]


def _has(summary: Summary, part: str) -> bool:
    return bool(summary.split and summary.split[part] > 0)


def _part_name(part: str) -> str:
    return f"  {PART_NAMES.get(part, part)}"


def _part_share(part: str) -> Callable[[Summary], str]:
    return lambda summary: units.percent(shares[part] if (shares := summary.split_shares) else None)


def differing_rows(comparison: Comparison) -> list[Row]:
    """The recipe's keys that differ, as text."""
    return [
        (key, ["-" if value is None else _value(value) for value in values])
        for key, values in comparison.differing.items()
    ]


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def digest_line(comparison: Comparison) -> str:
    """Whether the runs are the same run."""
    same = comparison.same_digest
    if same is None:
        return "Digests: not every run has one, so whether the weights are equal is not known."
    return "Digests are equal: the same weights, bit by bit." if same else "Digests differ: not the same weights."


def compare_text(comparison: Comparison) -> str:
    """Both tables in columns, ending in a newline."""
    differing, results = differing_rows(comparison), result_rows(comparison)
    names = [_cut(name) for name in comparison.names]
    left = max(len(label) for label, _ in [*differing, *results]) + 2
    widths = [
        max(len(names[index]), *(len(_cut(values[index])) for _, values in [*differing, *results]))
        for index in range(len(names))
    ]

    def row(label: str, values: Sequence[str]) -> str:
        cells = "  ".join(f"{_cut(value):<{width}}" for value, width in zip(values, widths, strict=True))
        return f"  {label:<{left}}{cells}".rstrip()

    lines = [row("", names)]
    lines += (
        ["Recipe keys that differ", *(row(*each) for each in differing)] if differing else ["The recipes are the same"]
    )
    lines += ["", "Results", *(row(*each) for each in results), "", digest_line(comparison)]
    lines += [f"lost: {text}" for summary in comparison.summaries for text in summary.lost]
    return "\n".join(lines) + "\n"


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST // 2 - 2]}...{text[-(_WIDEST // 2 - 1) :]}"


def compare_html(comparison: Comparison) -> str:
    """One self-contained page: the losses over each other, and both tables."""
    body = f"""
<header><h1>{escape(" and ".join(comparison.names) if len(comparison.names) == 2 else "Runs compared")}</h1></header>
<p class="sub">{escape(digest_line(comparison))}</p>
{"".join(f'<p class="note">lost: {escape(text)}</p>' for summary in comparison.summaries for text in summary.lost)}
<h2>Loss</h2>
<div class="plots">{_figures(comparison)}</div>
<h2>Results</h2>
{_html_table(comparison, result_rows(comparison))}
<h2>Recipe keys that differ</h2>
{_html_table(comparison, differing_rows(comparison)) if comparison.differing else '<p class="note">None.</p>'}"""
    return document("Phalanx: runs compared", body, f"Phalanx comparison of {', '.join(comparison.names)}")


def _html_table(comparison: Comparison, rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in comparison.names)
    body = "".join(
        f"<tr><th>{escape(label)}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for label, values in rows
    )
    return f'<div class="scroll"><table class="side"><thead><tr><th></th>{head}</tr></thead>{body}</table></div>'


def _figures(comparison: Comparison) -> str:
    training, held_out, keys = [], [], []
    for index, (name, history) in enumerate(zip(comparison.names, comparison.histories, strict=True)):
        colour = f"c-{index % _COLOURS}"
        steps = history.steps
        if len(steps):
            if len(steps) >= 20:
                training.append(Line("", steps.step, steps.loss, f"{colour} raw"))
            training.append(Line(name, steps.step, smooth(steps.loss) if len(steps) >= 20 else steps.loss, colour))
        if history.evals:
            at = np.array([float(event.step) for event in history.evals])
            losses = np.array([number(event.loss) for event in history.evals])
            held_out.append(Line(name, at, losses, colour, dots=True))
        keys.append((name, f'<i class="stroke {colour}"></i>'))
    figures = []
    for title, lines in (("Training loss", training), ("Held-out loss", held_out)):
        if lines and any(np.isfinite(line.y).any() for line in lines):
            span = (0.0, max(1.0, *(float(line.x[-1]) for line in lines)))
            log = any(wants_log(line.y) for line in lines)
            plot = line_plot(title, lines, span=span, width=WIDE[0], height=WIDE[1], log=log)
            figures.append(figure(f"{title}{', log scale' if log else ''}", plot, keys, wide=True))
    return "".join(figures) or '<p class="note">No run has finished a step.</p>'
