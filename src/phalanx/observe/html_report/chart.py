"""A chart as a value, with the pure functions that turn it into JSON for `charts.js` and into HTML."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Literal

import numpy as np

from phalanx import formatting
from phalanx.observe.history import Floats

MAX_POINTS_PER_SERIES = 1000
"""Most points of one series: more than a screen can show, few enough for a small file."""

SeriesStyle = Literal["line", "faint", "dots", "area"]
MarkKind = Literal["best", "restart", "repeated", "nonfinite", "checkpoint"]

MARK_LABELS: dict[MarkKind, str] = {
    "best": "best",
    "restart": "restart",
    "repeated": "repeated steps",
    "nonfinite": "non-finite",
    "checkpoint": "checkpoint",
}


@dataclass(frozen=True)
class ChartSeries:
    """Values over steps. Values that are not finite break the line. A series without a label has no legend. `color` is
    a custom property of page.css; `area` series of a chart are stacked, the first at the bottom."""

    label: str
    x: Floats
    y: Floats
    color: str
    style: SeriesStyle = "line"


@dataclass(frozen=True)
class ChartMark:
    """An event at step `x`, or over the steps up to `x_end`; at the value `y`, where it has one."""

    kind: MarkKind
    x: float
    label: str
    x_end: float | None = None
    y: float | None = None


@dataclass(frozen=True)
class Chart:
    """What one chart shows. `x_range` and `y_range` are the ends of its axes; `x_label`: what x counts."""

    title: str
    series: Sequence[ChartSeries]
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    marks: Sequence[ChartMark] = ()
    unit: str = ""
    log: bool = False
    wide: bool = False
    x_label: str = "step"

    @property
    def full_title(self) -> str:
        """The title with the unit and the kind of axis."""
        return ", ".join(part for part in (self.title, self.unit, "log scale" if self.log else "") if part)

    def to_json(self) -> dict[str, object]:
        """What `charts.js` draws. Values have five significant digits; null stands for not finite."""
        return {
            "title": self.title,
            "unit": self.unit,
            "log": self.log,
            "xLabel": self.x_label,
            "xRange": self.x_range,
            "yRange": self.y_range,
            "series": [_series_to_json(series) for series in self.series],
            "marks": [
                {"kind": mark.kind, "x": mark.x, "label": mark.label, "xEnd": mark.x_end, "y": mark.y}
                for mark in self.marks
            ],
            "markLabels": {kind: label for kind, label in MARK_LABELS.items() if kind in self._mark_counts()},
        }

    def describe(self) -> str:
        """Summarize the chart in a sentence, for screen readers."""
        parts = [
            f"{series.label}: from {row[0]} to {row[3]}, lowest {row[1]}, highest {row[2]}"
            for series in self.series
            if series.label and (row := _summarize_series(series))
        ]
        parts += [f"{MARK_LABELS[kind]}: {number}" for kind, number in self._mark_counts().items()]
        return f"{self.full_title}. {'; '.join(parts)}."

    def _mark_counts(self) -> Counter[MarkKind]:
        return Counter(mark.kind for mark in self.marks)


def render_chart(chart: Chart) -> str:
    """Render a figure: its title, a table of what it shows, and the JSON from which `charts.js` draws it."""
    size = ' class="chart wide"' if chart.wide else ' class="chart"'
    return (
        f"<figure{size}><figcaption><h3>{escape(chart.full_title)}</h3></figcaption>"
        f'<div class="canvas" role="img" aria-label="{escape(chart.describe())}"></div>'
        f'<details><summary>Values</summary><div class="scroll"><table class="side"><thead><tr><th></th><th>first</th>'
        f"<th>lowest</th><th>highest</th><th>last</th></tr></thead><tbody>{render_chart_rows(chart)}</tbody></table>"
        f'</div></details><script type="application/json">{encode_json(chart.to_json())}</script></figure>'
    )


def render_chart_rows(chart: Chart) -> str:
    """First, lowest, highest and last value of each series, as rows of a table."""
    return "".join(
        f"<tr><th>{escape(series.label)}</th>{''.join(f'<td>{value}</td>' for value in row)}</tr>"
        for series in chart.series
        if series.label and (row := _summarize_series(series))
    )


def encode_json(value: object) -> str:
    """Encode JSON that cannot end the script element in which it stands."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _series_to_json(series: ChartSeries) -> dict[str, object]:
    x, y = downsample(series.x, series.y)
    return {
        "label": series.label,
        "color": series.color,
        "style": series.style,
        "x": [int(value) if value == int(value) else value for value in x.tolist()],
        "y": [float(f"{value:.5g}") if math.isfinite(value) else None for value in y.tolist()],
    }


def _summarize_series(series: ChartSeries) -> tuple[str, str, str, str] | None:
    """First, lowest, highest and last finite value; None without one."""
    values = series.y[np.isfinite(series.y)]
    if not len(values):
        return None
    first, low, high, last = (
        formatting.format_significant(float(value), 4) for value in (values[0], values.min(), values.max(), values[-1])
    )
    return first, low, high, last


def downsample(x: Floats, y: Floats, limit: int = MAX_POINTS_PER_SERIES) -> tuple[Floats, Floats]:
    """At most `limit` points that keep every peak: of each bucket its lowest and its highest, in order. A bucket with
    a value that is not finite keeps one such value, so that gaps stay visible."""
    n = len(x)
    if n <= limit:
        return x, y
    buckets = limit // 3
    edges = np.linspace(0, n, buckets + 1).astype(int)
    keep: list[int] = []
    for lo, hi in pairwise(edges.tolist()):
        part = y[lo:hi]
        finite = np.isfinite(part)
        if not finite.any():
            keep.append(lo)
            continue
        chosen = {int(np.nanargmin(np.where(finite, part, np.nan))), int(np.nanargmax(np.where(finite, part, np.nan)))}
        if not finite.all():
            chosen.add(int(np.argmin(finite)))
        keep += [lo + index for index in sorted(chosen)]
    return x[keep], y[keep]


def needs_log_scale(values: Floats) -> bool:
    """Whether a linear axis would hide most of a positive series."""
    values = values[np.isfinite(values)]
    return bool(len(values) and values.min() > 0 and values.max() > 20 * np.median(values))


def log_range(series: Sequence[Floats]) -> tuple[float, float]:
    """Lowest and highest positive value to show on a logarithmic axis."""
    positive = np.concatenate([values[np.isfinite(values) & (values > 0)] for values in series])
    return float(positive.min()) / 1.1, float(positive.max()) * 1.1


def linear_range(series: Sequence[Floats], from_zero: bool = False, robust: bool = False) -> tuple[float, float]:
    """Lowest and highest value to show, with a little air. `robust` ignores the outermost percent when it would squeeze
    the rest into less than half of the picture; `from_zero` starts at 0."""
    values = np.concatenate([line[np.isfinite(line)] for line in series] or [np.array([])])
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    if robust and len(values) >= 20:
        inner = np.quantile(values, [0.01, 0.99])
        if (inner[1] - (0.0 if from_zero else inner[0])) < 0.6 * (high - (0.0 if from_zero else low)):
            low, high = float(inner[0]), float(inner[1])
            margin = 0.15 * (high if from_zero else high - low)
            low, high = low - margin, high + margin
    if from_zero:
        low = min(0.0, low) if values.min() < 0 else 0.0
    if not high > low:
        margin = abs(high) * 0.1 or 1.0
        return (low if from_zero else low - margin), high + margin
    margin = 0.04 * (high - low)
    return (low if from_zero else low - margin), high + margin
