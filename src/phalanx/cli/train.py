"""`phalanx train`: start or resume a run, show it, and exit with its code.

Loading torch takes longest, in the fork server. This process imports most of what it needs after it has started that.
"""

import os
import signal
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli import options
from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.agent.fork_server_client import ForkServerClient
from phalanx.run.node_env import NodeEnv
from phalanx.std_streams import word_of
from phalanx.storage.url import is_url

if TYPE_CHECKING:
    from phalanx.app.train_arguments import TrainArguments


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]",
            help="Recipe (YAML) or its URL, or a script that calls phalanx.session.",
            show_default="that of the run to resume",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Overrides, such as steps=50 optimizer.lr=3e-4; arguments of a script."
        ),
    ] = None,
    run: Annotated[
        str | None, typer.Option(metavar="DIR|URL", help="Run directory, or its URL.", show_default="runs/<name>")
    ] = None,
    nproc_per_node: options.NprocOption = None,
    force: options.ForceOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Prepare the data and print the resolved recipe, without training.")
    ] = False,
    on: options.BackendOption = "local",
    nodes: options.NodesOption = "1",
    gpus: options.GpusOption = None,
    cpus: options.CpusOption = None,
    memory: options.MemoryOption = None,
    time_limit: options.TimeLimitOption = None,
    backend_option: options.BackendOptionOption = None,
    snapshot: options.SnapshotOption = None,
) -> int:
    """Train a recipe, or resume a run.

    An interrupted run resumes from its last good checkpoint; a finished run resumes if steps were raised. Ctrl-C saves
    a checkpoint and exits with 75; a second Ctrl-C stops immediately. Started by torchrun or srun (RANK and WORLD_SIZE
    are set), this process is one worker. --nodes, --gpus, --cpus, --memory, --time-limit, --snapshot and
    --backend-option need --on slurm, kubernetes or ray.
    """
    starts_workers = on == "local" and not any(os.environ.get(name) for name in ("RANK", "PHALANX_NUM_NODES"))
    with ForkServerClient() if starts_workers else nullcontext() as fork_server:
        from phalanx.app.train_arguments import TrainArguments, find_kept_recipe

        arguments = TrainArguments(
            recipe or find_kept_recipe(run), overrides or [], run, nproc_per_node, force, is_kept_recipe=recipe is None
        )
        if on == "local":
            job_options = (gpus, cpus, memory, time_limit, snapshot)
            if nodes != "1" or backend_option or any(value is not None for value in job_options):
                raise UsageError(
                    "--nodes, --gpus, --cpus, --memory, --time-limit, --snapshot and --backend-option need --on slurm, "
                    "ray or kubernetes"
                )
            return _train_here(arguments, dry_run, fork_server)
        from phalanx.app import submit

        job_fields = submit.parse_job_fields(nodes, gpus, cpus, memory, time_limit, backend_option or [])
        job = submit.make_recipe_job(arguments, None, snapshot, **job_fields)
        assert job.run_dir is not None
        return submit.submit_and_follow(on, job, job.run_dir, dry_run, sys.stderr)


def _train_here(arguments: "TrainArguments", dry_run: bool, fork_server: ForkServerClient | None) -> int:
    """Train on this machine: as one that stands alone, a node of several, or a worker that a launcher started."""
    from phalanx.app.nodes import is_led_by_another, run_node_agent
    from phalanx.cli import local_training

    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    is_external_worker = bool(rank and world) and not os.environ.get("PHALANX_NUM_NODES")
    if arguments.is_script:
        if dry_run:
            raise UsageError(f"--dry-run is for recipes; {arguments.path} is a script, which can only be run")
        if is_external_worker:
            raise UsageError(
                "this is a worker of torchrun or srun, which can start the script directly: torchrun "
                f"{word_of(arguments.path)}"
            )
        if (num_nodes := NodeEnv.from_environment(os.environ).num_nodes) > 1:
            raise UsageError(
                f"PHALANX_NUM_NODES={num_nodes}: a script runs on one node here; on several torchrun starts its "
                f"workers: torchrun --nnodes {num_nodes} {word_of(arguments.path)}"
            )
        return local_training.train_script_locally(arguments, sys.stderr, fork_server)
    if is_external_worker:
        if is_url(arguments.run):
            raise UsageError(
                f"--run {arguments.run}: workers of torchrun or srun need a run directory that all nodes share; start "
                "`phalanx train` once on each node instead, which starts the workers"
            )
        nproc = arguments.nproc_per_node
        if dry_run or nproc not in (None, _parse_int(world)):
            conflict = "--dry-run" if dry_run else f"--nproc-per-node {nproc}"
            raise UsageError(
                f"{conflict}: RANK={rank} and WORLD_SIZE={world} are set, so this is one worker of a launcher's, "
                "which sets how many there are; for a separate run: env -u RANK -u WORLD_SIZE phalanx train ..."
            )
        return local_training.train_as_worker(arguments, sys.stderr)
    node_env = NodeEnv.from_environment(os.environ)
    if node_env.node_rank or (not dry_run and is_led_by_another(arguments, node_env)):
        # While a node that takes over has no agent, SIGTERM cleans up like Ctrl-C: it ends with 75.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        ended = run_node_agent(arguments, dry_run, sys.stderr, node_env)
        if isinstance(ended, ExitCode):
            return int(ended)
        node_env, fork_server = ended.node_env, ended.fork_server
    return local_training.train_locally(arguments, dry_run, sys.stderr, node_env, fork_server)


def _parse_int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
