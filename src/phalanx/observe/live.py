"""A run while it goes, from its events alone: `show(event)` for each, `close()` at the end.

`TerminalDisplay` redraws a few lines in place; `LogDisplay` writes a line every few seconds and one for whatever is not
an ordinary step. Showing a step costs a few microseconds unless it is time to draw, so 1 ms steps can be shown too.
Nothing here reads files (but `facts_of`), starts threads or asks for the time: the clock is given.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

from phalanx.observe import units
from phalanx.observe.sentences import sentence
from phalanx.run import Event, Run
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointFailed,
    CheckpointRejected,
    CheckpointSaved,
    Compiled,
    EvaluationDone,
    GradSyncSelected,
    HangDetected,
    NonFiniteStep,
    RunEnded,
    RunWarning,
    StepDone,
    StragglerDetected,
    WorkerFailure,
)
from phalanx.streams import Lasting, printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WINDOW = 10.0
"""Seconds of steps that the shown speed is the mean of."""
DRAW_EVERY = 0.25
LOG_EVERY = 5.0


@dataclass(frozen=True)
class LiveFacts:
    """What a display must know that events do not say. `worker_rate` is the measured matmul rate of one worker in the
    run's precision, in FLOP/s; without it, or without FLOPs a sample, no share of it is shown."""

    name: str = "run"
    unit: str = "tokens"
    units_per_sample: int = 1
    flops_per_sample: float | None = None
    worker_rate: float | None = None


def facts_of(run: Run) -> LiveFacts:
    """The facts of a run whose resolved recipe, plan and cluster files are written; what is missing is not shown."""
    from phalanx.observe.metrics import measured_rate
    from phalanx.observe.what import read_recipe, sane

    recipe, plan, cluster = read_recipe(run), sane(run.read_lossy(run.plan)) or {}, sane(run.read_lossy(run.cluster))
    task = recipe.get("task")
    return LiveFacts(
        name=str(recipe.get("name", run.path.name)),
        unit=str(plan.get("unit") or ("samples" if task == "classification" else "tokens")),
        units_per_sample=int(plan.get("units_per_sample") or 1),
        flops_per_sample=plan.get("flops_per_sample"),
        worker_rate=measured_rate(cluster, str(recipe.get("precision")), 1),
    )


class Display(Protocol):
    """Shows a run's events as they come."""

    def show(self, event: Event) -> None:
        """Take one event, in the order of events.jsonl."""

    def close(self) -> None:
        """Leave the terminal as it was found. May be called twice."""


class Tally:
    """What the displays show, kept up to date event by event."""

    def __init__(self, total_steps: int, facts: LiveFacts):
        self.total, self.facts = total_steps, facts
        self.step = self.world = self.skipped = self.rollbacks = 0
        self.last: StepDone | None = None
        self.eval: EvaluationDone | None = None
        self.checkpoint: CheckpointSaved | None = None
        self._window: deque[tuple[float, float, float]] = deque()
        self._units = self._seconds = 0.0
        self._first: tuple[float, int] | None = None

    def take(self, event: Event) -> None:
        """Count an event in."""
        if isinstance(event, StepDone):
            t, amount, seconds = event.time, event.units, event.duration_s
            self.last = event
            self.step = event.step
            window = self._window
            window.append((t, amount, seconds))
            self._units += amount
            self._seconds += seconds
            while window[0][0] < t - WINDOW:
                _, old_amount, old_seconds = window.popleft()
                self._units -= old_amount
                self._seconds -= old_seconds
            if self._first is None or self.step <= self._first[1]:
                self._first = (t, self.step)
        elif isinstance(event, AttemptStarted):
            self.world, self.total, self.step = event.world_size, event.total_steps, event.start_step
            self._first = None
            self._window.clear()
            self._units = self._seconds = 0.0
        elif isinstance(event, EvaluationDone):
            self.eval = event
        elif isinstance(event, CheckpointSaved):
            self.checkpoint = event
        elif isinstance(event, NonFiniteStep):
            if event.action == "rollback":
                self.rollbacks += 1
            else:
                self.skipped += 1

    @property
    def speed(self) -> float | None:
        """Units a second within the steps of the window."""
        return self._units / self._seconds if self._seconds > 1e-9 else None

    @property
    def step_seconds(self) -> float | None:
        """Mean step time in the window."""
        return self._seconds / len(self._window) if self._window and self._seconds > 1e-9 else None

    @property
    def share(self) -> float | None:
        """MFU relative to the measured peak of all workers."""
        facts, speed = self.facts, self.speed
        if not facts.flops_per_sample or not facts.worker_rate or speed is None:
            return None
        return facts.flops_per_sample * speed / facts.units_per_sample / (facts.worker_rate * max(1, self.world))

    @property
    def eta(self) -> float | None:
        """Seconds to go at the pace of this attempt since its first step, with evaluations and saves. The first step
        itself is left out: it warms up and compiles."""
        if self._first is None or self.last is None:
            return None
        began, first = self._first
        if self.step == first:
            pace = self.step_seconds
        else:
            pace = (self.last.time - began) / (self.step - first)
        return None if pace is None else max(0, self.total - self.step) * pace


class LogDisplay:
    """Lines for a log: one every `every` seconds, the first and the last step, and each event that is not a step."""

    def __init__(
        self,
        stream: TextIO,
        total_steps: int,
        facts: LiveFacts,
        clock: Callable[[], float] = time.monotonic,
        every: float = LOG_EVERY,
    ):
        self._stream, self._clock, self._every = Lasting(stream), clock, every
        self._tally = Tally(total_steps, facts)
        self._next = float("-inf")
        self._told = 0

    def show(self, event: Event) -> None:
        self._tally.take(event)
        if isinstance(event, StepDone):
            now = self._clock()
            if now >= self._next or event.step == self._tally.total:
                self._next = now + self._every
                self._tell_step(event)
            return
        last = self._tally.last
        if isinstance(event, RunEnded) and self._tally.step != self._told and last is not None:
            self._tell_step(last)
        if text := printable(sentence(event, self._tally.world, self._tally.step, self._tally.total)):
            self._write(event, text)
        if isinstance(event, AttemptStarted):
            self._next = float("-inf")

    def close(self) -> None:
        self._stream.flush()

    def _tell_step(self, event: StepDone) -> None:
        tally = self._tally
        self._told = tally.step
        width = len(str(tally.total))
        parts = [f"step {tally.step:>{width}}/{tally.total}", f"loss {units.loss(event.loss)}"]
        if event.skip_reason:
            parts.append("skipped")
        parts += _numbers(event)
        parts += _pace(tally)
        if tally.step < tally.total and tally.eta is not None:
            parts.append(f"ETA {units.duration(tally.eta)}")
        self._write(event, "  ".join(parts))

    def _write(self, event: Event, text: str) -> None:
        stamp = time.strftime("%H:%M:%S", time.localtime(event.time))
        self._stream.write(f"{stamp}  {text}\n")
        self._stream.flush()


class Lines(LogDisplay):
    """The same lines as values, for who shows them among others. Time is that of the events."""

    def __init__(self, total_steps: int, facts: LiveFacts):
        self._now = 0.0
        self._lines: list[str] = []
        super().__init__(sys.stdout, total_steps, facts, lambda: self._now)

    def take(self, event: Event) -> list[str]:
        """What is written for an event, without its time."""
        self._now, self._lines = event.time, []
        self.show(event)
        return self._lines

    def _write(self, event: Event, text: str) -> None:
        self._lines.append(text)


class TerminalDisplay:
    """A few lines redrawn in place, at most every `every` seconds. What should stay to be read is printed above."""

    def __init__(
        self,
        stream: TextIO,
        total_steps: int,
        facts: LiveFacts,
        clock: Callable[[], float] = time.monotonic,
        every: float = DRAW_EVERY,
        console: Console | None = None,
    ):
        from rich.live import Live

        self._clock, self._every = clock, every
        self._tally = Tally(total_steps, facts)
        # No refresh thread: this display draws when events come, and only then. What is printed meanwhile is led above
        # the lines, unless it goes to a file anyway.
        self._live = Live(
            console=console or console_for(stream),
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._next = float("-inf")
        self._closed = False

    def show(self, event: Event) -> None:
        if self._closed:
            return
        self._tally.take(event)
        now = self._clock()
        ended = isinstance(event, RunEnded)
        if isinstance(event, AttemptStarted | Compiled | GradSyncSelected) or type(event) in _STYLES:
            self._live.start()
            if not isinstance(event, AttemptStarted) or event.attempt:
                text = printable(sentence(event, self._tally.world, self._tally.step, self._tally.total))
                self._live.console.print(text, style=_STYLES.get(type(event)), markup=False, highlight=False)
        elif not ended and now < self._next:
            return
        self._next = now + self._every
        self._live.start()
        self._live.update(self.picture(ended), refresh=True)
        if ended:
            self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._live.is_started:
                self._live.update(self.picture(), refresh=True)
            self._live.stop()

    def picture(self, ended: bool = False) -> RenderableType:
        """The lines as they stand now. Always the same number of lines, so that nothing jumps."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        tally = self._tally
        done = tally.step >= tally.total or ended
        eta = "" if done else f"ETA {units.duration(tally.eta)}" if tally.eta is not None else "starting"
        head = Table.grid(padding=(0, 2), expand=True)
        for ratio in (None, 1, None, None):
            head.add_column(ratio=ratio, no_wrap=True)
        head.add_row(
            Text(tally.facts.name, style="bold"),
            ProgressBar(total=max(1, tally.total), completed=tally.step),
            f"step {tally.step:>{len(str(tally.total))}}/{tally.total}",
            f"{eta:<16}",
        )
        first = (
            [f"loss {units.loss(tally.last.loss)}", *_numbers(tally.last)]
            if tally.last
            else ["waiting for the first step"]
        )
        if tally.eval:
            best = ", best so far" if tally.eval.is_best else ""
            first.append(f"validation {units.loss(tally.eval.loss)} (step {tally.eval.step}{best})")
        third = []
        if tally.checkpoint:
            third.append(f"checkpoint at step {tally.checkpoint.step} ({units.size(tally.checkpoint.size_bytes)})")
        if tally.skipped or tally.rollbacks:
            third.append(f"non-finite steps: {tally.skipped} skipped, {units.times(tally.rollbacks, 'rollback')}")
        lines = [first, _pace(tally) or [""], third or ["no checkpoint yet"]]
        rows = [Text("  " + "   ".join(line), no_wrap=True, overflow="ellipsis") for line in lines]
        rows[2].stylize("dim")
        return Group(head, *rows)


_STYLES: dict[type[Event], str] = {
    HangDetected: "red",
    StragglerDetected: "yellow",
    WorkerFailure: "red",
    NonFiniteStep: "yellow",
    RunWarning: "yellow",
    CheckpointRejected: "red",
    CheckpointFailed: "red",
}


def _numbers(event: StepDone) -> list[str]:
    norm = [] if event.grad_norm is None else [f"grad {units.significant(event.grad_norm)}"]
    return [*norm, f"lr {event.lr:.2e}"]


def _pace(tally: Tally) -> list[str]:
    if tally.speed is None:
        return []
    found = [units.rate(tally.speed, tally.facts.unit), f"{units.duration(tally.step_seconds)}/step"]
    if tally.share is not None:
        found.append(f"MFU {units.percent(tally.share)} (measured peak)")
    return found


def console_for(stream: TextIO, **options: Any) -> Console:
    """A rich console that outlives its stream; rich itself would end the program with it."""
    from rich.console import Console as RichConsole

    return RichConsole(file=cast(TextIO, Lasting(stream)), highlight=False, **options)


def display_for(
    stream: TextIO, total_steps: int, facts: LiveFacts, clock: Callable[[], float] = time.monotonic
) -> Display:
    """The display that suits a stream: in place on a terminal, lines elsewhere (a pipe, a file, a dumb terminal)."""
    if not stream.isatty():
        return LogDisplay(stream, total_steps, facts, clock)
    console = console_for(stream)
    if console.is_dumb_terminal:
        return LogDisplay(stream, total_steps, facts, clock)
    return TerminalDisplay(stream, total_steps, facts, clock, console=console)
