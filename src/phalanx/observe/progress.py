"""A run while it goes, from its events alone: `show_event(event)` for each, `close()` at the end.

`TerminalProgressDisplay` redraws a few lines in place; `LogProgressDisplay` writes a line every few seconds and one for
whatever is not
an ordinary step. Showing a step costs a few microseconds unless it is time to draw, so 1 ms steps can be shown too.
Nothing here reads files (but `read_run_facts`), starts threads or asks for the time: the clock is given.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

from phalanx import formatting
from phalanx.observe.event_messages import describe_event
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
from phalanx.std_streams import SafeStream, escape_control_chars

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SPEED_WINDOW_S = 10.0
"""Seconds of steps that the shown speed is the mean of."""
DRAW_INTERVAL_S = 0.25
LOG_INTERVAL_S = 5.0


@dataclass(frozen=True)
class RunFacts:
    """What a display must know that events do not say. `matmul_flops_per_worker` is the measured matmul rate of one
    worker in the run's precision, in FLOP/s; without it, or without FLOPs a sample, no share of it is shown."""

    name: str = "run"
    unit: str = "tokens"
    units_per_sample: int = 1
    flops_per_sample: float | None = None
    matmul_flops_per_worker: float | None = None
    evaluation_interval_steps: int | None = None


def read_run_facts(run: Run) -> RunFacts:
    """Read the facts of a run from its resolved recipe, plan and cluster files; facts that are missing are not
    shown."""
    from phalanx.observe.metrics import measured_matmul_flops
    from phalanx.observe.run_info import drop_malformed, read_resolved_recipe

    recipe, plan, cluster = (
        read_resolved_recipe(run),
        drop_malformed(run.read_json_or_empty(run.plan)) or {},
        drop_malformed(run.read_json_or_empty(run.cluster)),
    )
    task, evaluation = recipe.get("task"), recipe.get("evaluation")
    interval = evaluation.get("every") if isinstance(evaluation, dict) else None
    return RunFacts(
        name=str(recipe.get("name", run.path.name)),
        unit=str(plan.get("unit") or ("samples" if task == "classification" else "tokens")),
        units_per_sample=int(plan.get("units_per_sample") or 1),
        flops_per_sample=plan.get("flops_per_sample"),
        matmul_flops_per_worker=measured_matmul_flops(cluster, str(recipe.get("precision")), 1),
        evaluation_interval_steps=interval if isinstance(interval, int) and interval > 0 else None,
    )


class ProgressDisplay(Protocol):
    """Shows a run's events as they come."""

    def show_event(self, event: Event) -> None:
        """Take one event, in the order of events.jsonl."""

    def close(self) -> None:
        """Leave the terminal as it was found. May be called twice."""


class RunProgress:
    """What the displays show, kept up to date event by event."""

    def __init__(self, total_steps: int, facts: RunFacts):
        self.total_steps, self.run_facts = total_steps, facts
        self.step = self.world_size = self.skipped_steps = self.rollbacks = 0
        self.last_step_event: StepDone | None = None
        self.last_evaluation: EvaluationDone | None = None
        self.last_checkpoint: CheckpointSaved | None = None
        self._window: deque[tuple[float, float, float]] = deque()
        self._window_units = self._window_s = 0.0
        self._first_step: tuple[float, int] | None = None
        self._evaluation_s = self._evaluation_s_before_step = 0.0

    def add_event(self, event: Event) -> None:
        """Count an event in."""
        if isinstance(event, StepDone):
            t, units, seconds = event.time, event.units, event.duration_s
            self.last_step_event = event
            self.step = event.step
            window = self._window
            window.append((t, units, seconds))
            self._window_units += units
            self._window_s += seconds
            self._evaluation_s_before_step = self._evaluation_s
            while window[0][0] < t - SPEED_WINDOW_S:
                _, old_amount, old_seconds = window.popleft()
                self._window_units -= old_amount
                self._window_s -= old_seconds
            if self._first_step is None or self.step <= self._first_step[1]:
                self._first_step = (t, self.step)
                self._evaluation_s = self._evaluation_s_before_step = 0.0
        elif isinstance(event, AttemptStarted):
            self.world_size, self.total_steps, self.step = event.world_size, event.total_steps, event.start_step
            self._first_step = None
            self._window.clear()
            self._window_units = self._window_s = 0.0
        elif isinstance(event, EvaluationDone):
            self.last_evaluation = event
            if self.run_facts.evaluation_interval_steps is not None:  # else they stay in the pace
                self._evaluation_s += event.duration_s
        elif isinstance(event, CheckpointSaved):
            self.last_checkpoint = event
        elif isinstance(event, NonFiniteStep):
            if event.action == "rollback":
                self.rollbacks += 1
            else:
                self.skipped_steps += 1

    @property
    def units_per_s(self) -> float | None:
        """Units a second within the steps of the window."""
        return self._window_units / self._window_s if self._window_s > 1e-9 else None

    @property
    def step_seconds(self) -> float | None:
        """Mean step time in the window."""
        return self._window_s / len(self._window) if self._window and self._window_s > 1e-9 else None

    @property
    def mfu(self) -> float | None:
        """MFU relative to the measured peak of all workers."""
        facts, speed = self.run_facts, self.units_per_s
        if not facts.flops_per_sample or not facts.matmul_flops_per_worker or speed is None:
            return None
        return (
            facts.flops_per_sample
            * speed
            / facts.units_per_sample
            / (facts.matmul_flops_per_worker * max(1, self.world_size))
        )

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at the pace of this attempt since its first step, with saves, and with the evaluations to come
        once one was measured. The first step itself is left out: it warms up and compiles."""
        if self._first_step is None or self.last_step_event is None:
            return None
        began, first = self._first_step
        if self.step == first:
            step_s = self.step_seconds
        else:
            step_s = (self.last_step_event.time - began - self._evaluation_s_before_step) / (self.step - first)
        if step_s is None:
            return None
        evaluation_s = self._evaluations_left() * (self.last_evaluation.duration_s if self.last_evaluation else 0.0)
        return max(0, self.total_steps - self.step) * step_s + evaluation_s

    def _evaluations_left(self) -> int:
        """Evaluations after this step, the last of them at the end."""
        every = self.run_facts.evaluation_interval_steps
        return 0 if every is None else max(0, -(-self.total_steps // every) - self.step // every)


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
        if progress.last_evaluation:
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
