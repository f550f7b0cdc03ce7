"""A step as it passes: what each pipeline rank computes and sends, from when to when; as text, and as a Chrome trace
for chrome://tracing or Perfetto (Trace Event Format, "X" events). The same arithmetic as `step.py`, laid out in time.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.plan.pipeline import Schedule, Stage, simulate
from phalanx.plan.rates import Rates
from phalanx.plan.setup import Setup
from phalanx.plan.step import Costs, Parts, chunks, sent_between, step, through
from phalanx.plan.work import Price

COMPUTING, COMMUNICATING = "computing", "communicating"
MOST_MICROS = 64
"""Micro-batches that are laid out one by one; further ones look alike and are drawn as one."""
WORDS = {
    "products": "matrix products",
    "attention": "attention",
    "memory": "operations bound by memory",
    "recomputing": "computed again for memory's sake",
    "tensor": "sums over tensor ranks",
    "context": "keys and values of other context ranks",
    "expert": "tokens on their way to experts",
    "sharding": "waiting for sharded weights and gradients",
    "launching": "waiting for kernels to be launched",
    "bubble": "pipeline bubble",
    "gradients": "adding gradients over replicas",
    "optimizer": "optimizer",
    "data": "waiting for data",
    "checkpoint": "checkpoints, shared among the steps between",
    "rest": "agreement, launching: once a step",
}
"""The parts of a step in words, in the order in which they are told."""


@dataclass(frozen=True)
class Event:
    """Something that takes time on one pipeline rank; seconds from the start of the step."""

    rank: int
    stream: str
    name: str
    start: float
    end: float


def timeline(setup: Setup, rates: Rates, price: Price | None = None, parts: Parts | None = None) -> list[Event]:
    """All events of a step; they end when `parts` do, by default those of `step(...)`."""
    parts = parts or step(setup, rates, price)
    events = _pipelined(setup, rates, price) if setup.layout.pipeline > 1 else _alone(setup, rates, price)
    end = max((event.end for event in events), default=0.0)
    for name in ("gradients", "optimizer", "data", "checkpoint", "rest"):
        if not (seconds := getattr(parts, name)):
            continue
        stream = COMMUNICATING if name == "gradients" else COMPUTING
        events += [Event(rank, stream, WORDS[name], end, end + seconds) for rank in range(setup.layout.pipeline)]
        end += seconds
    return events


def _alone(setup: Setup, rates: Rates, price: Price | None) -> list[Event]:
    """Micro-batch after micro-batch, segment by segment; the weights of a segment travel while that before it is
    computed."""
    costs, chunk = Costs(setup, rates, price), chunks(setup)[0]
    events: list[Event] = []
    now, shown = 0.0, min(setup.micros, MOST_MICROS)
    for micro in range(shown):
        for way in ("forward", "backward"):
            whole = through(costs, chunk, way)
            segments = chunk.segments if way == "forward" else chunk.segments[::-1]
            for segment, count in segments:
                one = costs.of(segment, way)
                seconds = count * (one.total - one.launching)
                name = f"{way} {segment.name}" + (f" and {count - 1} more" if count > 1 else "")
                events.append(Event(0, COMPUTING, f"{name}, micro-batch {micro}", now, now + seconds))
                travelling = count * (costs.gathered(segment) + (costs.scattered(segment) if way == "backward" else 0))
                if travelling:
                    events.append(Event(0, COMMUNICATING, f"weights of {segment.name}", now, now + travelling))
                now += seconds
            for name in ("sharding", "launching"):
                if (waiting := getattr(whole, name)) > 0:
                    events.append(Event(0, COMPUTING, WORDS[name], now, now + waiting))
                    now += waiting
    if setup.micros > shown:
        rest = now / shown * (setup.micros - shown)
        events.append(Event(0, COMPUTING, f"{setup.micros - shown} further micro-batches", now, now + rest))
    return events


def _pipelined(setup: Setup, rates: Rates, price: Price | None) -> list[Event]:
    costs, ranks = Costs(setup, rates, price), setup.layout.pipeline
    stages = [
        Stage(through(costs, chunk, "forward").total, through(costs, chunk, "backward").total)
        for chunk in chunks(setup)
    ]
    schedule: Schedule = "interleaved" if setup.chunks > 1 else setup.layout.pipeline_schedule
    words = {"F": "forward", "B": "backward", "W": "gradients of weights"}
    return [
        Event(
            span.rank,
            COMPUTING,
            f"{words[span.kind]}, micro-batch {span.micro}" + (f", chunk {span.chunk}" if setup.chunks > 1 else ""),
            span.start,
            span.end,
        )
        for span in simulate(schedule, stages, ranks, setup.micros, sent_between(costs))
    ]


def breakdown(parts: Parts, width: int = 40) -> str:
    """The parts of a step as bars; they sum to the step."""
    lines = []
    for name, words in WORDS.items():
        seconds = getattr(parts, name)
        if seconds > 0.0005 * parts.total:
            bar = "#" * round(width * seconds / parts.total)
            lines.append(f"  {words:<42} {time_text(seconds):>9} {100 * seconds / parts.total:5.1f} %  {bar}")
    lines.append(f"  {'a step':<42} {time_text(parts.total):>9} 100.0 %")
    return "\n".join(lines)


def drawn(events: Sequence[Event], width: int = 96) -> str:
    """The time line as text, a line for each rank and stream: F forward, B backward, W gradients of weights, ~ waiting,
    = communicating, o optimizer and the rest, . nothing."""
    end = max(event.end for event in events)
    rows: dict[tuple[int, str], list[str]] = {}
    for event in sorted(events, key=lambda each: each.start):
        row = rows.setdefault((event.rank, event.stream), ["."] * width)
        first, last = int(event.start / end * width), int(event.end / end * width)
        row[first:last] = [_letter(event)] * (last - first)
    lines = []
    for (rank, stream), row in sorted(rows.items(), key=lambda item: (item[0][0], item[0][1] == COMMUNICATING)):
        lines.append(f"  rank {rank:<3} {stream:<13} {''.join(row)}")
    lines.append(f"  {'':<22} 0{time_text(end):>{width - 1}}")
    return "\n".join(lines)


def chrome_trace(events: Sequence[Event]) -> str:
    """The time line as a JSON file for trace viewers; a process for each rank, a thread for each stream, us."""
    streams = {COMPUTING: 0, COMMUNICATING: 1}
    traced: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in events}):
        traced.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"pipeline rank {rank}"}})
        traced += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}}
            for name, number in streams.items()
        ]
    for event in events:
        traced.append(
            {
                "ph": "X",
                "name": event.name,
                "pid": event.rank,
                "tid": streams[event.stream],
                "ts": round(event.start * 1e6, 3),
                "dur": round((event.end - event.start) * 1e6, 3),
            }
        )
    return json.dumps({"traceEvents": traced, "displayTimeUnit": "ms"})


def _letter(event: Event) -> str:
    if event.stream == COMMUNICATING:
        return "="
    for start, letter in (("forward", "F"), ("backward", "B"), ("gradients of weights", "W"), ("waiting", "~")):
        if event.name.startswith(start):
            return letter
    return "o"


def time_text(seconds: float) -> str:
    """Seconds with as many digits as a forecast deserves."""
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.3f} s"
