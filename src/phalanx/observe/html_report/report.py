"""The report as one HTML file, and its parts, which the live page shows as well."""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from phalanx import formatting
from phalanx.observe import text_report
from phalanx.observe.history import STEP_COMPONENTS, RunHistory
from phalanx.observe.html_report.chart import Chart, render_chart
from phalanx.observe.html_report.document import render_document
from phalanx.observe.html_report.run_charts import build_run_charts
from phalanx.observe.progress import ALERT_EVENTS, describe_event
from phalanx.observe.recommendations import Recommendation
from phalanx.observe.summary import RunSummary

_MAX_SHOWN_EVENTS = 200


def render_report_html(summary: RunSummary, history: RunHistory, recommendations: Sequence[Recommendation]) -> str:
    """The whole document."""
    charts = build_run_charts(summary, history)
    body = render_report_body(render_sections(summary, history, recommendations), charts)
    return render_document(f"{summary.run_info.name}: report", body, f"Phalanx report on {summary.run_info.run_path}")


def render_sections(
    summary: RunSummary, history: RunHistory, recommendations: Sequence[Recommendation]
) -> dict[str, str]:
    """The parts of the page by the id of their element, all but the charts."""
    run_info = summary.run_info
    speed = [*text_report.loss_rows(summary), *text_report.speed_rows(summary)]
    safety = [*text_report.duration_rows(summary), *text_report.safety_rows(summary)]
    return {
        "outcome": _render_outcome(summary),
        "step-time": _render_breakdown(summary),
        "recommendations": _render_recommendations(recommendations, summary),
        "what-ran": f"<h2>What ran</h2>{render_table(text_report.run_info_rows(run_info))}",
        "numbers": f"""<div class="tables">
<section><h2>Loss and speed</h2>{render_table(speed)}</section>
<section><h2>Duration and safety</h2>{render_table(safety)}</section>
</div>""",
        "events": _render_events(history),
    }


def render_report_body(sections: Mapping[str, str], charts: Sequence[Chart], above_charts: str = "") -> str:
    """The page without its frame. The charts stand behind the first section, below the HTML `above_charts`."""
    elements = [f'<div id="{id}">{html}</div>' for id, html in sections.items()]
    elements.insert(1, f'<h2>Course of the run</h2>\n{above_charts}<div id="charts">{render_charts(charts)}</div>')
    return "\n".join(elements)


def render_charts(charts: Sequence[Chart]) -> str:
    """The figures, or a sentence where there are none."""
    figures = "".join(map(render_chart, charts))
    return f'<div class="plots">{figures}</div>' if figures else '<p class="note">No step finished yet.</p>'


def _render_outcome(summary: RunSummary) -> str:
    status = re.sub(r"[^a-z]+", "-", summary.status)
    started_text = f" · started {formatting.format_timestamp(summary.started_at)}" if summary.started_at else ""
    outcome = text_report.describe_outcome(summary).partition(": ")[2] or text_report.describe_outcome(summary)
    return f"""<header><h1>{escape(summary.run_info.name)}</h1><span class="status {escape(status)}">{
        escape(summary.status)
    }</span></header>
<p class="sub">{escape(outcome)}{escape(started_text)}</p> {_render_tiles(summary)}"""


def _render_tiles(summary: RunSummary) -> str:
    loss, speed, durations = summary.loss, summary.speed, summary.durations
    end = loss.final_mean if loss.final_mean is not None else loss.last
    mfu = speed.mfu_measured if speed.mfu_measured is not None else speed.mfu_data_sheet
    peak = "measured peak" if speed.mfu_measured is not None or mfu is None else "data-sheet peak"
    best_at = "" if loss.validation_best_step is None else f", at step {loss.validation_best_step}"
    wall_s = durations.wall_s or None
    step = formatting.format_duration(speed.step_median_s)
    productive = f", {formatting.format_percent(durations.productive_s / wall_s)} productive" if wall_s else ""
    tiles = (
        (formatting.format_loss(end), f"training loss, from {formatting.format_loss(loss.first)}"),
        (formatting.format_loss(loss.validation_best), f"best validation loss{best_at}"),
        (formatting.format_rate(speed.median_per_s, speed.unit), f"a step takes {step}"),
        (formatting.format_percent(mfu), f"MFU ({peak})"),
        (formatting.format_duration(wall_s), f"wall time{productive}"),
    )
    tile_html = (
        f'<div class="tile"><b{" class=unknown" if value == formatting.NOT_MEASURED_TEXT else ""}>{_split_unit(value)}'
        f"</b><span>{escape(label)}</span></div>"
        for value, label in tiles
    )
    return f'<div class="tiles">{"".join(tile_html)}</div>'


def _render_breakdown(summary: RunSummary) -> str:
    split, shares = summary.breakdown_s, summary.breakdown_shares
    if not split or not shares:
        return ""
    bar_html, keys = [], []
    for part in STEP_COMPONENTS:
        if split[part] <= 0:
            continue
        name, share = text_report.COMPONENT_LABELS.get(part, part), formatting.format_percent(shares[part])
        time = formatting.format_duration(split[part])
        bar_html.append(f'<span class="p-{part}" data-share="{shares[part]:.5f}" title="{name} {share}"></span>')
        keys.append(f'<div><i class="p-{part}"></i>{name}<b>{share} <small>{time}</small></b></div>')
    return f'<h2>Step time</h2><div class="bar">{"".join(bar_html)}</div><div class="split">{"".join(keys)}</div>'


def _render_recommendations(recommendations: Sequence[Recommendation], summary: RunSummary) -> str:
    if not summary.last_step:
        return ""
    if not recommendations:
        return '<h2>Recommendations</h2><p class="note">No issues found.</p>'
    items = []
    for recommendation in recommendations:
        gain = ""
        if recommendation.max_gain >= 0.005:
            gain = f'<span class="gain">up to {formatting.format_percent(recommendation.max_gain)} of the run</span>'
        key = f" <code>{escape(recommendation.recipe_key)}</code>" if recommendation.recipe_key else ""
        urgent = ' class="urgent"' if recommendation.is_urgent else ""
        finding, text = _render_prose(recommendation.finding), _render_prose(recommendation.advice)
        items.append(f"<li{urgent}>{gain}<strong>{finding}</strong><p>{text}.{key}</p></li>")
    return f'<h2>Recommendations</h2><ul class="advice">{"".join(items)}</ul>'


def _render_prose(text: str) -> str:
    """A capital first letter; what stands in backquotes becomes code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text[:1].upper() + text[1:]))


def _split_unit(value: str) -> str:
    """A tile's number in large letters, what it counts in small ones."""
    number, space, unit = value.rpartition(" ")
    if not space or len(unit) < 5 or value == formatting.NOT_MEASURED_TEXT:
        return escape(value)
    return f"{escape(number)} <small>{escape(unit)}</small>"


def render_table(rows_: Iterable[tuple[str, str]]) -> str:
    """A table of names and values."""
    rows, before = [], ""
    for label, value in rows_:
        name = "" if label == before else escape(label)
        rows.append(f"<tr><th>{name}</th><td>{escape(value)}</td></tr>")
        before = label
    return f"<table>{''.join(rows)}</table>"


def _render_events(history: RunHistory) -> str:
    rows = []
    for attempt in history.attempts:
        workers = formatting.format_plural(attempt.world_size, "worker")
        rows.append((attempt.started_at, attempt.start_step, f"attempt {attempt.number} with {workers}"))
    for after, event in history.others:
        if isinstance(event, ALERT_EVENTS):
            rows.append((event.time, int(getattr(event, "step", after)), describe_event(event, 0, after, 0)))
    if history.attempts and (status := history.attempts[-1].end_status):
        rows.append((history.attempts[-1].last_event_at, history.last_step, status))
    if not rows:
        return ""
    zero = history.first_event_at or 0.0
    cells = [
        f'<tr><td class="when">{formatting.format_duration(max(0.0, time - zero))}</td>'
        f'<td class="when">step {step}</td><td>{escape(text)}</td></tr>'
        for time, step, text in sorted(rows)[:_MAX_SHOWN_EVENTS]
    ]
    rest = ""
    if (more := len(rows) - _MAX_SHOWN_EVENTS) > 0:
        rest = f'<p class="note">and {formatting.format_plural(more, "event")} more, see events.jsonl</p>'
    return f"<h2>Events</h2><table>{''.join(cells)}</table>{rest}"
