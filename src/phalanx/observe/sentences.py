"""Events in words: one sentence for each kind that somebody wants to read."""

from phalanx.observe import units
from phalanx.run import Event
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
    StragglerDetected,
    WorkerFailure,
)


def sentence(event: Event, world: int, step: int, total: int) -> str:
    """One line for an event that is not a step; empty for kinds that nobody needs to read. Of the run are known its
    workers, the last step and all that it shall have."""
    match event:
        case AttemptStarted():
            again = f"attempt {event.attempt}: " if event.attempt else ""
            again += "scaled up to " if event.scaled_up else ""
            begin = f"resuming at step {event.start_step} of {total}" if event.start_step else f"{total} steps"
            return f"{again}{units.times(world, 'worker')} on {event.device}, {begin}"
        case Compiled():
            breaks = f", with {units.times(event.num_graph_breaks, 'graph break')}" if event.num_graph_breaks else ""
            return f"compiled {units.times(event.num_blocks, 'block')} in {units.duration(event.duration_s)}{breaks}"
        case EvaluationDone():
            listed = "".join(f"  {name} {units.loss(value)}" for name, value in event.metrics.items())
            best = "  (best so far)" if event.is_best else ""
            return f"evaluation at step {event.step}: validation loss {units.loss(event.loss)}{listed}{best}"
        case CheckpointSaved():
            return (
                f"saved checkpoint at step {event.step} ({units.size(event.size_bytes)}, {stall(event.stall_s)} stall)"
            )
        case CheckpointRejected():
            return f"checkpoint rejected: {event.path}/{event.file}: {event.reason}"
        case CheckpointFailed():
            return f"checkpoint at step {event.step} failed: {event.reason}; training continues"
        case GradSyncSelected():
            return f"gradient synchronization at step {event.step}: {event.selected}: {event.reason}"
        case NonFiniteStep():
            return f"non-finite step {event.step}: {event.reason}, {event.action} ({event.num_skipped} skipped so far)"
        case WorkerFailure():
            return f"failure: {event.message}"
        case HangDetected():
            return hang_in_words(event)
        case StragglerDetected():
            return straggler_in_words(event)
        case RunWarning():
            return f"warning: {event.text}"
        case RunEnded():
            ended = "finished" if event.status == "done" else event.status
            return f"{ended}: {event.step} of {units.times(total, 'step')}"
        case _:
            return ""


def stall(seconds: float) -> str:
    """Format a stall in seconds, in ms where it is shorter."""
    return f"{1e3 * seconds:.1f} ms" if seconds < 1e-3 else units.duration(seconds)


CURRENT = "Current thread"
"""How faulthandler begins with the thread that took the signal: the main one."""


def hang_in_words(event: HangDetected) -> str:
    """Who seems stuck, where, in what, and the innermost line of its stack that is not a library's, if it told one: of
    the thread that trains, which is printed as the current one, and not of those that read or save beside it."""
    how = "has been stopped (SIGSTOP)" if event.is_stopped else "has sent no heartbeat"
    said = f"hang: rank {event.rank} on {event.host} {how} for {units.duration(event.silence_s)}"
    said += f", step {event.step}, phase: {event.phase}"
    trains = (event.stack or "").rpartition(CURRENT)[2]
    lines = [line.strip() for line in trains.splitlines() if line.strip().startswith("File ")]
    own = [line for line in lines if "/site-packages/" not in line and "/lib/python" not in line]
    at = (own or lines)[:1]
    return said + (f"; {at[0]}" if at else "")


def straggler_in_words(event: StragglerDetected) -> str:
    """Who is slow, by how much, and what it costs."""
    return (
        f"straggler: rank {event.rank} on {event.host} takes {event.slowdown:.2f}x as long as its peers, which wait "
        f"{units.duration(event.wait_s_per_step)}/step for it ({units.percent(event.wait_fraction)} of the time)"
    )
