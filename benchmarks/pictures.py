"""Draw curves and scatter plots as SVG files for the pages of docs. Values in, text out; needs matplotlib (`bench`)."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Curve:
    """Points (x, y) of one label; `dots` for what was measured, a line for what was computed."""

    label: str
    points: Sequence[tuple[float, float]]
    dots: bool = False
    dashed: bool = False


def chart(curves: Sequence[Curve], title: str, across: str, up: str, *, log_y: bool = False) -> str:
    """Draw curves over a logarithmic axis to the base 2. `log_y`: so is the other axis, else it begins at 0. ValueError
    where there is no point, or one that such an axis cannot show."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        raise ValueError("there is nothing to draw: no curve has a point")
    if min(x for x, _ in points) <= 0 or (log_y and min(y for _, y in points) <= 0):
        raise ValueError("a logarithmic axis shows numbers above 0 only")
    figure, axes = new_axes((7, 4.6), title, across, up)
    for curve in curves:
        style, marker = "--" if curve.dashed else "-", "o" if curve.dots else ""
        axes.plot(*zip(*curve.points, strict=True), linestyle=style, marker=marker, markersize=4, label=curve.label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    if log_y:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.legend()
    return render_svg(figure)


def scatter(
    groups: Mapping[str, Sequence[tuple[float, float]]],
    title: str,
    across: str,
    up: str,
    *,
    log: bool = False,
    band: float = 0.15,
) -> str:
    """Draw points (x, y) by label, with the line of equality and those of a share `band` either way."""
    figure, axes = new_axes((5.6, 5.6), title, across, up)
    for label, points in groups.items():
        if points:
            axes.scatter(*zip(*points, strict=True), s=8, alpha=0.5, linewidths=0, label=label)
    values = [value for points in groups.values() for point in points for value in point]
    low, high = min(values), max(values)
    if log:
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
        axes.set(xscale="log", yscale="log")
    for factor, colour in ((1.0, "#111"), (1 + band, "#999"), (1 / (1 + band), "#999")):
        axes.axline((low, low * factor), (high, high * factor), color=colour, linewidth=0.8)
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(markerscale=3)
    return render_svg(figure)


def new_axes(size: tuple[float, float], title: str, across: str, up: str) -> "tuple[Figure, Axes]":
    """Make an empty figure of `size` inches with a grid."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=across, ylabel=up)
    axes.grid(color="#ddd")
    return figure, axes


def render_svg(figure: "Figure") -> str:
    """Render a figure as SVG whose labels are text, the same bytes each time."""
    from matplotlib import rc_context

    target = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "phalanx"}):
        figure.savefig(target, format="svg", metadata={"Date": None})
    return target.getvalue()
