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
        Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file; or a script that calls phalanx.join.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Overrides, such as steps=50 optimizer.lr=3e-4; for a script, its arguments."
        ),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run's directory.", show_default="runs/<name>")
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100_000,
            metavar="N",
            help="Worker processes.",
            show_default="as layout says, else one a GPU, else 1",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Go on with a run although the recipe or the data changed; it is recorded.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, prepare the data and print the resolved recipe; train nothing.")
    ] = False,
    on: Annotated[str, typer.Option("--on", metavar="ENGINE", help="local, slurm, ray or kubernetes.")] = "local",
    nodes: Annotated[
        int, typer.Option(min=1, max=10**6, metavar="N", help="Nodes; --nproc workers start on each.")
    ] = 1,
    devices: Annotated[
        int | None, typer.Option(min=0, max=10_000, metavar="N", help="GPUs on each node, with --on.")
    ] = None,
    limit: Annotated[str | None, typer.Option(metavar="TIME", help="Time limit, such as 2h, with --on.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", metavar="KEY=VALUE", help="What only the engine knows.")
    ] = None,
    code: Annotated[
        str | None,
        typer.Option(metavar="folder|COMMIT", help="With --on: a copy of the recipe's folder, or a commit, travels."),
    ] = None,
) -> int:
    """Train a recipe; a run that stopped goes on from its last good checkpoint, a finished one if steps were raised.

    Ctrl-C saves and exits 75; a second one stops at once. Started by torchrun or srun (RANK and WORLD_SIZE are set),
    this process is one worker.
    """
    from phalanx.cli.training import follow_leader, train_here, train_outside, train_own_loop
    from phalanx.run.membership import Membership

    given = overrides or []
    if on != "local":
        from phalanx.cli import submitting

        more: dict[str, Any] = {"nodes": nodes, "devices": devices, "limit": submitting.seconds_of(limit)}
        more["options"] = submitting.pairs(option or [], "--option")
        job = submitting.recipe_job(recipe, given, run, nproc, force, None, code, **more)
        assert job.run is not None
        return submitting.train_on(on, job, job.run, dry_run, sys.stderr)
    if nodes > 1 or option or devices is not None or limit is not None or code is not None:
        raise UsageError("--nodes, --devices, --limit, --code and --option need --on slurm, ray or kubernetes")
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    outside = bool(rank and world) and not os.environ.get("PHALANX_NODES")
    if recipe.suffix == ".py":
        if dry_run:
            raise UsageError(f"--dry-run is for recipes; {recipe} is a script, which can only be run")
        if outside:
            raise UsageError(
                f"this is a worker of torchrun or srun, which can start the script itself: torchrun {word_of(recipe)}"
            )
        if (several := Membership.from_environment(os.environ).nodes) > 1:
            raise UsageError(
                f"PHALANX_NODES={several}: a script runs on one node here; on several torchrun starts its workers: "
                f"torchrun --nnodes {several} {word_of(recipe)}"
            )
        return train_own_loop(recipe, given, run, nproc, force, sys.stderr)
    if outside:
        refused = "--dry-run" if dry_run else f"--nproc {nproc}" if nproc not in (None, _number(world)) else None
        if refused:
            raise UsageError(
                f"{refused}: RANK={rank} and WORLD_SIZE={world} are set, so this is one worker of a launcher's, "
                "which says how many there are; for a run of its own: env -u RANK -u WORLD_SIZE phalanx train ..."
            )
        return train_outside(recipe, given, run, force, sys.stderr)
    membership = Membership.from_environment(os.environ)
    if membership.node:
        return follow_leader(recipe, given, membership, sys.stderr, run, nproc, dry_run)
    return train_here(recipe, given, run, nproc, force, dry_run, sys.stderr, membership)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
