"""Read from a run's events how often it failed so far."""

from phalanx.cluster.checkpoint_interval import DEFAULT_DEVICE_FAILURES_PER_S
from phalanx.run import Run, read_events
from phalanx.run.event_types import AttemptStarted, CheckpointIntervalChosen, StepDone, WorkerFailure
from phalanx.train.checkpoint.interval import FailureHistory


def read_failure_history(run: Run, devices: int) -> FailureHistory:
    """Read a run's failures, with the expected seconds between failures on `devices` devices."""
    failures, run_s, every = 0, 0.0, None
    last: float | None = None
    for event in read_events(run.events):
        if isinstance(event, WorkerFailure):
            failures += 1
        elif isinstance(event, CheckpointIntervalChosen):
            every = event.interval_steps
        elif isinstance(event, AttemptStarted):
            last = event.time
        elif isinstance(event, StepDone) and last is not None:
            run_s, last = run_s + max(0.0, event.time - last), event.time
    failure_rate = run.read_json_or_empty(run.cluster).get("failures_per_device_s")
    rate = (
        float(failure_rate)
        if isinstance(failure_rate, int | float) and failure_rate > 0
        else DEFAULT_DEVICE_FAILURES_PER_S
    )
    return FailureHistory(1.0 / (rate * devices), failures, run_s, every)
