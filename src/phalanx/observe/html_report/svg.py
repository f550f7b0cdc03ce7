"""Plots as inline SVG text: clean axes, nice ticks, few points. Knows curves and marks, not runs; colours are CSS
classes that the page defines, so that one picture serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

from phalanx.observe.history import Floats

MAX_POINTS_PER_LINE = 1000
"""Most points of one line: more than a screen can show, few enough for a small file."""

_LEFT_MARGIN, _RIGHT_MARGIN, _TOP_MARGIN, _BOTTOM_MARGIN = 52.0, 12.0, 12.0, 26.0


@dataclass(frozen=True)
class PlotLine:
    """A curve. Not-finite values break it. `has_dots` marks every point; `label` is empty for lines without a
    legend."""

    label: str
    x: Floats
    y: Floats
    css_class: str
    has_dots: bool = False


@dataclass(frozen=True)
class PlotMark:
    """An event at step `x` (a span up to `x_end`, where given). `kind` is its CSS class and shape: restart, guard,
    checkpoint, best or redone."""

    kind: str
    x: float
    title: str
    x_end: float | None = None
    y: float | None = None


@dataclass(frozen=True)
class PlotFrame:
    """What a plot is drawn in: its title, the steps that it spans, its size in SVG user units, and the unit of y."""

    title: str
    span: tuple[float, float]
    size: tuple[int, int]
    unit: str = ""


def nice_ticks(low: float, high: float, target_count: int = 5) -> list[float]:
    """Round numbers within [low, high] with a spacing of 1, 2 or 5 times a power of ten; at least one."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, target_count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)] or [low]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within [low, high]; with their 2- and 5-folds when there are few; thinned when there are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(decades) <= 3 else (1,)
    ticks = [factor * 10.0**decade for decade in decades for factor in factors]
    ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
    return ticks[:: max(1, math.ceil(len(ticks) / 7))] or [low]


def format_ticks(ticks: Sequence[float]) -> list[str]:
    """Labels of an axis, all in the same format and with just the digits they need: `0.25`, `1.5k`, `2e-4`."""
    largest = max(abs(tick) for tick in ticks)
    if 0 < largest < 0.02:
        return ["0" if tick == 0 else _format_exponent(tick) for tick in ticks]
    size, suffix = next(((s, x) for s, x in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if largest >= 10 * s), (1.0, ""))
    for digits in range(7):
        texts = [f"{tick / size:.{digits}f}" for tick in ticks]
        if all(math.isclose(float(text) * size, tick, rel_tol=1e-6) for text, tick in zip(texts, ticks, strict=True)):
            break
    return ["0" if tick == 0 else text + suffix for text, tick in zip(texts, ticks, strict=True)]


def _format_log_tick(value: float) -> str:
    """A tick of a logarithmic axis."""
    return f"{value:g}" if 1e-3 <= value < 1e5 else _format_exponent(value)


def _format_exponent(value: float) -> str:
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def downsample(x: Floats, y: Floats, limit: int = MAX_POINTS_PER_LINE) -> tuple[Floats, Floats]:
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


def axis_range(series: Sequence[Floats], from_zero: bool, robust: bool) -> tuple[float, float]:
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


class SvgPlot:
    """A plot under construction, with y within `y_range`. The page scales it to its column."""

    def __init__(self, frame: PlotFrame, y_range: tuple[float, float], log: bool = False):
        self.frame = frame
        first, last = frame.span
        self.x0, self.x1 = (first, last) if last > first else (first - 0.5, first + 0.5)
        self.y0, self.y1, self.log = *y_range, log
        self.width, self.height = frame.size
        self.parts: list[str] = []

    def to_px_x(self, x: float) -> float:
        return _LEFT_MARGIN + (x - self.x0) / (self.x1 - self.x0) * (self.width - _LEFT_MARGIN - _RIGHT_MARGIN)

    def to_px_y(self, y: float) -> float:
        if self.log:
            share = math.log(max(y, 1e-300) / self.y0) / math.log(self.y1 / self.y0)
        else:
            share = (y - self.y0) / (self.y1 - self.y0)
        share = min(100.0, max(-100.0, share))  # what lies outside is clipped; a huge coordinate only costs bytes
        return self.height - _BOTTOM_MARGIN - share * (self.height - _TOP_MARGIN - _BOTTOM_MARGIN)

    def draw_axes(self) -> None:
        """Horizontal grid with labels, step labels below."""
        ticks = log_ticks(self.y0, self.y1) if self.log else nice_ticks(self.y0, self.y1, round(self.height / 55))
        right, bottom = self.width - _RIGHT_MARGIN, self.height - _BOTTOM_MARGIN
        texts = [_format_log_tick(tick) for tick in ticks] if self.log else format_ticks(ticks)
        for tick, text in zip(ticks, texts, strict=True):
            y = self.to_px_y(tick)
            self.parts.append(f'<path class="grid" d="M{_LEFT_MARGIN:g},{y:.1f}H{right:g}"/>')
            self.parts.append(f'<text class="y" x="{_LEFT_MARGIN - 8:g}" y="{y + 3.5:.1f}">{text}</text>')
        steps = [tick for tick in nice_ticks(self.x0, self.x1, round(self.width / 110)) if float(tick).is_integer()]
        for tick, text in zip(steps, format_ticks(steps) if steps else [], strict=True):
            anchor = ' style="text-anchor:end"' if self.to_px_x(tick) > right - 12 else ""
            self.parts.append(f'<text class="x" x="{self.to_px_x(tick):.1f}" y="{bottom + 17:g}"{anchor}>{text}</text>')
        self.parts.append(f'<path class="axis" d="M{_LEFT_MARGIN:g},{bottom:g}H{right:g}"/>')

    def draw_line(self, line: PlotLine) -> None:
        """Draw a curve, in pieces where it is not finite."""
        x, y = downsample(line.x, line.y)
        data, pen = [], "M"
        for here, value in zip(x.tolist(), y.tolist(), strict=True):
            if not math.isfinite(value):
                pen = "M"
                continue
            data.append(f"{pen}{self.to_px_x(here):.1f},{self.to_px_y(value):.2f}")
            pen = "L"
        if not data:
            return
        name = f' data-label="{escape(line.label)}"' if line.label else ""
        self.add_clipped(f'<path class="line {line.css_class}"{name} d="{"".join(data)}"/>')
        finite = np.isfinite(y)
        if (line.has_dots and finite.sum() <= 60) or finite.sum() == 1:
            for here, value in zip(x[finite].tolist(), y[finite].tolist(), strict=True):
                at = f'cx="{self.to_px_x(here):.1f}" cy="{self.to_px_y(value):.2f}"'
                self.parts.append(f'<circle class="dot {line.css_class}" {at} r="2.6"/>')

    def draw_layers(self, x: Floats, layers: Sequence[tuple[str, str, Floats]]) -> None:
        """Layers (label, css, height) on top of one another."""
        below = np.zeros(len(x))
        for label, css, height in layers:
            above = below + height
            edge = "L".join([*self.path_points(x, above), *self.path_points(x[::-1], below[::-1])])
            self.add_clipped(f'<path class="layer {css}" data-label="{escape(label)}" d="M{edge}Z"/>')
            below = above

    def path_points(self, x: Floats, y: Floats) -> list[str]:
        """Coordinates as path data."""
        return [
            f"{self.to_px_x(here):.1f},{self.to_px_y(value):.2f}"
            for here, value in zip(x.tolist(), y.tolist(), strict=True)
        ]

    def add_clipped(self, part: str) -> None:
        """Add a part of which only what lies within the axes shows."""
        wide, high = self.width - _LEFT_MARGIN - _RIGHT_MARGIN, self.height - _TOP_MARGIN - _BOTTOM_MARGIN
        box = f"{_LEFT_MARGIN:g} {_TOP_MARGIN:g} {wide:g} {high:g}"
        at = f'x="{_LEFT_MARGIN:g}" y="{_TOP_MARGIN:g}" width="{wide:g}" height="{high:g}"'
        self.parts.append(f'<svg {at} viewBox="{box}">{part}</svg>')

    def draw_mark(self, mark: PlotMark) -> None:
        """Draw an event: restarts and redone spans behind the curve's whole height, the others as small signs."""
        x, top, bottom = self.to_px_x(mark.x), _TOP_MARGIN, self.height - _BOTTOM_MARGIN
        title = f"<title>{escape(mark.title)}</title>"
        if mark.kind == "redone":
            wide = max(1.5, self.to_px_x(mark.x_end if mark.x_end is not None else mark.x) - x)
            at = f'x="{x:.1f}" y="{top:g}" width="{wide:.1f}" height="{bottom - top:g}"'
            shape = f'<rect class="redone" {at}>{title}</rect>'
        elif mark.kind == "restart":
            shape = f'<path class="restart" d="M{x:.1f},{top:g}V{bottom:g}">{title}</path>'
        elif mark.kind == "guard":
            shape = f'<path class="guard" d="M{x - 4:.1f},{top:g}h8l-4,7z">{title}</path>'
        elif mark.kind == "best":
            shape = f'<circle class="best" cx="{x:.1f}" cy="{self.to_px_y(mark.y or 0.0):.2f}" r="4.6">{title}</circle>'
        else:
            shape = f'<path class="checkpoint" d="M{x:.1f},{bottom:g}l-3.4,6h6.8z">{title}</path>'
        self.parts.append(shape)

    def to_svg(self) -> str:
        """Return the finished plot. The `data-` attributes let the page turn pixels back into values."""
        scale = f"{self.x0:.10g} {self.x1:.10g} {self.y0:.10g} {self.y1:.10g} {int(self.log)}"
        box = f"{_LEFT_MARGIN:g} {_TOP_MARGIN:g} {self.width - _RIGHT_MARGIN:g} {self.height - _BOTTOM_MARGIN:g}"
        label, unit = escape(self.frame.title), escape(self.frame.unit)
        return (
            f'<svg class="plot" viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{label}" '
            f'data-scale="{scale}" data-box="{box}" data-unit="{unit}">{"".join(self.parts)}</svg>'
        )


def render_line_plot(
    frame: PlotFrame,
    lines: Sequence[PlotLine],
    marks: Sequence[PlotMark] = (),
    *,
    from_zero: bool = False,
    robust: bool = False,
    log: bool = False,
) -> str:
    """Curves over steps with events marked."""
    low, high = axis_range([line.y for line in lines], from_zero and not log, robust and not log)
    if log:
        positive = np.concatenate([line.y[np.isfinite(line.y) & (line.y > 0)] for line in lines])
        low, high = float(positive.min()) / 1.1, float(positive.max()) * 1.1
    plot = SvgPlot(frame, (low, high), log)
    for mark in marks:
        if mark.kind == "redone":
            plot.draw_mark(mark)
    plot.draw_axes()
    for mark in marks:
        if mark.kind == "restart":
            plot.draw_mark(mark)
    for line in lines:
        plot.draw_line(line)
    for mark in marks:
        if mark.kind not in ("redone", "restart"):
            plot.draw_mark(mark)
    return plot.to_svg()


def render_stacked_plot(
    frame: PlotFrame, x: Floats, layers: Sequence[tuple[str, str, Floats]], marks: Sequence[PlotMark] = ()
) -> str:
    """Layers over steps, cut off above where single steps stand out far."""
    plot = SvgPlot(frame, axis_range([np.sum([layer[2] for layer in layers], axis=0)], True, True))
    plot.draw_axes()
    plot.draw_layers(x, layers)
    for mark in marks:
        if mark.kind == "restart":
            plot.draw_mark(mark)
    return plot.to_svg()
