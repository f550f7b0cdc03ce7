"""Workers for the tests of bouts: they report steps without training anything."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from phalanx.errors import RecipeError
from phalanx.run import Run
from phalanx.train.reporter import reporter


def steps(payload: dict[str, Any]) -> None:
    """Steps of `seconds` without end; with `fall`, so many and then the worker's end. Each leaves a byte in `count`."""
    report = reporter(Run(Path(payload["folder"])), True, os.environ["PHALANX_EVENTS"])
    leads = os.environ["RANK"] == "0"
    number = 0
    while True:
        number += 1
        time.sleep(payload["seconds"])
        with open(Path(payload["folder"]) / f"count-{os.environ['RANK']}", "a") as file:
            file.write(".")
        if leads:
            parts = {"data": payload["seconds"] / 4}
            report.event("step", step=number, seconds=payload["seconds"], parts=parts)
            report.flush()
        if number == payload.get("fall"):
            os.kill(os.getpid(), signal.SIGKILL)


def refuse(payload: dict[str, Any]) -> None:
    """As a worker whose recipe cannot run."""
    report = reporter(Run(Path(payload["folder"])), True, os.environ["PHALANX_EVENTS"])
    error = RecipeError("model.build: no such thing")
    report.error(str(error), int(error.code))
    report.close()
    raise SystemExit(int(error.code))


def fail(payload: dict[str, Any]) -> None:
    """As a worker with a mistake in its code."""
    raise LookupError("not compiled")


def hang(payload: dict[str, Any]) -> None:
    signal.pause()
