"""Runs side by side: where their recipes differ, and what came of it; as text, as JSON, as a page with both losses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import PurePath
from typing import Any

import numpy as np

from phalanx import formatting
from phalanx.errors import UsageError
from phalanx.observe.history import STEP_COMPONENTS, RunHistory, read_history
from phalanx.observe.html_report import chart
from phalanx.observe.html_report.document import render_document
from phalanx.observe.html_report.run_charts import MIN_STEPS_TO_SMOOTH, validation_series
from phalanx.observe.metrics import smooth_series
from phalanx.observe.run_info import flatten_keys, read_resolved_recipe
from phalanx.observe.summary import RunSummary, build_summary
from phalanx.observe.text_report import COMPONENT_LABELS
from phalanx.run import Run
from phalanx.text_table import Column, format_table

_RUN_COLORS = ("train", "validation", "optimizer", "checkpoint-stall", "grad-sync", "other")
_MAX_CELL_CHARS = 30
_UNBROKEN_WIDTH = 10_000

TableRow = tuple[str, list[str]]


@dataclass(frozen=True)
class RunComparison:
    """Two runs or more. `differing_keys` holds the recipe's dotted keys that are not the same everywhere, one value a
    run (None where a run has no such key)."""

    names: list[str]
    summaries: list[RunSummary]
    histories: list[RunHistory]
    differing_keys: dict[str, list[Any]]

    @property
    def digests_equal(self) -> bool | None:
        """Whether all runs ended in the same weights; None when not every run has a digest."""
        digests = {summary.digest for summary in self.summaries}
        return None if None in digests else len(digests) == 1

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "runs": [summary.to_json() for summary in self.summaries],
            "differing": self.differing_keys,
            "same_digest": self.digests_equal,
        }


def compare_runs(runs: Sequence[Run]) -> RunComparison:
    """Read the runs. UsageError for fewer than two, or where there is no run."""
    if len(runs) < 2:
        raise UsageError("compare needs at least two runs: phalanx compare RUN RUN ...")
    runs = [Run.open_existing(run.path) for run in runs]
    histories = [read_history(run.events) for run in runs]
    recipes = [flatten_keys(read_resolved_recipe(run)) for run in runs]
    keys = sorted({key for recipe in recipes for key in recipe})
    columns = {key: [recipe.get(key) for recipe in recipes] for key in keys}
    return RunComparison(
        names=formatting.shorten_paths([run.location for run in runs]),
        summaries=[build_summary(run, history) for run, history in zip(runs, histories, strict=True)],
        histories=histories,
        differing_keys={key: values for key, values in columns.items() if _differ(key, values)},
    )


def _differ(key: str, values: Sequence[Any]) -> bool:
    """Whether values of a key differ. Prepared data counts by the hash in its name, wherever it lies."""
    if key.endswith(".prepared"):
        values = [PurePath(str(value)).name for value in values]
    return any(value != values[0] for value in values)


def build_result_rows(comparison: RunComparison) -> list[TableRow]:
    """What came of the runs: one row a measure, one column a run."""
    summaries = comparison.summaries
    baseline_speed = summaries[0].speed.median_per_s

    def speed(summary: RunSummary) -> str:
        median = summary.speed.median_per_s
        times = (
            f" ({median / baseline_speed:.2f}x)" if median and baseline_speed and summary is not summaries[0] else ""
        )
        return formatting.format_rate(median, summary.speed.unit) + times

    def validation_loss_text(summary: RunSummary) -> str:
        loss = summary.loss
        step = f" at {loss.validation_best_step}" if loss.validation_best_step is not None else ""
        return formatting.format_loss(loss.validation_best) + step

    def share(component: str, summary: RunSummary) -> str:
        return formatting.format_percent((summary.breakdown_shares or {}).get(component))

    measures: list[tuple[str, Callable[[RunSummary], str]]] = [
        ("status", lambda s: s.status),
        ("steps", lambda s: str(s.last_step)),
        ("final loss", lambda s: formatting.format_loss(s.loss.last)),
        ("mean of last steps", lambda s: formatting.format_loss(s.loss.final_mean)),
        ("best validation loss", validation_loss_text),
        ("last validation loss", lambda s: formatting.format_loss(s.loss.validation_last)),
        ("speed", speed),
        ("step", lambda s: formatting.format_duration(s.speed.step_median_s)),
        *(
            (f"  {COMPONENT_LABELS.get(part, part)}", partial(share, part))
            for part in STEP_COMPONENTS
            if any(summary.breakdown_s and summary.breakdown_s[part] > 0 for summary in summaries)
        ),
        ("MFU (measured peak)", lambda s: formatting.format_percent(s.speed.mfu_measured)),
        ("MFU (data-sheet peak)", lambda s: formatting.format_percent(s.speed.mfu_data_sheet)),
        ("wall time", lambda s: formatting.format_duration(s.durations.wall_s or None)),
        ("restarts", lambda s: str(s.num_restarts)),
        ("non-finite steps", lambda s: str(sum(s.nonfinite_actions.values()))),
        ("digest", lambda s: s.digest[:16] if s.digest else "none"),
    ]
    return [(label, [value(summary) for summary in summaries]) for label, value in measures]


def build_differing_rows(comparison: RunComparison) -> list[TableRow]:
    """The recipe's keys that differ, as text."""
    return [(key, list(map(_format_value, values))) for key, values in comparison.differing_keys.items()]


def _format_value(value: Any) -> str:
    if value is None:
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def describe_digests(comparison: RunComparison) -> str:
    """Whether the runs are the same run."""
    digests_equal = comparison.digests_equal
    if digests_equal is None:
        return "Digests: not every run has one, so whether the weights are equal is not known."
    equal, differ = "Digests are equal: the same weights, bit by bit.", "Digests differ: not the same weights."
    return equal if digests_equal else differ


def render_comparison_text(comparison: RunComparison) -> str:
    """Both tables in columns, ending in a newline."""
    differing, results = build_differing_rows(comparison), build_result_rows(comparison)
    rows = [(label, *map(_shorten, values)) for label, values in [*differing, *results]]
    columns = [Column(), *(Column(_shorten(name)) for name in comparison.names)]
    head, *lines = format_table(columns, rows, indent=2, width=_UNBROKEN_WIDTH)
    keys, measures = lines[: len(differing)], lines[len(differing) :]
    lines = [head, *(["Recipe keys that differ", *keys] if differing else ["The recipes are the same"])]
    lines += ["", "Results", *measures, "", describe_digests(comparison)]
    lines += [f"lost: {text}" for summary in comparison.summaries for text in summary.lost]
    return "\n".join(lines) + "\n"


def _shorten(text: str) -> str:
    if len(text) <= _MAX_CELL_CHARS:
        return text
    return f"{text[: _MAX_CELL_CHARS // 2 - 2]}...{text[-(_MAX_CELL_CHARS // 2 - 1) :]}"


def render_comparison_html(comparison: RunComparison) -> str:
    """One self-contained page: the losses over each other, and both tables."""
    body_html, footer = render_comparison_body(comparison), f"Phalanx comparison of {', '.join(comparison.names)}"
    return render_document("Phalanx: runs compared", body_html, footer)


def render_comparison_body(comparison: RunComparison) -> str:
    """That page without its frame."""
    differing_html = '<p class="note">None.</p>'
    if comparison.differing_keys:
        differing_html = render_html_table(comparison, build_differing_rows(comparison))
    return f"""
<header><h1>{escape(" and ".join(comparison.names) if len(comparison.names) == 2 else "Runs compared")}</h1></header>
<p class="sub">{escape(describe_digests(comparison))}</p>
{"".join(f'<p class="note">lost: {escape(text)}</p>' for summary in comparison.summaries for text in summary.lost)}
<h2>Loss</h2>
<div class="plots">{_render_loss_charts(comparison)}</div>
<h2>Results</h2>
{render_html_table(comparison, build_result_rows(comparison))}
<h2>Recipe keys that differ</h2>
{differing_html}"""


def render_html_table(comparison: RunComparison, rows: Sequence[TableRow]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in comparison.names)
    body = "".join(
        f"<tr><th>{escape(label)}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for label, values in rows
    )
    return f'<div class="scroll"><table class="side"><thead><tr><th></th>{head}</tr></thead>{body}</table></div>'


def _render_loss_charts(comparison: RunComparison) -> str:
    training, validation = [], []
    for index, (name, history) in enumerate(zip(comparison.names, comparison.histories, strict=True)):
        color, steps = _RUN_COLORS[index % len(_RUN_COLORS)], history.steps
        if len(steps) >= MIN_STEPS_TO_SMOOTH:
            training.append(chart.ChartSeries("", steps.step, steps.loss, color, "faint"))
            training.append(chart.ChartSeries(name, steps.step, smooth_series(steps.loss), color))
        elif len(steps):
            training.append(chart.ChartSeries(name, steps.step, steps.loss, color))
        if history.evaluations:
            validation.append(validation_series(name, history, color))
    charts = []
    for title, series in (("Training loss", training), ("Validation loss", validation)):
        values = [line.y for line in series]
        if any(np.isfinite(y).any() for y in values):
            log = any(chart.needs_log_scale(y) for y in values)
            x_range = (0.0, max(1.0, *(float(line.x[-1]) for line in series)))
            y_range = chart.log_range(values) if log else chart.linear_range(values)
            charts.append(chart.Chart(title, series, x_range, y_range, log=log, wide=True))
    return "".join(map(chart.render_chart, charts)) or '<p class="note">No run has finished a step.</p>'
