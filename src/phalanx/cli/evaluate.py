"""`phalanx evaluate`: evaluate a run's checkpoint on the validation set."""

import json as json_
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from phalanx.errors import UsageError


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
    from phalanx.streams import printable

    found = Run.existing(run)

    from phalanx.data import open_data
    from phalanx.train.evaluation import evaluate as score
    from phalanx.train.objective import Objective, Scoring
    from phalanx.train.parallel.mesh import alone
    from phalanx.train.place import from_environment
    from phalanx.train.tasks import load_task
    from phalanx.train.trained import check_data, given_device, load_trained

    place = from_environment({}, device or given_device(found))
    trained = load_trained(found, step, best, place.device, trust_code)
    for note in trained.notes:
        print(f"warning: {printable(note)}", file=sys.stderr)
    recipe = trained.recipe
    check_data(recipe)
    data = open_data(recipe.data, recipe.evaluation, recipe.seed)
    if data.held_out_samples == 0:
        raise UsageError(f"{run}: no validation set (evaluation.holdout_fraction = 0 and no evaluation.source)")
    assert isinstance(recipe.batch.micro_size, int)
    scores = score(
        Objective(trained.model, Scoring(load_task(recipe.task, trained.folder), recipe.precision, place.device)),
        data,
        place=place,
        mesh=alone(),
        samples=samples or data.held_out_samples,
        micro=recipe.batch.micro_size,
    )
    assert scores is not None
    facts = {"checkpoint": trained.checkpoint.name, "loss": scores.loss, **scores.metrics, "samples": scores.samples}
    if json:
        typer.echo(json_.dumps({**facts, "seconds": scores.seconds}))
        return
    for name, value in facts.items():
        typer.echo(f"{name:<11} {value:.6g}" if isinstance(value, float) else f"{name:<11} {value}")
    if recipe.task == "language-modeling":
        import math

        typer.echo(f"{'perplexity':<11} {math.exp(scores.loss):.6g}")
