"""Workers for the tests of trials: they report steps without training anything."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from phalanx.errors import RecipeError
from phalanx.run import Run
from phalanx.run.event_types import StepDone, StepPhases
from phalanx.train.reporter import make_reporter


def steps(payload: dict[str, Any]) -> None:
    """Steps of `seconds` without end. The worker kills itself after `last_step`, if given."""
    report = make_reporter(Run(Path(payload["folder"])), True, os.environ["PHALANX_EVENTS_FD"])
    is_rank_zero = os.environ["RANK"] == "0"
    number = 0
    while True:
        number += 1
        time.sleep(payload["seconds"])
        if is_rank_zero:
            seconds = payload["seconds"]
            numbers: dict[str, Any] = {"loss": 1.0, "grad_norm": 1.0, "lr": 1e-3, "units": 8}
            phases = StepPhases(data_wait=seconds / 4)
            report.report_event(StepDone(step=number, duration_s=seconds, breakdown_s=phases, **numbers))
            report.flush()
        if number == payload.get("last_step"):
            os.kill(os.getpid(), signal.SIGKILL)


def refuse(payload: dict[str, Any]) -> None:
    """As a worker whose recipe cannot run."""
    report = make_reporter(Run(Path(payload["folder"])), True, os.environ["PHALANX_EVENTS_FD"])
    error = RecipeError("model.build: no such thing")
    report.report_error(str(error), int(error.code))
    report.close()
    raise SystemExit(int(error.code))


def fail(payload: dict[str, Any]) -> None:
    """As a worker with a mistake in its code."""
    raise LookupError("not compiled")


def hang(payload: dict[str, Any]) -> None:
    signal.pause()
