"""`phalanx.session`: run a training loop of your own with checkpoints, restarts and events.

The same script works in three ways:

    python train.py                                      one process
    phalanx train train.py --nproc-per-node 4 --run DIR  under an agent, which restarts it after a failure
    torchrun --nproc-per-node 4 train.py                 as workers of another launcher

There are no trials before such a run, since its model is not known until the loop builds it. Every `auto` of its recipe
follows a rule (`autoconfig.choices.choose_without_trials`).
"""

import contextlib
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.app.prepare_run import (
    PreparedRun,
    RunRequest,
    check_recipe_on_machine,
    create_run,
    find_machine,
    write_run_files,
)
from phalanx.app.resume import describe_all_changes, describe_finished, load_resumed_recipe, read_last_attempt
from phalanx.app.train_arguments import load_given_recipe
from phalanx.autoconfig.choices import choose_without_trials, resolve_recipe, resume_recipe
from phalanx.cluster import Machine
from phalanx.errors import (
    ExitCode,
    GaveUpError,
    PhalanxError,
    RecipeError,
    UsageError,
    describe_os_error,
    is_storage_error,
)
from phalanx.observe.progress import DeferredDisplay
from phalanx.recipe import Recipe, ResolvedRecipe, check_recipe, load_resolved_recipe, scale_batch_with_workers
from phalanx.recipe.load import LoadedRecipe
from phalanx.recipe.schema import Parallelism
from phalanx.run import Event, Run
from phalanx.run.directory import check_run_path
from phalanx.run.event_types import RunWarning
from phalanx.run.heartbeat import HeartbeatWriter, NullHeartbeat, open_heartbeat
from phalanx.run.lock import lock_run
from phalanx.run.process_messages import WorkerFinishing
from phalanx.std_streams import escape_control_chars, word_of
from phalanx.storage.url import is_url

RUN_DIR_VARIABLE = "PHALANX_RUN_DIR"
"""Set by `phalanx train SCRIPT`: the run's directory."""
RENDEZVOUS_ID_VARIABLE = "PHALANX_RENDEZVOUS_ID"
"""Distinguishes successive worlds that use the same store for their rendezvous."""
FORCE_VARIABLE = "PHALANX_FORCE"
"""Set by `phalanx train SCRIPT --force`."""
IGNORED_KEYS = (
    *("model.build", "model.args", "init_from", "adapter", "task", "data", "evaluation", "memory.chunked_loss"),
    *("optimizer.name", "optimizer.lr", "optimizer.weight_decay", "optimizer.betas", "optimizer.momentum"),
    *("optimizer.state_dtype", "optimizer.offload"),
)
"""Keys that have no effect in a session, because the loop itself decides them."""
TRAINER_ONLY_DIMENSIONS = ("pipeline", "context")
"""Dimensions of parallelism that a session does not have: they need the loss, or split sequences."""
_finished_runs: list[Path] = []
"""Runs that this process has finished."""


def preload_session(payload: None) -> None:
    """Import in the process that forks the workers of a script what each would import for its session: 0.3 s each."""
    import phalanx.train.session
    import phalanx.train.worker  # noqa: F401


@contextlib.contextmanager
def session(
    recipe: "str | os.PathLike[str] | Recipe | None" = None,
    overrides: Sequence[str] = (),
    *,
    run: "str | os.PathLike[str] | None" = None,
    force: bool = False,
) -> Iterator[Any]:
    """Make this process a worker of a run: `with phalanx.session("recipe.yaml") as session:`. See `Session`.

    The run resumes from its last good checkpoint. When the block ends, the last state is saved; if the run was asked to
    stop, the process then exits with 75. A PhalanxError is printed in one line, and the process exits with its code. A
    notebook or prompt never exits: it raises PhalanxError, or KeyboardInterrupt if the run was asked to stop.

    Args:
        recipe: a file's path or a value.
        overrides: `key=value` of a recipe in a file.
        run: run directory; default: `runs/<name>`. `phalanx train SCRIPT --run DIR` takes precedence.
        force: resume although the recipe changed.
    """
    from phalanx.train.distributed.failures import naming_causes
    from phalanx.train.distributed.process_group import shut_down_process_group
    from phalanx.train.train_context import StopRequest
    from phalanx.train.worker import describe_early_exit

    is_supervised, stop = "PHALANX_EVENTS_FD" in os.environ, StopRequest()
    force = force or FORCE_VARIABLE in os.environ
    try:
        with contextlib.ExitStack() as stack:
            if not is_supervised:
                stack.enter_context(_restore_signals())
            stop.install_handlers()
            worker_session, report, run_dir = _start_session(stack, recipe, overrides, run, force, stop)
            try:
                with naming_causes(), worker_session.explain_out_of_memory():
                    yield worker_session
                    status = worker_session.finish()
            except SystemExit as leaving:
                if leaving.code:  # the script's own word that something went wrong
                    raise
                early_exit_text = (
                    f"{describe_early_exit(leaving, f'worker {worker_session.rank}')}; to end a run early, `break` "
                    "out of the loop"
                )
                if is_supervised:  # to the agent it is an exception like others
                    raise RuntimeError(early_exit_text) from leaving
                _report_error(report, GaveUpError(early_exit_text), is_supervised)
                raise GaveUpError(early_exit_text) from leaving
            except PhalanxError as error:
                _report_error(report, error, is_supervised)
                raise
            except OSError as error:
                if is_storage_error(error):
                    report.report_error(describe_os_error(error), int(ExitCode.UNFINISHED))
                    report.flush()
                raise
            if worker_session.rank == 0 and not is_supervised:
                stack.callback(print, _format_conclusion(run_dir, status), file=sys.stderr)
            worker_session.release_process_group()
            shut_down_process_group()
            _finished_runs.append(run_dir.path.resolve())
            code = ExitCode.UNFINISHED if status == "interrupted" else ExitCode.DONE
            report.send_control(WorkerFinishing(rank=worker_session.rank, exit_code=int(code)))
    except PhalanxError as error:
        if is_interactive():
            raise
        raise SystemExit(int(error.code)) from None
    if code is not ExitCode.DONE:
        if not is_interactive():
            raise SystemExit(int(code))
        if stop.requested:
            raise KeyboardInterrupt


def is_interactive() -> bool:
    """Return whether this process is a notebook or a prompt, which must not exit when a run ends."""
    return hasattr(sys, "ps1")


@dataclass(frozen=True)
class _AnnouncedRun:
    """The run that rank 0 has prepared. Rank 0 itself has notes to report, and without an agent a display."""

    loaded: LoadedRecipe
    run: Run
    dist_env: Any
    notes: Sequence[str] = ()
    show: Callable[[Event], None] | None = None


def _start_session(
    stack: contextlib.ExitStack,
    recipe: "str | os.PathLike[str] | Recipe | None",
    overrides: Sequence[str],
    run: "str | os.PathLike[str] | None",
    force: bool,
    stop: Any,
) -> tuple[Any, Any, Run]:
    """Join the run that rank 0 has prepared; return the session, the reporter and the run. A PhalanxError is reported
    before it is raised."""
    from phalanx.train.distributed.environment import dist_env_from_environment
    from phalanx.train.distributed.failures import naming_causes
    from phalanx.train.distributed.run_announcement import telling_others
    from phalanx.train.reporter import make_reporter

    events = os.environ.get("PHALANX_EVENTS_FD")
    report = None
    try:
        dist_env = dist_env_from_environment(device="cpu")  # until the recipe is known
        _check_earlier_runs(events is not None)
        with telling_others(dist_env), naming_causes():
            loaded = load_given_recipe(recipe, overrides)
            if is_url(run) and RUN_DIR_VARIABLE not in os.environ:
                raise UsageError(f"{run}: a session at a URL is started by `phalanx train SCRIPT --run {run}`")
            run_dir = Run(Path(os.environ.get(RUN_DIR_VARIABLE) or run or Path("runs") / loaded.recipe.name))
            request = RunRequest(loaded, run_dir, dist_env.world_size, force=force)
            announced = _announce_or_wait(stack, request, dist_env)
        report = make_reporter(announced.run, dist_env.is_rank_zero, events, announced.show)
        stack.callback(report.close)
        return _join_run(announced, report, force, stop), report, announced.run
    except PhalanxError as error:
        if report is None and events is not None:  # the run is not known
            report = make_reporter(Run(Path()), False, events)
        _report_error(report, error, events is not None)
        raise


def _check_earlier_runs(is_supervised: bool) -> None:
    """Raise UsageError when this process cannot join another run, and prepare it for one."""
    if not _finished_runs:
        return
    if is_supervised:
        raise UsageError(
            "phalanx.session: this script joins a second run, and `phalanx train SCRIPT` is one run; start it once "
            "for each, such as `phalanx train SCRIPT 0 --run runs/fold-0`, or by `python SCRIPT` with "
            "phalanx.session(..., run=...) for each"
        )
    gc.collect()  # frees their models: a GPU may have memory for one only
    # the launcher's store holds keys of the earlier runs
    os.environ[RENDEZVOUS_ID_VARIABLE] = f"{len(_finished_runs)} runs later"


def _announce_or_wait(stack: contextlib.ExitStack, request: RunRequest, dist_env: Any) -> _AnnouncedRun:
    """Prepare the run and announce it to the other workers, as rank 0; else wait for that."""
    from phalanx.train.distributed.environment import select_device
    from phalanx.train.distributed.run_announcement import RunAnnouncement, announce_run, wait_for_announcement

    loaded, run, run_dir = request.loaded, request.run, Run(request.run.path.absolute())
    if not dist_env.is_rank_zero:
        # an error in it is reported before the rendezvous
        select_device(dist_env.local_rank, os.environ, loaded.recipe.device)
        attempt = wait_for_announcement(dist_env, run.path).attempt
        return _AnnouncedRun(loaded, run_dir, replace(dist_env, attempt=attempt))
    if run.path.resolve() in _finished_runs and describe_finished(run, loaded.recipe):
        raise UsageError(
            f"{run.path}: this script has joined this run before, and it is done; give each phalanx.session a run of "
            "its own: run=..."
        )
    is_supervised = "PHALANX_EVENTS_FD" in os.environ
    prepared = stack.enter_context(_prepare_session(request, is_supervised))
    attempt = dist_env.attempt if is_supervised else prepared.first_attempt
    announce_run(dist_env, RunAnnouncement(os.path.realpath(run.path), attempt))
    show = None if is_supervised else stack.enter_context(DeferredDisplay(run, sys.stderr)).show_event
    return _AnnouncedRun(loaded, run_dir, replace(dist_env, attempt=attempt), prepared.notes, show)


def _join_run(announced: _AnnouncedRun, report: Any, force: bool, stop: Any) -> Any:
    """Form the process group with the other workers of the run, and return the session."""
    from phalanx.train.distributed.environment import select_device
    from phalanx.train.distributed.failures import naming_causes
    from phalanx.train.distributed.object_collectives import assert_same_on_all_ranks
    from phalanx.train.distributed.process_group import init_process_group
    from phalanx.train.distributed.run_announcement import come_together, telling_others
    from phalanx.train.session import Session
    from phalanx.train.train_context import WorkerProcess
    from phalanx.train.worker import configure_torch, worker_started

    dist_env, loaded = announced.dist_env, announced.loaded
    report.report_event(worker_started(dist_env))
    for note in announced.notes:
        report.report_event(RunWarning(text=note))
    with telling_others(dist_env), naming_causes():
        resolved = load_resolved_recipe(announced.run.resolved)
        dist_env = replace(dist_env, device=select_device(dist_env.local_rank, os.environ, resolved.device))
        heartbeat = _open_heartbeat(dist_env.local_rank)
        process = WorkerProcess(announced.run, loaded.recipe_dir, dist_env, report, stop, heartbeat)
        configure_torch(resolved, dist_env)
        init_process_group(dist_env, before=come_together)
        heartbeat.record("rendezvous")
    with naming_causes():
        # rank 0 wrote resolved.yaml from its own recipe; a worker with another recipe would not notice
        sync = loaded.recipe.model_dump_json(include={"determinism", "grad_sync", "local_sgd"})
        what, advice = "gradient synchronization in the recipe", "join all workers with the same recipe"
        assert_same_on_all_ranks(dist_env, sync, what, advice, also_single_node=True)
        return Session(process, resolved, force)


def _open_heartbeat(local_rank: int) -> HeartbeatWriter | NullHeartbeat:
    """Open this worker's heartbeat. From now on its agent, if it has one, may request its stack."""
    heartbeat = open_heartbeat(local_rank)
    if isinstance(heartbeat, HeartbeatWriter):
        faulthandler.register(signal.SIGUSR2)  # the answer goes to the worker's log
    heartbeat.record("starting")
    return heartbeat


def _report_error(reporter: Any, error: PhalanxError, is_supervised: bool) -> None:
    """Report why a worker ends: to its agent and its log, or on the terminal."""
    from phalanx.train.distributed.failures import OutOfMemory

    if reporter is not None:
        reporter.report_error(str(error), int(error.code), out_of_memory=isinstance(error, OutOfMemory))
        reporter.flush()
        reporter.send_control(WorkerFinishing(rank=int(os.environ.get("RANK") or 0), exit_code=int(error.code)))
    if is_supervised or reporter is None:
        print(f"error: {escape_control_chars(str(error))}", file=sys.stderr)


def _format_conclusion(run: Run, status: str) -> str:
    if status == "interrupted":
        return "not finished; run the same command again to resume"
    return f"digest   {(run.read_json(run.result) or {}).get('digest')}\nreport   phalanx report {word_of(run.path)}"


@contextlib.contextmanager
def _restore_signals() -> Iterator[None]:
    """Restore the signal handlers at the end: the script may continue after its run."""
    previous_handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _prepare_session(request: RunRequest, is_supervised: bool) -> Iterator[PreparedRun]:
    """Write the files of a run, and lock it unless its agent holds the lock. Checks the recipe first."""
    loaded = request.loaded
    run = request.run
    world_size = request.world_size
    assert world_size is not None
    _check_recipe_keys(loaded)
    if not is_supervised:
        check_run_path(run.path)
    machine = find_machine(loaded)
    given = loaded.recipe.model_copy(update={"device": machine.device})
    previous, notes = load_resumed_recipe(run, given, request.force)
    if previous is not None:
        resolved = resume_recipe(previous, given, world_size)
        check_recipe_on_machine(resolved, machine)
        notes += describe_all_changes(run, given, previous, resolved)
        plan: dict[str, Any] = run.read_json_or_empty(run.plan)
    else:
        resolved, plan = _resolve_without_trials(run, given, world_size, machine)
    check_recipe(resolved, loaded.recipe_dir, world_size, loaded.location_of)
    check_recipe_on_machine(loaded.recipe, machine, loaded.location_of)
    create_run(run)
    cluster = {
        "host": machine.hostname,
        "device": machine.device,
        "device_name": machine.device_name,
        "physical_cores": machine.physical_cores,
    }
    prepared = PreparedRun(run, resolved, loaded.recipe_dir, plan, cluster, notes, read_last_attempt(run) + 1)
    with contextlib.nullcontext() if is_supervised else lock_run(run) as note:
        prepared.notes.extend([] if note is None else [note])
        write_run_files(prepared, loaded)
        yield prepared


def _resolve_without_trials(
    run: Run, given: Recipe, world_size: int, machine: Machine
) -> tuple[ResolvedRecipe, dict[str, Any]]:
    """Resolve the recipe of a new run by rules; return it and the plan."""
    scaled_recipe = scale_batch_with_workers(given, world_size)
    choices = choose_without_trials(
        scaled_recipe, machine.physical_cores, world_size, machine.device, machine.has_fast_bf16, os.environ
    )
    plan: dict[str, Any] = {"auto_choices": [vars(choice) for choice in choices]}
    if loop := run.read_json_or_empty(run.plan).get("session"):  # with --force the state of this optimizer is kept
        plan["session"] = loop
    return resolve_recipe(scaled_recipe, choices, world_size), plan


def _check_recipe_keys(loaded: LoadedRecipe) -> None:
    """RecipeError when the recipe says what only the trainer can do, or what the loop itself says."""
    for key in IGNORED_KEYS:
        value: Any = loaded.given
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            raise RecipeError(
                f"{loaded.location_of(key)}: has no effect in a training loop of your own, which has its own model, "
                "data, loss and optimizer; leave it out, and say it in the script"
            )
    if isinstance(loaded.recipe.parallelism, Parallelism):
        for name in TRAINER_ONLY_DIMENSIONS:
            if getattr(loaded.recipe.parallelism, name) > 1:
                raise RecipeError(
                    f"{loaded.location_of(f'parallelism.{name}')}: a training loop of your own cannot be divided so, "
                    "only a recipe's task can; use replicate, shard or tensor"
                )
