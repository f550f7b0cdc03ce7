"""`phalanx train`: start or resume a run, show it, and exit with its code."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.errors import UsageError
from phalanx.std_streams import word_of


def train(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="Recipe (YAML), or a script that calls phalanx.session.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Overrides, such as steps=50 optimizer.lr=3e-4; arguments of a script."
        ),
    ] = None,
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="Run directory.", show_default="runs/<name>")] = None,
    nproc_per_node: Annotated[
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
    nodes: Annotated[
        int, typer.Option(min=1, max=10**6, metavar="N", help="Number of nodes, with --on slurm, kubernetes or ray.")
    ] = 1,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            min=0,
            max=10_000,
            metavar="N",
            help="GPUs on each node, with --on slurm, kubernetes or ray.",
            show_default="none",
        ),
    ] = None,
    cpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100_000,
            metavar="N",
            help="CPU cores on each node, with --on slurm, kubernetes or ray.",
            show_default="the job's share of a node, or a few a worker",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory on each node, such as 64G, with --on slurm, kubernetes or ray.",
            show_default="the backend's, or a share by GPUs on slurm",
        ),
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            "--time-limit",
            metavar="TIME",
            help="Time limit of each attempt, with --on slurm, kubernetes or ray: seconds, or such as 30s, 15min, 2h, "
            "1d, 01:30:00.",
            show_default="none",
        ),
    ] = None,
    backend_option: Annotated[
        list[str] | None,
        typer.Option(
            "--backend-option",
            "-o",
            metavar="KEY=VALUE",
            help="Backend option, such as partition=gpu (repeatable); see below.",
        ),
    ] = None,
    snapshot: Annotated[
        str | None,
        typer.Option(
            "--snapshot",
            metavar="workdir|REV",
            help="Train a copy of the recipe's directory, or of a git revision, with --on slurm, kubernetes or ray.",
        ),
    ] = None,
) -> int:
    """Train a recipe, or resume a run.

    An interrupted run resumes from its last good checkpoint; a finished run resumes if steps were raised. Ctrl-C saves
    a checkpoint and exits with 75; a second Ctrl-C stops immediately. Started by torchrun or srun (RANK and WORLD_SIZE
    are set), this process is one worker.
    """
    from phalanx.app.nodes import run_node_agent
    from phalanx.app.train_arguments import TrainArguments
    from phalanx.cli.train_local import train_as_worker, train_locally, train_script_locally
    from phalanx.run.node_env import NodeEnv

    arguments = TrainArguments(recipe, overrides or [], run, nproc_per_node, force)
    if on != "local":
        from phalanx.app import submit

        job_fields: dict[str, Any] = {
            "num_nodes": nodes,
            "gpus_per_node": gpus,
            "cpus_per_node": cpus,
            "memory_bytes": submit.parse_memory(memory),
            "time_limit_s": submit.parse_duration(time_limit),
        }
        job_fields["backend_options"] = submit.parse_assignments(backend_option or [], "--backend-option")
        job = submit.make_recipe_job(arguments, None, snapshot, **job_fields)
        assert job.run_dir is not None
        return submit.submit_and_follow(on, job, job.run_dir, dry_run, sys.stderr)
    if nodes > 1 or backend_option or any(value is not None for value in (gpus, cpus, memory, time_limit, snapshot)):
        raise UsageError(
            "--nodes, --gpus, --cpus, --memory, --time-limit, --snapshot and --backend-option need --on slurm, ray or "
            "kubernetes"
        )
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    is_external_worker = bool(rank and world) and not os.environ.get("PHALANX_NUM_NODES")
    if arguments.is_script:
        if dry_run:
            raise UsageError(f"--dry-run is for recipes; {recipe} is a script, which can only be run")
        if is_external_worker:
            raise UsageError(
                f"this is a worker of torchrun or srun, which can start the script directly: torchrun {word_of(recipe)}"
            )
        if (num_nodes := NodeEnv.from_environment(os.environ).num_nodes) > 1:
            raise UsageError(
                f"PHALANX_NUM_NODES={num_nodes}: a script runs on one node here; on several torchrun starts its "
                f"workers: "
                f"torchrun --nnodes {num_nodes} {word_of(recipe)}"
            )
        return train_script_locally(arguments, sys.stderr)
    if is_external_worker:
        conflict = (
            "--dry-run"
            if dry_run
            else f"--nproc-per-node {nproc_per_node}"
            if nproc_per_node not in (None, _parse_int(world))
            else None
        )
        if conflict:
            raise UsageError(
                f"{conflict}: RANK={rank} and WORLD_SIZE={world} are set, so this is one worker of a launcher's, "
                "which sets how many there are; for a separate run: env -u RANK -u WORLD_SIZE phalanx train ..."
            )
        return train_as_worker(arguments, sys.stderr)
    node_env = NodeEnv.from_environment(os.environ)
    if node_env.node_rank:
        return int(run_node_agent(arguments, dry_run, sys.stderr, node_env))
    return train_locally(arguments, dry_run, sys.stderr, node_env)


def _parse_int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
