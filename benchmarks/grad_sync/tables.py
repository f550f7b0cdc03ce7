"""What is reckoned from turns, and the tables: pure functions over values.

Efficiency is a step without exchange over the same step with it, both measured. The best that is possible with the
bytes that were moved is

    T / (t_f + max(t_b, 8 B / R)),   T = t_f + t_b

with t_f and t_b seconds of forward and backward, B the bytes of a step that the busiest node's interface sent or
received (the larger of the two: links are full duplex) and R the link's bits a second: transfers run from the beginning
of backward on, at the line's nominal rate, and the next forward waits for the last of them. Nothing can be as good: no
gradient is there when backward begins, headers take 4% of the line, and what depends on another transfer waits for it.
Exchanges that outlast a step, of parameters for example, may overlap with forward and be better than that.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rate_limited import ComputeTiming


@dataclass(frozen=True)
class Turn:
    """Some steps of one contender. `seconds`: of a step, one figure for each period; `busiest` and `mean`: bytes of a
    step on the busiest interface, the larger of both directions, and sent by a node on average; `error`: the largest
    of all nodes' relative distances of what was exchanged from the mean of all gradients."""

    seconds: tuple[float, ...]
    busiest: float
    mean: float
    error: float | None


def make_turn(replies: Sequence[Mapping[str, Any]]) -> Turn:
    """A turn from all nodes' replies. A step's seconds are the mean over nodes, a period's the mean over its steps: one
    step in many may do all the exchanging."""
    period = replies[0]["period"]
    steps = [statistics.mean(each) for each in zip(*(reply["seconds"] for reply in replies), strict=True)]
    windows = tuple(statistics.mean(steps[start : start + period]) for start in range(0, len(steps), period))
    errors = [reply["error"] for reply in replies if reply["error"] is not None]
    return Turn(
        windows,
        max(max(reply["sent"], reply["received"]) for reply in replies) / len(steps),
        statistics.mean(reply["sent"] for reply in replies) / len(steps),
        max(errors, default=None),
    )


def compute_best_efficiency(pace: ComputeTiming, nbytes: float, rate: float | None) -> float:
    """The best efficiency that is possible when a step moves so many bytes over a link of so many bits a second (None:
    no limit): see above."""
    wire = 0.0 if rate is None else 8 * nbytes / rate
    return pace.seconds / (pace.forward + max(pace.backward_seconds, wire))


def median(turns: Sequence[Turn]) -> float:
    """Seconds of a step, over all turns."""
    return statistics.median(second for turn in turns for second in turn.seconds)


def quartiles(turns: Sequence[Turn]) -> tuple[float, float]:
    seconds = [second for turn in turns for second in turn.seconds]
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, high


@dataclass(frozen=True)
class TableRow:
    """A line of a table: seconds of a step, its quartiles, bytes of a step, and efficiencies."""

    name: str
    seconds: float
    low: float
    high: float
    busiest: float
    mean: float
    efficiency: float
    best: float
    error: float | None


def make_row(
    name: str, turns: Sequence[Turn], alone: Sequence[Turn], pace: ComputeTiming, rate: float | None
) -> TableRow:
    """The figures of a contender beside those of the same steps without exchange."""
    low, high = quartiles(turns)
    busiest = statistics.median(turn.busiest for turn in turns)
    mean = statistics.median(turn.mean for turn in turns)
    errors = [turn.error for turn in turns if turn.error is not None]
    seconds = median(turns)
    best = compute_best_efficiency(pace, busiest, rate)
    return TableRow(name, seconds, low, high, busiest, mean, median(alone) / seconds, best, max(errors, default=None))


def format_table(rows: Sequence[TableRow], failed: Mapping[str, str]) -> list[str]:
    """Lines of Markdown. Who has failed stands at the end, with the reason."""
    lines = [
        "| exchange | step, ms (quartiles) | MB a step: busiest node, mean sent | efficiency | best possible | of it "
        "| error |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        took = f"{row.seconds * 1e3:.1f} ({row.low * 1e3:.1f} to {row.high * 1e3:.1f})"
        moved = f"{row.busiest / 1e6:.2f}, {row.mean / 1e6:.2f}"
        error = "" if row.error is None else f"{row.error:.1e}"
        ratios = f"{row.efficiency:.3f} | {row.best:.3f} | {row.efficiency / row.best:.3f}"
        lines.append(f"| {row.name} | {took} | {moved} | {ratios} | {error} |")
    for name, why in failed.items():
        lines.append(f"| {name} | failed: {why.replace('|', '/')} | | | | | |")
    return lines
