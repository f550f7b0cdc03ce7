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
    from phalanx.std_streams import escape_control_chars

    run_dir = Run.open_existing(run)

    from phalanx.data import open_data
    from phalanx.train.distributed.environment import dist_env_from_environment
    from phalanx.train.distributed.mesh import make_single_worker_mesh
    from phalanx.train.evaluation import evaluate as score
    from phalanx.train.inference import check_data, given_device, load_trained_model
    from phalanx.train.loss import LossFn, LossModule
    from phalanx.train.tasks import load_task

    dist_env = dist_env_from_environment({}, device or given_device(run_dir))
    trained = load_trained_model(run_dir, step, best, dist_env.device, trust_code)
    for note in trained.notes:
        print(f"warning: {escape_control_chars(note)}", file=sys.stderr)
    recipe = trained.recipe
    check_data(recipe)
    data = open_data(recipe.data, recipe.evaluation, recipe.seed)
    if data.num_validation_samples == 0:
        raise UsageError(f"{run}: no validation set (evaluation.holdout_fraction = 0 and no evaluation.source)")
    scores = score(
        LossModule(trained.model, LossFn(load_task(recipe.task, trained.folder), recipe.precision, dist_env.device)),
        data,
        dist_env=dist_env,
        mesh=make_single_worker_mesh(),
        max_samples=samples or data.num_validation_samples,
        micro_size=recipe.batch.micro_size,
    )
    assert scores is not None
    facts = {
        "checkpoint": trained.checkpoint.name,
        "loss": scores.loss,
        **scores.metrics,
        "samples": scores.num_samples,
    }
    if json:
        typer.echo(json_.dumps({**facts, "seconds": scores.duration_s}))
        return
    for name, value in facts.items():
        typer.echo(f"{name:<11} {value:.6g}" if isinstance(value, float) else f"{name:<11} {value}")
    if recipe.task == "language-modeling":
        import math

        typer.echo(f"{'perplexity':<11} {math.exp(scores.loss):.6g}")
