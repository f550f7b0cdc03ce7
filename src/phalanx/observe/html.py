"""The report as one HTML file that opens anywhere, also without network: no outside style, script, font or picture.

The page forbids itself every request (Content-Security-Policy), plots are SVG made by `svg.py`, and the few lines of
script only show values under the pointer. `page.css` and `page.js` beside this file are put into the page whole.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from phalanx.observe import units
from phalanx.observe.advice import Advice
from phalanx.observe.figures import run_figures
from phalanx.observe.history import PARTS, History
from phalanx.observe.report import (
    PART_NAMES,
    duration_facts,
    loss_facts,
    safety_facts,
    speed_facts,
    verdict,
    what_facts,
)
from phalanx.observe.summary import Summary
from phalanx.run import Event
from phalanx.run.event_types import (
    CheckpointFailed,
    CheckpointRejected,
    GradSyncSelected,
    NonFiniteStep,
    RunWarning,
    WorkerFailure,
)

_MOST_EVENTS = 200


def html_page(summary: Summary, history: History, advices: Sequence[Advice]) -> str:
    """The whole document."""
    what = summary.what
    status = re.sub(r"[^a-z]+", "-", summary.status)
    began = f" · started {units.moment(summary.began)}" if summary.began else ""
    figures = run_figures(summary, history)
    plots = f'<div class="plots">{figures}</div>' if figures else '<p class="note">No step finished yet.</p>'
    body = f"""
<header><h1>{escape(what.name)}</h1><span class="status {escape(status)}">{escape(summary.status)}</span></header>
<p class="sub">{escape(verdict(summary).partition(": ")[2] or verdict(summary))}{escape(began)}</p>
{_tiles(summary)}
<h2>Course of the run</h2>
{plots}
{_split(summary)}
{_advice(advices, summary)}
<h2>What ran</h2>
{_table(what_facts(what))}
<div class="tables">
<section><h2>Loss and speed</h2>{_table([*loss_facts(summary), *speed_facts(summary)])}</section>
<section><h2>Duration and safety</h2>{_table([*duration_facts(summary), *safety_facts(summary)])}</section>
</div>
{_events(history)}"""
    return document(f"{what.name}: report", body, f"Phalanx report on {what.run}")


def document(title: str, body: str, footer: str) -> str:
    """A page around `body` that needs, and may ask, nobody."""
    here = Path(__file__)
    css, script = here.with_name("page.css").read_text(), here.with_name("page.js").read_text()
    script = f"\n{script}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="generator" content="phalanx">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{css}</style>
</head>
<body>
<main>{body}
<footer>{escape(footer)}</footer>
</main>
<script>{script}</script>
</body>
</html>
"""


def _tiles(summary: Summary) -> str:
    loss, speed, spent = summary.loss, summary.speed, summary.durations
    tiles: list[tuple[str | None, str]] = []
    end = loss.end if loss.end is not None else loss.last
    first = f"training loss, from {units.loss(loss.first)}" if loss.first is not None else "training loss"
    tiles.append((units.loss(end) if end is not None else None, first))
    best = f"best validation loss, at step {loss.held_out_best_step}" if loss.held_out_best else "validation loss"
    tiles.append((units.loss(loss.held_out_best) if loss.held_out_best is not None else None, best))
    step = f"a step takes {units.duration(speed.step_median)}" if speed.step_median else "speed"
    tiles.append((units.rate(speed.median, speed.unit) if speed.median else None, step))
    mfu = speed.mfu_measured if speed.mfu_measured is not None else speed.mfu_data_sheet
    base = "measured peak" if speed.mfu_measured is not None or mfu is None else "data-sheet peak"
    tiles.append((units.percent(mfu) if mfu is not None else None, f"MFU ({base})"))
    useful = f"wall time, {units.percent(spent.productive / spent.wall)} productive" if spent.wall else ""
    tiles.append((units.duration(spent.wall) if spent.wall else None, useful or "wall time"))
    shown = (
        f'<div class="tile"><b>{_figure_and_unit(value)}</b><span>{escape(label)}</span></div>'
        if value is not None
        else f'<div class="tile"><b class="unknown">{units.UNKNOWN}</b><span>{escape(label)}</span></div>'
        for value, label in tiles
    )
    return f'<div class="tiles">{"".join(shown)}</div>'


def _split(summary: Summary) -> str:
    split, shares = summary.split, summary.split_shares
    if not split or not shares:
        return ""
    bar, keys = [], []
    for part in PARTS:
        if split[part] <= 0:
            continue
        name, share = PART_NAMES.get(part, part), units.percent(shares[part])
        time = units.duration(split[part])
        bar.append(f'<span class="p-{part}" style="flex:{shares[part]:.5f}" title="{name} {share}"></span>')
        keys.append(f'<div><i class="p-{part}"></i>{name}<b>{share} <small>{time}</small></b></div>')
    return f'<h2>Step time</h2><div class="bar">{"".join(bar)}</div><div class="split">{"".join(keys)}</div>'


def _advice(advices: Sequence[Advice], summary: Summary) -> str:
    if not summary.last_step:
        return ""
    if not advices:
        return '<h2>Recommendations</h2><p class="note">No issues found.</p>'
    items = []
    for advice in advices:
        gain = (
            f'<span class="gain">up to {units.percent(advice.gain)} of the run</span>' if advice.gain >= 0.005 else ""
        )
        key = f" <code>{escape(advice.key)}</code>" if advice.key else ""
        urgent = ' class="urgent"' if advice.urgent else ""
        finding, text = _prose(advice.finding), _prose(advice.advice)
        items.append(f"<li{urgent}>{gain}<strong>{finding}</strong><p>{text}.{key}</p></li>")
    return f'<h2>Recommendations</h2><ul class="advice">{"".join(items)}</ul>'


def _prose(text: str) -> str:
    """A capital first letter; what stands in backquotes becomes code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text[:1].upper() + text[1:]))


def _figure_and_unit(value: str) -> str:
    """A tile's number in large letters, what it counts in small ones."""
    number, space, unit = value.rpartition(" ")
    if not space or len(unit) < 5:
        return escape(value)
    return f"{escape(number)} <small>{escape(unit)}</small>"


def _table(facts: Iterable[tuple[str, str]]) -> str:
    rows, before = [], ""
    for label, value in facts:
        name = "" if label == before else escape(label)
        rows.append(f"<tr><th>{name}</th><td>{escape(value)}</td></tr>")
        before = label
    return f"<table>{''.join(rows)}</table>"


def _events(history: History) -> str:
    told = sorted(
        [
            *((life.began, life.from_step, "start", _start(life.number, life.world)) for life in history.attempts),
            *(
                (event.time, getattr(event, "step", after), *row)
                for after, event in history.others
                if (row := _row(event)) is not None
            ),
            *((life.last, history.last_step, "end", life.ended) for life in history.attempts[-1:] if life.ended),
        ],
        key=lambda row: row[0],
    )
    if not told:
        return ""
    zero = history.first_t or 0.0
    rows = [
        f'<tr><td class="when">{units.duration(max(0.0, t - zero))}</td><td class="when">step {step}</td>'
        f'<td class="kind">{kind}</td><td>{escape(text)}</td></tr>'
        for t, step, kind, text in told[:_MOST_EVENTS]
    ]
    more = len(told) - _MOST_EVENTS
    rest = f'<p class="note">and {units.times(more, "event")} more, see events.jsonl</p>' if more > 0 else ""
    return f"<h2>Events</h2><table>{''.join(rows)}</table>{rest}"


def _start(attempt: int, world: int) -> str:
    return f"attempt {attempt} with {units.times(world, 'worker')}"


def _row(event: Event) -> tuple[str, str] | None:
    """An event's kind and text; None for one that has no row."""
    match event:
        case NonFiniteStep():
            return "non-finite", f"{event.reason}: {event.action}"
        case WorkerFailure():
            return "failure", f"rank {event.rank}: {event.what}"
        case CheckpointRejected():
            return "rejected", f"{event.path}/{event.file}: {event.reason}"
        case CheckpointFailed():
            return "save failed", event.reason
        case GradSyncSelected():
            return "gradient sync", f"{event.selected}: {event.reason}"
        case RunWarning():
            return "warning", event.text
        case _:
            return None
