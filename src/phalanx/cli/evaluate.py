"""`phalanx evaluate`: evaluate a run's checkpoint on the validation set."""

import json
import math
from typing import Annotated

import typer

from phalanx.cli.options import (
    BestOption,
    DeviceOption,
    JsonOption,
    RunArgument,
    StepOption,
    TrustCodeOption,
    print_warning,
)
from phalanx.text_table import format_facts

TASKS_WITH_PERPLEXITY = ("language-modeling", "chat", "distillation")
"""Tasks that are scored by the mean cross-entropy of tokens."""


def evaluate(
    run: RunArgument,
    samples: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Evaluate at most N validation samples.", show_default="all")
    ] = None,
    step: StepOption = None,
    best: BestOption = False,
    trust_code: TrustCodeOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a run's checkpoint on the validation set: loss and the task's metrics."""
    from phalanx.run import Run

    run_dir = Run.open_existing(run)
    from phalanx.app.evaluate import CheckpointSelection, evaluate_run

    scores = evaluate_run(run_dir, CheckpointSelection(step, best, trust_code), device, samples, print_warning)
    result = scores.result
    facts = {"checkpoint": scores.checkpoint, "loss": result.loss, **result.metrics, "num_samples": result.num_samples}
    if as_json:
        typer.echo(json.dumps({**facts, "duration_s": result.duration_s}))
        return
    if scores.task in TASKS_WITH_PERPLEXITY:
        facts["perplexity"] = math.exp(result.loss)
    texts = (
        (name.removeprefix("num_"), f"{value:.6g}" if isinstance(value, float) else str(value))
        for name, value in facts.items()
    )
    typer.echo("\n".join(format_facts(texts)))
