"""Format events as text: one sentence for each kind that users want to read."""

from phalanx import formatting
from phalanx.run import Event
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointFailed,
    CheckpointRejected,
    CheckpointSaved,
    CheckpointUploaded,
    Compiled,
    EvaluationDone,
    EvaluationProgress,
    HangDetected,
    NonFiniteStep,
    RunEnded,
    RunWarning,
    StragglerDetected,
    TasksEvaluated,
    WorkerFailure,
)

ALERT_EVENTS = (
    HangDetected,
    StragglerDetected,
    WorkerFailure,
    NonFiniteStep,
    RunWarning,
    CheckpointRejected,
    CheckpointFailed,
)
"""Events that deserve attention."""


def describe_event(event: Event, world_size: int, step: int, total_steps: int) -> str:
    """Format an event that is not a step in one line; empty for kinds that users need not read. `world_size`, `step`
    and `total_steps`: workers of the run, its last step, and the number of steps of its recipe."""
    match event:
        case AttemptStarted():
            attempt_text = f"attempt {event.attempt}: " if event.attempt else ""
            start_text = (
                f"resuming at step {event.start_step} of {total_steps}" if event.start_step else f"{total_steps} steps"
            )
            return f"{attempt_text}{formatting.format_plural(world_size, 'worker')} on {event.device}, {start_text}"
        case Compiled():
            breaks = ""
            if event.num_graph_breaks:
                breaks = f", with {formatting.format_plural(event.num_graph_breaks, 'graph break')}"
            return (
                f"compiled {formatting.format_plural(event.num_blocks, 'block')} in "
                f"{formatting.format_duration(event.duration_s)}{breaks}"
            )
        case EvaluationProgress():
            return f"evaluating after step {event.step}: {event.num_samples_done:,} of {event.num_samples:,} samples"
        case EvaluationDone():
            listed = "".join(f"  {name} {formatting.format_loss(value)}" for name, value in event.metrics.items())
            best = "  (best so far)" if event.is_best else ""
            return (
                f"evaluation at step {event.step}: validation loss {formatting.format_loss(event.loss)} "
                f"on {formatting.format_plural(event.num_samples, 'sample')}{listed}{best}"
            )
        case TasksEvaluated():
            return f"tasks at step {event.step}: {describe_scores(event)}"
        case CheckpointSaved():
            return (
                f"saved checkpoint at step {event.step} ({formatting.format_bytes(event.size_bytes)}, "
                f"{stall(event.stall_s)} stall)"
            )
        case CheckpointUploaded():
            return (
                f"uploaded checkpoint of step {event.step} to {event.url} "
                f"({formatting.format_bytes(event.sent_bytes)} sent, {formatting.format_bytes(event.skipped_bytes)} "
                f"there already, {formatting.format_duration(event.duration_s)})"
            )
        case CheckpointRejected():
            return f"checkpoint rejected: {event.path}/{event.file}: {event.reason}"
        case CheckpointFailed():
            return f"checkpoint at step {event.step} failed: {event.reason}; training continues"
        case NonFiniteStep():
            return f"non-finite step {event.step}: {event.reason}, {event.action} ({event.num_skipped} skipped so far)"
        case WorkerFailure():
            return f"failure: {event.message}"
        case HangDetected():
            return describe_hang(event)
        case StragglerDetected():
            return describe_straggler(event)
        case RunWarning():
            return f"warning: {event.text}"
        case RunEnded():
            ended = "finished" if event.status == "done" else event.status
            reason = f"; {event.reason}" if event.reason else ""
            return f"{ended}: {event.step} of {formatting.format_plural(total_steps, 'step')}{reason}"
        case _:
            return ""


def describe_scores(event: TasksEvaluated) -> str:
    """Format the scores of tasks with their standard errors."""
    errors = {name: f" ± {formatting.format_significant(error, 2)}" for name, error in event.standard_errors.items()}
    return ", ".join(
        f"{name} {formatting.format_loss(value)}{errors.get(name, '')}" for name, value in event.metrics.items()
    )


def stall(seconds: float) -> str:
    """Format a stall in seconds, in ms where it is shorter."""
    return f"{1e3 * seconds:.1f} ms" if seconds < 1e-3 else formatting.format_duration(seconds)


CURRENT_THREAD_MARK = "Current thread"
"""How faulthandler begins with the thread that took the signal: the main one."""


def describe_hang(event: HangDetected) -> str:
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


def describe_straggler(event: StragglerDetected) -> str:
    """Describe a straggler: the rank, by how much it is slow, and what that costs."""
    return (
        f"straggler: rank {event.rank} on {event.host} takes {event.slowdown:.2f}x as long as its peers, which wait "
        f"{formatting.format_duration(event.wait_s_per_step)}/step for it "
        f"({formatting.format_percent(event.wait_fraction)} of "
        f"the time)"
    )
