"""`phalanx evaluate`: evaluate a run's checkpoint on the validation set."""

import json as json_
import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.ctrl_c import import_torch
from phalanx.cli.stderr import print_warning
from phalanx.text_table import format_facts


class Device(StrEnum):
    """What a recipe's `device` may be."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    XPU = "xpu"
    MPS = "mps"


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    samples: Annotated[
        int | None,
        typer.Option(min=1, max=10**10, metavar="N", help="Evaluate at most N validation samples.", show_default="all"),
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, max=10**10, metavar="N", help="Step of the checkpoint.", show_default="newest")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Use the checkpoint with the lowest validation loss.")] = False,
    trust_code: Annotated[
        bool,
        typer.Option("--trust-code", help="Import the run's code even if you did not train with it on this machine."),
    ] = False,
    device: Annotated[
        Device | None, typer.Option(help="Device to evaluate on.", show_default="as in the run's recipe")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate a run's checkpoint on the validation set: loss and the task's metrics."""
    from phalanx.run import Run

    run_dir = Run.open_existing(run)
    import_torch()
    from phalanx.app.evaluate import evaluate_run
    from phalanx.app.trained_model import CheckpointSelection

    scores = evaluate_run(run_dir, CheckpointSelection(step, best, trust_code), device, samples, print_warning)
    result = scores.result
    facts = {"checkpoint": scores.checkpoint, "loss": result.loss, **result.metrics, "num_samples": result.num_samples}
    if json:
        typer.echo(json_.dumps({**facts, "duration_s": result.duration_s}))
        return
    if scores.task == "language-modeling":
        facts["perplexity"] = math.exp(result.loss)
    texts = (
        (name.removeprefix("num_"), f"{value:.6g}" if isinstance(value, float) else str(value))
        for name, value in facts.items()
    )
    typer.echo("\n".join(format_facts(texts)))
