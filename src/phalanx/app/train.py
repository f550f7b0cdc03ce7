"""Train a recipe under an agent on this machine, or on the nodes that this one leads. `phalanx.train` is here.

`prepare_run` checks the recipe, resolves it and writes the run directory; `supervise_run` trains the run to its end.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.app.nodes import count_workers, open_node_group
from phalanx.app.prepare_run import PreparedRun, RunRequest, check_start, prepare_run
from phalanx.app.resume import describe_finished
from phalanx.app.supervise import supervise_run
from phalanx.app.task_evaluations import check_tasks
from phalanx.app.train_arguments import find_train_run, load_given_recipe
from phalanx.data import PrepareProgress
from phalanx.errors import ExitCode, GaveUpError, PhalanxError, UsageError
from phalanx.jobs.agent.fork_server_client import ForkServerClient, call_timeout
from phalanx.jobs.agent.leader_agent import RunOutcome
from phalanx.recipe import Recipe
from phalanx.recipe.load import LoadedRecipe
from phalanx.run import Event, Run
from phalanx.run.directory import check_run_path
from phalanx.run.leader_address import LeaderAddress, lock_leadership, read_leader_address, write_leader_address
from phalanx.run.node_env import NodeEnv
from phalanx.storage.stored_run import StoredRun, keep_at_url

LOCK_TIMEOUT_S = 300.0
"""Seconds for which a run on several nodes waits for the lock of its former leader. A leader without network holds
it until it notices, and on a network file system until the lease of the lock ends."""


class LeaderElsewhereError(PhalanxError):
    """Another node leads the run."""

    code = ExitCode.UNFINISHED


class TrainObserver:
    """Is called with what happens to a run. This one only passes on events; the command line prints it."""

    def __init__(self, show: Callable[[Event], None] | None = None):
        self._show = show

    def show_finished(self, text: str) -> None:
        """Nothing is left to train."""

    def open_progress(self) -> contextlib.AbstractContextManager[Callable[[PrepareProgress], None]]:
        """Return a context in which the run is prepared, and what is called with the progress."""
        return contextlib.nullcontext(lambda progress: None)

    def show_prepared(self, prepared: PreparedRun) -> None:
        """The run is prepared and starts next."""

    def show_event(self, event: Event) -> None:
        """The run wrote an event."""
        if self._show is not None:
            self._show(event)


def train(
    recipe: "str | os.PathLike[str] | Recipe | None" = None,
    overrides: Sequence[str] = (),
    *,
    run: "str | os.PathLike[str] | None" = None,
    nproc_per_node: int | None = None,
    force: bool = False,
    show: Callable[[Event], None] | None = None,
) -> dict[str, Any]:
    """Train a recipe as `phalanx train` does, and return the content of `result.json`.

    A run that was interrupted resumes; a finished one is not changed. If the run is asked to stop, the result has
    `status: interrupted`.

    Args:
        recipe: a file's path or URL, or a value.
        overrides: `key=value` of a recipe in a file.
        run: run directory or URL; default: `runs/<name>`.
        nproc_per_node: workers; default: as the recipe's parallelism requires, else one per GPU, else 1.
        force: resume although the recipe or the data changed.
        show: called with each event.

    Raises:
        PhalanxError: with the exit code of the command line in `code`.
    """
    rank, workers = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank and workers and workers != "1":
        raise UsageError(
            f"phalanx.train starts workers of its own, and this process is one already (RANK={rank}, "
            f"WORLD_SIZE={workers}): give a launcher `phalanx train RECIPE`, or use phalanx.session in a loop of your "
            "own"
        )
    loaded = load_given_recipe(recipe, overrides)
    run_dir = find_train_run(run, loaded.recipe.name)
    outcome = train_run(loaded, run_dir, TrainObserver(show), nproc_per_node=nproc_per_node, force=force)
    if outcome is not None and outcome.code not in (ExitCode.DONE, ExitCode.UNFINISHED):
        raise GaveUpError(outcome.message or "the run failed", outcome.code)
    return run_dir.read_json(run_dir.result) or {}


def train_run(
    loaded: LoadedRecipe,
    run: Run,
    observer: TrainObserver,
    *,
    nproc_per_node: int | None,
    force: bool,
    dry_run: bool = False,
    node_env: NodeEnv | None = None,
    fork_server: ForkServerClient | None = None,
) -> RunOutcome | None:
    """Train a recipe in `run` to its end, on this node and those that it leads; None when nothing is left to train.

    Args:
        dry_run: only prepare the run, and return None.
        node_env: this node and the number of nodes; None: this one alone.
        fork_server: one that was started before; it is closed at the end. None: starts one.
    """
    node_env = node_env or NodeEnv()
    loaded.check_required()
    lock_timeout_s = LOCK_TIMEOUT_S if node_env.num_nodes > 1 else 0.0
    own_address = None if node_env.min_nodes is None else node_env.leader_address
    leader = None if own_address is None else LeaderAddress(*own_address, node_env.node_rank, 0, run.location)

    def train_kept(stored: StoredRun | None) -> RunOutcome | None:
        check_run_path(run.path)
        if not dry_run and (finished_text := describe_finished(run, loaded.recipe)):
            observer.show_finished(finished_text)
            return None
        if node_env.num_nodes == 1:  # other nodes must hear of an error: open_node_group sends it
            check_start(loaded, nproc_per_node, begins=not run.has_checkpoint())
        limits = loaded.recipe.fault_tolerance
        with (
            fork_server or ForkServerClient() as server,
            open_node_group(server, node_env, limits.last_call_s) as node_group,
            contextlib.ExitStack() as stack,
        ):
            server.call_timeout_s = call_timeout(limits.hang_timeout_s)
            check_tasks(loaded)
            num_workers = count_workers(loaded, nproc_per_node, node_env)
            request = RunRequest(loaded, run, num_workers, node_env.num_nodes, force, node_env.min_nodes is not None)
            with observer.open_progress() as progress:
                preparing = prepare_run(request, server, progress, not dry_run, lock_timeout_s)
                prepared = stack.enter_context(preparing)
            observer.show_prepared(prepared)
            if dry_run:
                node_group.exit_code = ExitCode.DONE
                return None
            if leader is not None and stored is None:
                _lead(run, node_env, stack)
            outcome = supervise_run(prepared, server, observer.show_event, force, node_group, stored)
            node_group.exit_code = outcome.code
        return outcome

    with keep_at_url(run, leads=True, writes=not dry_run, timeout_s=lock_timeout_s, leader=leader) as stored:
        outcome = train_kept(stored)
    if stored is not None and stored.problem is not None:
        return RunOutcome(ExitCode.UNFINISHED, None, stored.problem)
    return outcome


def _lead(run: Run, node_env: NodeEnv, stack: contextlib.ExitStack) -> None:
    """Lead a run that may train on fewer nodes, until `stack` ends. Raises LeaderElsewhereError when another node took
    over meanwhile. Where the file system has no locks, no other node can take over."""
    assert node_env.leader_address is not None
    is_leader, leader = True, read_leader_address(run)
    with contextlib.suppress(OSError):
        is_leader = stack.enter_context(lock_leadership(run))
    if not is_leader or (node_env.took_over and leader is not None and leader.node_rank != node_env.node_rank):
        raise LeaderElsewhereError(f"{run.path}: another node leads this run; start again to join it")
    write_leader_address(run, node_env.leader_address, node_env.node_rank)
