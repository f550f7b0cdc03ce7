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
            again += "again " if event.scaled_up else ""
            begin = f"from step {event.start_step}" if event.start_step else "from the beginning"
            return f"{again}{units.times(world, 'worker')} on {event.device}, {begin}, {total} steps in all"
        case Compiled():
            breaks = f", with {units.times(event.num_graph_breaks, 'graph break')}" if event.num_graph_breaks else ""
            return f"compiled {units.times(event.num_blocks, 'block')} in {units.duration(event.duration_s)}{breaks}"
        case EvaluationDone():
            listed = "".join(f"  {name} {units.loss(value)}" for name, value in event.metrics.items())
            best = "  (best so far)" if event.is_best else ""
            return f"evaluation at step {event.step}: held-out loss {units.loss(event.loss)}{listed}{best}"
        case CheckpointSaved():
            size, stall = units.size(event.size_bytes), units.duration(event.stall_s)
            return f"checkpoint at step {event.step}: {size}, stood still {stall}"
        case CheckpointRejected():
            return f"checkpoint rejected: {event.path}/{event.file}: {event.reason}"
        case CheckpointFailed():
            return f"checkpoint failed at step {event.step}: {event.reason}; training goes on"
        case GradSyncSelected():
            return f"exchange at step {event.step}: {event.selected}: {event.reason}"
        case NonFiniteStep():
            skipped = f"(skipped steps so far: {event.num_skipped})"
            return f"guard at step {event.step}: {event.reason}, {event.action} {skipped}"
        case WorkerFailure():
            return f"fault: {event.message}"
        case HangDetected():
            return hang_in_words(event)
        case StragglerDetected():
            return straggler_in_words(event)
        case RunWarning():
            return f"warning: {event.text}"
        case RunEnded():
            return f"{event.status} at step {event.step} of {total}"
        case _:
            return ""


CURRENT = "Current thread"
"""How faulthandler begins with the thread that took the signal: the main one."""


def hang_in_words(event: HangDetected) -> str:
    """Who seems stuck, where, in what, and the innermost line of its stack that is not a library's, if it told one: of
    the thread that trains, which is printed as the current one, and not of those that read or save beside it."""
    how = "is held still" if event.is_stopped else "gives no sign of life"
    said = f"hang: worker {event.rank} on {event.host} {how} for {units.duration(event.silence_s)}"
    said += f", in step {event.step}, doing: {event.phase}"
    trains = (event.stack or "").rpartition(CURRENT)[2]
    lines = [line.strip() for line in trains.splitlines() if line.strip().startswith("File ")]
    own = [line for line in lines if "/site-packages/" not in line and "/lib/python" not in line]
    at = (own or lines)[:1]
    return said + (f"; {at[0]}" if at else "")


def straggler_in_words(event: StragglerDetected) -> str:
    """Who is slow, by how much, and what it costs."""
    return (
        f"straggler: worker {event.rank} on {event.host} takes {event.slowdown:.2f} x as long as its peers: they wait "
        f"{units.duration(event.wait_s_per_step)} a step for it, {units.percent(event.wait_fraction)} of the time"
    )
