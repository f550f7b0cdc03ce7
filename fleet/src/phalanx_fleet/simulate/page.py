"""A simulated fleet as a page with the look of a run's report: time lines by hour, and the table of variants."""

from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from phalanx.observe.html_report.chart import Chart, ChartSeries, linear_range
from phalanx.observe.html_report.document import render_document
from phalanx.observe.html_report.report import render_charts
from phalanx_fleet.simulate.figures import compare_variants, describe_differences
from phalanx_fleet.simulate.site_hours import FleetHours
from phalanx_fleet.simulate.site_series import HOURS_PER_DAY, format_hour
from phalanx_fleet.simulate.variants import SimulatedVariant
from phalanx_fleet.thermal.device_series import Values

VARIANT_COLORS = ("train", "validation", "optimizer", "checkpoint-stall", "grad-sync", "other")
MOST_STACKED_POINTS = 480
"""Of a stacked chart: means of equal parts, since each series of it needs the same points."""


def render_simulation_html(variants: Sequence[SimulatedVariant]) -> str:
    name = variants[0].fleet_name
    return render_document(f"{name}: simulation", _render_body(variants), f"Phalanx simulation of {name}")


def _render_body(variants: Sequence[SimulatedVariant]) -> str:
    """That page without its frame."""
    table, base = compare_variants(variants), variants[0]
    differences_html = ""
    if (differences := describe_differences(variants)) is not None:
        differences_html = f'<h2>Differences</h2><p class="note">{escape(differences.head)}</p>' + render_figure_table(
            "Differences", differences.columns, differences.rows, differences.notes
        )
    start = ""
    if base.site_hours.list_series():
        start = f" Day 0 is {format_hour(base.site_hours.start_hour)}."
    problems = "".join(f'<p class="note problem">{escape(text)}</p>' for text in table.problems)
    return f"""<header><h1>{escape(base.fleet_name)}</h1></header>
<p class="sub">{escape(table.head)}</p>{problems}
<h2>Course of the first seed</h2>
<p class="note">Means of each hour.{escape(start)} Devices are those of the first variant.</p>
<div id="charts">{render_charts(build_timeline_charts(variants))}</div>
{differences_html}
<h2>Comparison</h2>{render_figure_table("Comparison", table.columns, table.rows, table.notes)}"""


def render_figure_table(label: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """A row for each figure, a column for each variant, and what they mean."""
    head = "".join(f"<th scope=col>{escape(each)}</th>" for each in columns)
    body = "".join(
        f"<tr><th scope=row>{escape(title)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for title, *cells in rows
    )
    notes_html = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table class="side"><thead><tr>'
        f"<th scope=col>figure</th>{head}</tr></thead><tbody>{body}</tbody></table></div>{notes_html}"
    )


def build_timeline_charts(variants: Sequence[SimulatedVariant]) -> list[Chart]:
    """Charts over the days of the first seed. A chart without values is left out."""
    found = [(variant.label, variant.results[0].hours) for variant in variants]
    lines = [(label, hours) for label, hours in found if hours is not None]
    if not lines:
        return []
    readers: list[tuple[str, str, Callable[[FleetHours], Values], bool]] = [
        ("Power of IT", "kW", lambda hours: hours.it_w / 1000, True),
        ("Power of the site", "kW", lambda hours: hours.site_w / 1000, True),
        ("PUE", "", lambda hours: hours.pue, False),
        ("Supply temperature", "°C", lambda hours: hours.supply_c, False),
        ("Jobs that wait", "", lambda hours: np.maximum(hours.waiting_jobs, 0.0), True),
        ("Price", "per kWh", lambda hours: hours.price_per_kwh, False),
        ("Carbon", "g/kWh", lambda hours: hours.carbon_g_per_kwh, False),
    ]
    series = variants[0].site_hours
    without = {title for title, each in (("Price", series.price), ("Carbon", series.carbon)) if each is None}
    charts = [_stack_devices(lines[0][1])]
    for title, unit, read, from_zero in readers:
        if title not in without and (chart := _draw_lines(title, unit, read, from_zero, lines)) is not None:
            charts.append(chart)
    return charts


def _draw_lines(
    title: str,
    unit: str,
    read: Callable[[FleetHours], Values],
    from_zero: bool,
    lines: Sequence[tuple[str, FleetHours]],
) -> Chart | None:
    series = [
        ChartSeries(label, _find_days(hours), read(hours), VARIANT_COLORS[index % len(VARIANT_COLORS)])
        for index, (label, hours) in enumerate(lines)
    ]
    series = [each for each in series if np.isfinite(each.y).any()]
    if not series:
        return None
    x_range = (0.0, max(1 / HOURS_PER_DAY, *(float(each.x[-1]) for each in series)))
    return Chart(title, series, x_range, linear_range([each.y for each in series], from_zero), unit=unit, x_label="day")


def _stack_devices(hours: FleetHours) -> Chart:
    parts = (
        ("busy", hours.busy_devices, "forward"),
        ("idle", hours.idle_devices, "other"),
        ("in repair", hours.down_devices, "data-wait"),
    )
    edges = np.unique(np.linspace(0, len(hours.it_w), min(MOST_STACKED_POINTS, len(hours.it_w)) + 1).astype(int))[:-1]
    counts = np.diff(np.append(edges, len(hours.it_w)))
    days = _find_days(hours)[edges]
    series = [ChartSeries(label, days, np.add.reduceat(y, edges) / counts, color, "area") for label, y, color in parts]
    return Chart(
        "Accelerators",
        series,
        (0.0, max(float(days[-1]), 1 / HOURS_PER_DAY)),
        (0.0, hours.num_devices * 1.02),
        wide=True,
        x_label="day",
    )


def _find_days(hours: FleetHours) -> Values:
    return np.arange(len(hours.it_w)) / HOURS_PER_DAY
