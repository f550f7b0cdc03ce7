"""A run while it goes, from its events alone: `show_event(event)` for each, `close()` at the end.

`TerminalProgressDisplay` redraws a few lines in place; `LogProgressDisplay` writes a line every few seconds and one for
each event that is not an ordinary step. Showing a step costs a few microseconds unless it is time to draw, so 1 ms
steps can be shown too. Nothing here reads files, starts threads or asks for the time: the clock is given.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

from phalanx import formatting
from phalanx.observe.event_messages import describe_event
from phalanx.observe.run_progress import RunFacts, RunProgress
from phalanx.run import Event
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointFailed,
    CheckpointRejected,
    Compiled,
    GradSyncSelected,
    HangDetected,
    NonFiniteStep,
    RunEnded,
    RunWarning,
    StepDone,
    StragglerDetected,
    WorkerFailure,
)
from phalanx.std_streams import SafeStream, escape_control_chars

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

DRAW_INTERVAL_S = 0.25
LOG_INTERVAL_S = 5.0


class ProgressDisplay(Protocol):
    """Shows a run's events as they come."""

    def show_event(self, event: Event) -> None:
        """Take one event, in the order of events.jsonl."""

    def close(self) -> None:
        """Leave the terminal as it was found. May be called twice."""


class LogProgressDisplay:
    """Lines for a log: one every `interval_s` seconds, the first and the last step, and each event that is not a
    step."""

    def __init__(
        self,
        stream: TextIO,
        total_steps: int,
        facts: RunFacts,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = LOG_INTERVAL_S,
    ):
        self._stream, self._clock, self._interval_s = SafeStream(stream), clock, interval_s
        self._progress = RunProgress(total_steps, facts)
        self._next_log_at = float("-inf")
        self._last_logged_step = 0

    def show_event(self, event: Event) -> None:
        self._progress.add_event(event)
        if isinstance(event, StepDone):
            now = self._clock()
            if now >= self._next_log_at or event.step == self._progress.total_steps:
                self._next_log_at = now + self._interval_s
                self._log_step(event)
            return
        last = self._progress.last_step_event
        if isinstance(event, RunEnded) and self._progress.step != self._last_logged_step and last is not None:
            self._log_step(last)
        if text := escape_control_chars(
            describe_event(event, self._progress.world_size, self._progress.step, self._progress.total_steps)
        ):
            self._write_line(event, text)
        if isinstance(event, AttemptStarted):
            self._next_log_at = float("-inf")

    def close(self) -> None:
        self._stream.flush()

    def _log_step(self, event: StepDone) -> None:
        progress = self._progress
        self._last_logged_step = progress.step
        width = len(str(progress.total_steps))
        parts = [f"step {progress.step:>{width}}/{progress.total_steps}", f"loss {formatting.format_loss(event.loss)}"]
        if event.skip_reason:
            parts.append("skipped")
        parts += _format_step_numbers(event)
        parts += _format_speed(progress)
        if progress.step < progress.total_steps and progress.eta_s is not None:
            parts.append(f"ETA {formatting.format_duration(progress.eta_s)}")
        self._write_line(event, "  ".join(parts))

    def _write_line(self, event: Event, text: str) -> None:
        stamp = time.strftime("%H:%M:%S", time.localtime(event.time))
        self._stream.write(f"{stamp}  {text}\n")
        self._stream.flush()


class EventFormatter(LogProgressDisplay):
    """The same lines as values, for callers that print them among others. Times are those of the events."""

    def __init__(self, total_steps: int, facts: RunFacts):
        self._now = 0.0
        self._lines: list[str] = []
        super().__init__(sys.stdout, total_steps, facts, lambda: self._now)

    def format_event(self, event: Event) -> list[str]:
        """What is written for an event, without its time."""
        self._now, self._lines = event.time, []
        self.show_event(event)
        return self._lines

    def _write_line(self, event: Event, text: str) -> None:
        self._lines.append(text)


class TerminalProgressDisplay:
    """A few lines redrawn in place, at most every `interval_s` seconds. What should stay to be read is printed
    above."""

    def __init__(
        self,
        stream: TextIO,
        total_steps: int,
        facts: RunFacts,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = DRAW_INTERVAL_S,
        console: Console | None = None,
    ):
        from rich.live import Live

        self._clock, self._interval_s = clock, interval_s
        self._progress = RunProgress(total_steps, facts)
        # No refresh thread: this display draws when events come, and only then. What is printed meanwhile is led above
        # the lines, unless it goes to a file anyway.
        self._live = Live(
            console=console or make_console(stream),
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._next_draw_at = float("-inf")
        self._closed = False

    def show_event(self, event: Event) -> None:
        if self._closed:
            return
        self._progress.add_event(event)
        now = self._clock()
        ended = isinstance(event, RunEnded)
        if isinstance(event, AttemptStarted | Compiled | GradSyncSelected) or type(event) in _STYLE_BY_EVENT:
            self._live.start()
            if not isinstance(event, AttemptStarted) or event.attempt:
                text = escape_control_chars(
                    describe_event(event, self._progress.world_size, self._progress.step, self._progress.total_steps)
                )
                self._live.console.print(text, style=_STYLE_BY_EVENT.get(type(event)), markup=False, highlight=False)
        elif not ended and now < self._next_draw_at:
            return
        self._next_draw_at = now + self._interval_s
        self._live.start()
        self._live.update(self.render_lines(ended), refresh=True)
        if ended:
            self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._live.is_started:
                self._live.update(self.render_lines(), refresh=True)
            self._live.stop()

    def render_lines(self, ended: bool = False) -> RenderableType:
        """The lines as they stand now. Always the same number of lines, so that nothing jumps."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        progress = self._progress
        done = progress.step >= progress.total_steps or ended
        eta = (
            ""
            if done
            else f"ETA {formatting.format_duration(progress.eta_s)}"
            if progress.eta_s is not None
            else "starting"
        )
        head = Table.grid(padding=(0, 2), expand=True)
        for ratio in (None, 1, None, None):
            head.add_column(ratio=ratio, no_wrap=True)
        head.add_row(
            Text(progress.run_facts.name, style="bold"),
            ProgressBar(total=max(1, progress.total_steps), completed=progress.step),
            f"step {progress.step:>{len(str(progress.total_steps))}}/{progress.total_steps}",
            f"{eta:<16}",
        )
        first = (
            [
                f"loss {formatting.format_loss(progress.last_step_event.loss)}",
                *_format_step_numbers(progress.last_step_event),
            ]
            if progress.last_step_event
            else ["waiting for the first step"]
        )
        if progress.evaluation_under_way:
            share = progress.evaluation_under_way.num_samples_done / progress.evaluation_under_way.num_samples
            first.append(f"evaluating: {formatting.format_percent(share)}")
        elif progress.last_evaluation:
            best = ", best so far" if progress.last_evaluation.is_best else ""
            first.append(
                f"validation {formatting.format_loss(progress.last_evaluation.loss)} (step "
                f"{progress.last_evaluation.step}{best})"
            )
        third = []
        if progress.last_checkpoint:
            third.append(
                f"checkpoint at step {progress.last_checkpoint.step} "
                f"({formatting.format_bytes(progress.last_checkpoint.size_bytes)})"
            )
        if progress.skipped_steps or progress.rollbacks:
            third.append(
                f"non-finite steps: {progress.skipped_steps} skipped, "
                f"{formatting.format_plural(progress.rollbacks, 'rollback')}"
            )
        lines = [first, _format_speed(progress) or [""], third or ["no checkpoint yet"]]
        rows = [Text("  " + "   ".join(line), no_wrap=True, overflow="ellipsis") for line in lines]
        rows[2].stylize("dim")
        return Group(head, *rows)


_STYLE_BY_EVENT: dict[type[Event], str] = {
    HangDetected: "red",
    StragglerDetected: "yellow",
    WorkerFailure: "red",
    NonFiniteStep: "yellow",
    RunWarning: "yellow",
    CheckpointRejected: "red",
    CheckpointFailed: "red",
}


def _format_step_numbers(event: StepDone) -> list[str]:
    norm = [] if event.grad_norm is None else [f"grad {formatting.format_significant(event.grad_norm)}"]
    return [*norm, f"lr {event.lr:.2e}"]


def _format_speed(progress: RunProgress) -> list[str]:
    if progress.units_per_s is None:
        return []
    found = [
        formatting.format_rate(progress.units_per_s, progress.run_facts.unit),
        f"{formatting.format_duration(progress.step_seconds)}/step",
    ]
    if progress.mfu is not None:
        found.append(f"MFU {formatting.format_percent(progress.mfu)} (measured peak)")
    return found


def make_console(stream: TextIO, **options: Any) -> Console:
    """A rich console that outlives its stream; rich itself would end the program with it."""
    from rich.console import Console as RichConsole

    return RichConsole(file=cast(TextIO, SafeStream(stream)), highlight=False, **options)


def make_display(
    stream: TextIO, total_steps: int, facts: RunFacts, clock: Callable[[], float] = time.monotonic
) -> ProgressDisplay:
    """The display that suits a stream: in place on a terminal, lines elsewhere (a pipe, a file, a dumb terminal)."""
    if not stream.isatty():
        return LogProgressDisplay(stream, total_steps, facts, clock)
    console = make_console(stream)
    if console.is_dumb_terminal:
        return LogProgressDisplay(stream, total_steps, facts, clock)
    return TerminalProgressDisplay(stream, total_steps, facts, clock, console=console)
