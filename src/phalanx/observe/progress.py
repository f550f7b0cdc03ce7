"""A run while it goes, from its events alone: a sentence for each event that users want to read, how far the run is,
how fast, when it will be done, and displays of that.

`LogProgressDisplay` writes a line every few seconds and one for each event that is not an ordinary step.
`TerminalProgressDisplay` has a bar below these lines, redrawn in place, instead of lines for steps.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

from phalanx import formatting
from phalanx.run import Event, Run, event_types
from phalanx.std_streams import SafeStream, escape_control_chars

if TYPE_CHECKING:
    from rich.console import Console


ALERT_EVENTS = (
    event_types.HangDetected,
    event_types.StragglerDetected,
    event_types.WorkerFailure,
    event_types.NonFiniteStep,
    event_types.RunWarning,
    event_types.CheckpointRejected,
    event_types.CheckpointFailed,
)
"""Events that deserve attention."""


def describe_event(event: Event, world_size: int, step: int, total_steps: int) -> str:
    """Format an event that is not a step in one line; empty for kinds that users need not read. `world_size`, `step`
    and `total_steps`: workers of the run, its last step, and the number of steps of its recipe."""
    match event:
        case event_types.AttemptStarted():
            attempt_text = f"attempt {event.attempt}: " if event.attempt else ""
            resuming = f"resuming at step {event.start_step} of {total_steps}"
            start_text = resuming if event.start_step else f"{total_steps} steps"
            return f"{attempt_text}{formatting.format_plural(world_size, 'worker')} on {event.device}, {start_text}"
        case event_types.Compiled():
            breaks = ""
            if event.num_graph_breaks:
                breaks = f", with {formatting.format_plural(event.num_graph_breaks, 'graph break')}"
            blocks = formatting.format_plural(event.num_blocks, "block")
            return f"compiled {blocks} in {formatting.format_duration(event.duration_s)}{breaks}"
        case event_types.EvaluationProgress():
            return f"evaluating after step {event.step}: {event.num_samples_done:,} of {event.num_samples:,} samples"
        case event_types.EvaluationDone():
            listed = "".join(f"  {name} {formatting.format_loss(value)}" for name, value in event.metrics.items())
            best = "  (best so far)" if event.is_best else ""
            return (
                f"evaluation at step {event.step}: validation loss {formatting.format_loss(event.loss)} "
                f"on {formatting.format_plural(event.num_samples, 'sample')}{listed}{best}"
            )
        case event_types.TasksEvaluated():
            return f"tasks at step {event.step}: {describe_scores(event)}"
        case event_types.CheckpointSaved():
            size = formatting.format_bytes(event.size_bytes)
            return f"saved checkpoint at step {event.step} ({size}, {stall(event.stall_s)} stall)"
        case event_types.CheckpointUploaded():
            sent, skipped = map(formatting.format_bytes, (event.sent_bytes, event.skipped_bytes))
            took = f"{sent} sent, {skipped} there already, {formatting.format_duration(event.duration_s)}"
            return f"uploaded checkpoint of step {event.step} to {event.url} ({took})"
        case event_types.CheckpointRejected():
            return f"checkpoint rejected: {event.path}/{event.file}: {event.reason}"
        case event_types.CheckpointFailed():
            return f"checkpoint at step {event.step} failed: {event.reason}; training continues"
        case event_types.NonFiniteStep():
            return f"non-finite step {event.step}: {event.reason}, {event.action} ({event.num_skipped} skipped so far)"
        case event_types.WorkerFailure():
            return f"failure: {event.message}"
        case event_types.HangDetected():
            return describe_hang(event)
        case event_types.StragglerDetected():
            return describe_straggler(event)
        case event_types.RunWarning():
            return f"warning: {event.text}"
        case event_types.RunEnded():
            ended = "finished" if event.status == "done" else event.status
            reason = f"; {event.reason}" if event.reason else ""
            return f"{ended}: {event.step} of {formatting.format_plural(total_steps, 'step')}{reason}"
        case _:
            return ""


def stall(seconds: float) -> str:
    """Format a stall in seconds, in ms where it is shorter."""
    return f"{1e3 * seconds:.1f} ms" if seconds < 1e-3 else formatting.format_duration(seconds)


CURRENT_THREAD_MARK = "Current thread"
"""How faulthandler begins with the thread that took the signal: the main one."""


def describe_scores(event: event_types.TasksEvaluated) -> str:
    """Format the scores of tasks with their standard errors."""
    errors = {name: f" ± {formatting.format_significant(error, 2)}" for name, error in event.standard_errors.items()}
    return ", ".join(
        f"{name} {formatting.format_loss(value)}{errors.get(name, '')}" for name, value in event.metrics.items()
    )


def describe_hang(event: event_types.HangDetected) -> str:
    """Describe a hang: the rank, where it is, its phase, and the innermost line of its stack outside libraries, if it
    sent one. The line is that of the training thread, which is printed as the current one, and not of threads that read
    data or save."""
    symptom = "has been stopped (SIGSTOP)" if event.is_stopped else "has sent no heartbeat"
    message = f"hang: rank {event.rank} on {event.host} {symptom} for {formatting.format_duration(event.silence_s)}"
    message += f", step {event.step}, phase: {event.phase}"
    main_thread_stack = (event.stack or "").rpartition(CURRENT_THREAD_MARK)[2]
    lines = [line.strip() for line in main_thread_stack.splitlines() if line.strip().startswith("File ")]
    user_lines = [line for line in lines if "/site-packages/" not in line and "/lib/python" not in line]
    innermost = (user_lines or lines)[:1]
    return message + (f"; {innermost[0]}" if innermost else "")


def describe_straggler(event: event_types.StragglerDetected) -> str:
    """Describe a straggler: the rank, by how much it is slow, and what that costs."""
    wait, share = formatting.format_duration(event.wait_s_per_step), formatting.format_percent(event.wait_fraction)
    return (
        f"straggler: rank {event.rank} on {event.host} takes {event.slowdown:.2f}x as long as its peers, which wait "
        f"{wait}/step for it ({share} of the time)"
    )


SPEED_WINDOW_S = 10.0
"""Seconds of steps that the shown speed is the mean of."""


@dataclass(frozen=True)
class RunFacts:
    """What a display must know that events do not say. `matmul_flops_per_worker` is the measured matmul rate of one
    worker in the run's precision, in FLOP/s; without it, or without FLOPs a sample, no share of it is shown."""

    name: str = "run"
    unit: str = "tokens"
    units_per_sample: int = 1
    flops_per_sample: float | None = None
    matmul_flops_per_worker: float | None = None

    def compute_mfu(self, units_per_s: float | None, world_size: int) -> float | None:
        """Compute MFU relative to the measured peak of all workers."""
        from phalanx.observe.metrics import compute_mfu

        if not self.flops_per_sample or not self.matmul_flops_per_worker or not units_per_s:
            return None
        model_flops_per_s = self.flops_per_sample * units_per_s / self.units_per_sample
        return compute_mfu(model_flops_per_s, self.matmul_flops_per_worker * max(1, world_size))


def read_run_facts(run: Run) -> RunFacts:
    """Read the facts of a run from its resolved recipe, plan and cluster files; facts that are missing are not
    shown."""
    from phalanx.observe.metrics import measured_matmul_flops
    from phalanx.observe.run_info import read_resolved_recipe

    recipe = read_resolved_recipe(run)
    plan = run.read_json_or_empty(run.plan)
    cluster = run.read_json_or_empty(run.cluster)
    return RunFacts(
        name=str(recipe.get("name", run.path.name)),
        unit=str(plan.get("unit") or ("samples" if recipe.get("task") == "classification" else "tokens")),
        units_per_sample=int(plan.get("units_per_sample") or 1),
        flops_per_sample=plan.get("flops_per_sample"),
        matmul_flops_per_worker=measured_matmul_flops(cluster, str(recipe.get("precision")), 1),
    )


class RunProgress:
    """What the displays show, kept up to date event by event."""

    def __init__(self, total_steps: int, facts: RunFacts):
        self.total_steps, self.run_facts = total_steps, facts
        self.step = self.world_size = 0
        self.last_step_event: event_types.StepDone | None = None
        self._window: deque[tuple[float, float, float]] = deque()
        self._window_units = self._window_s = 0.0
        self._first_step: tuple[float, int] | None = None

    def add_event(self, event: Event) -> None:
        """Count an event in."""
        if isinstance(event, event_types.StepDone):
            t, units, seconds = event.time, event.units, event.duration_s
            self.last_step_event = event
            self.step = event.step
            window = self._window
            window.append((t, units, seconds))
            self._window_units += units
            self._window_s += seconds
            while window[0][0] < t - SPEED_WINDOW_S:
                _, old_amount, old_seconds = window.popleft()
                self._window_units -= old_amount
                self._window_s -= old_seconds
            if self._first_step is None or self.step <= self._first_step[1]:
                self._first_step = (t, self.step)
        elif isinstance(event, event_types.AttemptStarted):
            self.world_size, self.total_steps, self.step = event.world_size, event.total_steps, event.start_step
            self._first_step = None
            self._window.clear()
            self._window_units = self._window_s = 0.0

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
        return self.run_facts.compute_mfu(self.units_per_s, self.world_size)

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at the pace of this attempt since its first step, with saves and evaluations. The first step
        itself is left out: it warms up and compiles."""
        if self._first_step is None or self.last_step_event is None:
            return None
        began, first = self._first_step
        step_s = self.step_seconds if self.step == first else (self.last_step_event.time - began) / (self.step - first)
        return None if step_s is None else max(0, self.total_steps - self.step) * step_s


DRAW_INTERVAL_S = 0.25
LOG_INTERVAL_S = 5.0


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
        """Take one event, in the order of events.jsonl."""
        self._progress.add_event(event)
        if isinstance(event, event_types.StepDone):
            now = self._clock()
            if now >= self._next_log_at or event.step == self._progress.total_steps:
                self._next_log_at = now + self._interval_s
                self._last_logged_step = event.step
                self._show_step(event)
            return
        progress = self._progress
        is_logged = progress.step == self._last_logged_step
        if isinstance(event, event_types.RunEnded) and progress.last_step_event is not None and not is_logged:
            self._show_step(progress.last_step_event)
        if text := describe_event(event, progress.world_size, progress.step, progress.total_steps):
            self._write_line(event, escape_control_chars(text))
        if isinstance(event, event_types.AttemptStarted):
            self._next_log_at = float("-inf")

    def close(self) -> None:
        """Leave the terminal as it was found. May be called twice."""
        self._stream.flush()

    def _show_step(self, event: event_types.StepDone) -> None:
        self._write_line(event, "  ".join(self._format_step(event)))

    def _format_step(self, event: event_types.StepDone) -> list[str]:
        """The parts of a line about the newest step."""
        progress = self._progress
        width = len(str(progress.total_steps))
        parts = [f"step {progress.step:>{width}}/{progress.total_steps}", f"loss {formatting.format_loss(event.loss)}"]
        parts += ["skipped"] if event.skip_reason else []
        parts += [] if event.grad_norm is None else [f"grad {formatting.format_significant(event.grad_norm)}"]
        parts.append(f"lr {event.lr:.2e}")
        if progress.units_per_s is not None:
            parts.append(formatting.format_rate(progress.units_per_s, progress.run_facts.unit))
            parts.append(f"{formatting.format_duration(progress.step_seconds)}/step")
        if progress.mfu is not None:
            parts.append(f"MFU {formatting.format_percent(progress.mfu)} (measured peak)")
        if progress.step < progress.total_steps and progress.eta_s is not None:
            parts.append(f"ETA {formatting.format_duration(progress.eta_s)}")
        return parts

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


class TerminalProgressDisplay(LogProgressDisplay):
    """A bar with the newest step, redrawn in place at most every `interval_s` seconds. Other events are printed
    above."""

    def __init__(
        self,
        stream: TextIO,
        total_steps: int,
        facts: RunFacts,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = DRAW_INTERVAL_S,
        console: "Console | None" = None,
    ):
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__(stream, total_steps, facts, clock, interval_s)
        # No refresh thread: this display draws when events come, and only then. What is printed meanwhile is led above
        # the bar, unless it goes to a file anyway.
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=console or make_console(stream),
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._bar.add_task(facts.name, total=max(1, total_steps), text="starting")
        self._bar.start()

    def close(self) -> None:
        self._bar.refresh()
        self._bar.stop()

    def _show_step(self, event: event_types.StepDone) -> None:
        progress = self._progress
        text = "  ".join(self._format_step(event))
        self._bar.update(self._task, total=max(1, progress.total_steps), completed=progress.step, text=text)
        self._bar.refresh()

    def _write_line(self, event: Event, text: str) -> None:
        style = "yellow" if isinstance(event, ALERT_EVENTS) else None
        self._bar.console.print(text, style=style, markup=False, highlight=False)


def make_console(stream: TextIO, **options: Any) -> "Console":
    """A rich console that outlives its stream; rich itself would end the program with it."""
    from rich.console import Console as RichConsole

    return RichConsole(file=cast(TextIO, SafeStream(stream)), highlight=False, **options)


def make_display(
    stream: TextIO, total_steps: int, facts: RunFacts, clock: Callable[[], float] = time.monotonic
) -> LogProgressDisplay:
    """The display that suits a stream: in place on a terminal, lines elsewhere (a pipe, a file, a dumb terminal)."""
    if stream.isatty() and not (console := make_console(stream)).is_dumb_terminal:
        return TerminalProgressDisplay(stream, total_steps, facts, clock, console=console)
    return LogProgressDisplay(stream, total_steps, facts, clock)


class DeferredDisplay:
    """A run's progress display where the facts that it shows are known only when training starts: lines before that."""

    def __init__(self, run: Run, stream: TextIO):
        self._run, self._stream = run, stream
        self._display = LogProgressDisplay(stream, 0, RunFacts(run.path.name))
        self._has_started = False

    def show_event(self, event: Event) -> None:
        """Show one event; events come in the order of events.jsonl."""
        if isinstance(event, event_types.AttemptStarted) and not self._has_started:
            self._has_started = True
            facts = read_run_facts(self._run) if self._run.resolved.is_file() else RunFacts(self._run.path.name)
            self._display = make_display(self._stream, 0, facts)
        self._display.show_event(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._display.close()
