"""`phalanx train`: parse, start the run, show it, leave with its exit code."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.errors import UsageError
from phalanx.streams import word_of


def train(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="Recipe (YAML), or a script that calls phalanx.join.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Overrides, such as steps=50 optimizer.lr=3e-4; arguments of a script."
        ),
    ] = None,
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="Run directory.", show_default="runs/<name>")] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc-per-node",
            min=1,
            max=100_000,
            metavar="N",
            help="Workers on each node.",
            show_default="as the recipe's parallelism requires, else one per GPU, else 1",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Resume although the recipe or the data changed; the change is recorded.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Prepare the data and print the resolved recipe, without training.")
    ] = False,
    on: Annotated[
        str, typer.Option("--on", metavar="BACKEND", help="Backend: local, slurm, kubernetes or ray.")
    ] = "local",
    nodes: Annotated[int, typer.Option(min=1, max=10**6, metavar="N", help="Number of nodes, with --on.")] = 1,
    devices: Annotated[
        int | None, typer.Option("--gpus", min=0, max=10_000, metavar="N", help="GPUs on each node, with --on.")
    ] = None,
    limit: Annotated[
        str | None, typer.Option("--time-limit", metavar="TIME", help="Time limit such as 2h, with --on.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--backend-option", "-o", metavar="KEY=VALUE", help="Backend option, such as partition=gpu (repeatable)."
        ),
    ] = None,
    code: Annotated[
        str | None,
        typer.Option(
            "--snapshot",
            metavar="workdir|REV",
            help="Train a copy of the recipe's directory, or of a git revision, with --on.",
        ),
    ] = None,
) -> int:
    """Train a recipe, or resume a run.

    An interrupted run resumes from its last good checkpoint; a finished run resumes if steps were raised. Ctrl-C saves
    a checkpoint and exits with 75; a second Ctrl-C stops immediately. Started by torchrun or srun (RANK and WORLD_SIZE
    are set), this process is one worker.
    """
    from phalanx.cli.training import follow_leader, train_here, train_outside, train_own_loop
    from phalanx.run.membership import Membership

    given = overrides or []
    if on != "local":
        from phalanx.cli import submitting

        more: dict[str, Any] = {"nodes": nodes, "devices": devices, "limit": submitting.seconds_of(limit)}
        more["options"] = submitting.pairs(option or [], "--backend-option")
        job = submitting.recipe_job(recipe, given, run, nproc, force, None, code, **more)
        assert job.run is not None
        return submitting.train_on(on, job, job.run, dry_run, sys.stderr)
    if nodes > 1 or option or devices is not None or limit is not None or code is not None:
        raise UsageError(
            "--nodes, --gpus, --time-limit, --snapshot and --backend-option need --on slurm, ray or kubernetes"
        )
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    outside = bool(rank and world) and not os.environ.get("PHALANX_NUM_NODES")
    if recipe.suffix == ".py":
        if dry_run:
            raise UsageError(f"--dry-run is for recipes; {recipe} is a script, which can only be run")
        if outside:
            raise UsageError(
                f"this is a worker of torchrun or srun, which can start the script directly: torchrun {word_of(recipe)}"
            )
        if (several := Membership.from_environment(os.environ).nodes) > 1:
            raise UsageError(
                f"PHALANX_NUM_NODES={several}: a script runs on one node here; on several torchrun starts its workers: "
                f"torchrun --nnodes {several} {word_of(recipe)}"
            )
        return train_own_loop(recipe, given, run, nproc, force, sys.stderr)
    if outside:
        refused = (
            "--dry-run" if dry_run else f"--nproc-per-node {nproc}" if nproc not in (None, _number(world)) else None
        )
        if refused:
            raise UsageError(
                f"{refused}: RANK={rank} and WORLD_SIZE={world} are set, so this is one worker of a launcher's, "
                "which sets how many there are; for a separate run: env -u RANK -u WORLD_SIZE phalanx train ..."
            )
        return train_outside(recipe, given, run, force, sys.stderr)
    membership = Membership.from_environment(os.environ)
    if membership.node:
        return follow_leader(recipe, given, membership, sys.stderr, run, nproc, dry_run)
    return train_here(recipe, given, run, nproc, force, dry_run, sys.stderr, membership)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
