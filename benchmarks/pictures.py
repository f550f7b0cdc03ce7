"""A picture of curves as an SVG file that stands alone: for pages of docs/benchmarks. Values in, text out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 640, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 34, 46
LEGEND_WIDTH = 240
"""Width of a legend on the right."""
Legend = Literal["top left", "bottom right"]
CURVE_COLORS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#9a6700", "#57606a")


@dataclass(frozen=True)
class Curve:
    """Points (x, y) of one label; `dots` for what was measured, a line for what was computed."""

    label: str
    points: Sequence[tuple[float, float]]
    dots: bool = False
    dashed: bool = False


def chart(
    curves: Sequence[Curve], title: str, across: str, up: str, *, log_y: bool = False, legend: Legend = "top left"
) -> str:
    """Curves over a logarithmic axis to the base 2, with a legend, at "top left" or "bottom right". `log_y`: so is the
    other axis, else it begins at 0. ValueError where there is no point, or one that such an axis cannot show."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        raise ValueError("there is nothing to draw: no curve has a point")
    if min(x for x, _ in points) <= 0 or (log_y and min(y for _, y in points) <= 0):
        raise ValueError("a logarithmic axis shows numbers above 0 only")
    x_low, x_high = _powers([x for x, _ in points])
    ticks = _y_ticks([y for _, y in points], log_y)
    low = legend == "bottom right"

    def x(value: float) -> float:
        return LEFT + (math.log2(value) - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        low, high = (math.log2(end) if log_y else end for end in (ticks[0], ticks[-1]))
        share = ((math.log2(value) if log_y else value) - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="20" text-anchor="middle">{escape(title)}</text>',
    ]
    for power in range(x_low, x_high + 1):
        at = x(2.0**power)
        parts.append(f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{2.0**power:g}</text>')
    for tick in ticks:
        parts.append(f'<line x1="{LEFT}" y1="{y(tick):.1f}" x2="{WIDTH - RIGHT}" y2="{y(tick):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for number, curve in enumerate(curves):
        colour = CURVE_COLORS[number % len(CURVE_COLORS)]
        places = [(x(a), y(b)) for a, b in curve.points]
        if not curve.dots or len(places) > 1:
            dash = ' stroke-dasharray="5 4"' if curve.dashed else ""
            line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>')
        if curve.dots:
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in places]
        beside = HEIGHT - BOTTOM - 8 - 17 * (len(curves) - 1 - number) if low else TOP + 14 + 17 * number
        left = WIDTH - RIGHT - LEGEND_WIDTH if low else LEFT + 10
        parts.append(f'<rect x="{left}" y="{beside - 8}" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{left + 20}" y="{beside}">{escape(curve.label)}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(across)}</text>')
    middle = (HEIGHT + TOP - BOTTOM) / 2
    parts.append(
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{escape(up)}</text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _powers(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    return low, max(high, low + 1)


def _y_ticks(values: Sequence[float], log: bool) -> list[float]:
    if log:
        low, high = _powers(values)
        return [2.0**power for power in range(low, high + 1)]
    most = max(*values, 1e-9)
    step = next(s for s in (10.0**p * f for p in range(-10, 13) for f in (1, 2, 5)) if most / s <= 6)
    return [round(step * number, 12) for number in range(math.ceil(most / step) + 1)]
