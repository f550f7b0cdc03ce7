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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.app.prepare_run import RunRequest
from phalanx.app.prepare_session import prepare_session
from phalanx.app.resume import describe_finished
from phalanx.app.run_display import DeferredDisplay
from phalanx.app.train_arguments import load_given_recipe
from phalanx.errors import ExitCode, GaveUpError, PhalanxError, UsageError, describe_os_error, is_storage_error
from phalanx.recipe import Recipe, load_resolved_recipe
from phalanx.recipe.load import LoadedRecipe
from phalanx.run import Run
from phalanx.run.event_types import RunWarning
from phalanx.run.heartbeat import HeartbeatWriter, NullHeartbeat, open_heartbeat
from phalanx.run.messages import WorkerFinishing
from phalanx.std_streams import escape_control_chars, word_of

RUN_DIR_VARIABLE = "PHALANX_RUN_DIR"
"""Set by `phalanx train SCRIPT`: the run's directory."""
RENDEZVOUS_ID_VARIABLE = "PHALANX_RENDEZVOUS_ID"
"""Distinguishes successive worlds that use the same store for their rendezvous."""
FORCE_VARIABLE = "PHALANX_FORCE"
"""Set by `phalanx train SCRIPT --force`."""
_finished_runs: list[Path] = []
"""Runs that this process has finished."""


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
    from phalanx.train.signals import StopRequest
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
    from phalanx.train.distributed.environment import dist_env_from_environment, select_device
    from phalanx.train.distributed.failures import naming_causes
    from phalanx.train.distributed.object_collectives import assert_same_on_all_ranks
    from phalanx.train.distributed.process_group import init_process_group as meet
    from phalanx.train.distributed.run_announcement import (
        RunAnnouncement,
        announce_run,
        come_together,
        telling_others,
        wait_for_announcement,
    )
    from phalanx.train.reporter import make_reporter
    from phalanx.train.session import Session
    from phalanx.train.train_context import WorkerProcess
    from phalanx.train.worker import configure_torch, worker_started

    events = os.environ.get("PHALANX_EVENTS_FD")
    notes, show = list[str](), None
    try:
        dist_env = dist_env_from_environment(device="cpu")  # until the recipe is known
        if events is not None and _finished_runs:
            raise UsageError(
                "phalanx.session: this script joins a second run, and `phalanx train SCRIPT` is one run; start it once "
                "for each, such as `phalanx train SCRIPT 0 --run runs/fold-0`, or by `python SCRIPT` with "
                "phalanx.session(..., run=...) for each"
            )
        if _finished_runs:  # the launcher's store holds keys of the earlier runs
            gc.collect()  # frees their models: a GPU may have memory for one only
            os.environ[RENDEZVOUS_ID_VARIABLE] = f"{len(_finished_runs)} runs later"
        with telling_others(dist_env), naming_causes():
            loaded = load_given_recipe(recipe, overrides)
            if dist_env.is_rank_zero:
                run_dir, attempt = _find_run(loaded, run), dist_env.attempt
                if run_dir.path.resolve() in _finished_runs and describe_finished(run_dir, loaded.recipe):
                    raise UsageError(
                        f"{run_dir.path}: this script has joined this run before, and it is done; give each "
                        "phalanx.session a run of its own: run=..."
                    )
                request = RunRequest(loaded, run_dir, dist_env.world_size, force=force)
                prepared = stack.enter_context(prepare_session(request, events is not None))
                notes = prepared.notes
                attempt = prepared.first_attempt if events is None else attempt
                announce_run(dist_env, RunAnnouncement(os.path.realpath(run_dir.path), attempt))
                if events is None:
                    show = stack.enter_context(DeferredDisplay(prepared.run, sys.stderr)).show_event
            else:
                # an error in it is reported before the rendezvous
                select_device(dist_env.local_rank, os.environ, loaded.recipe.device)
                run_dir = _find_run(loaded, run)
                attempt = wait_for_announcement(dist_env, run_dir.path).attempt
    except PhalanxError as error:
        _report_error(None if events is None else make_reporter(Run(Path()), False, events), error, events is not None)
        raise
    dist_env = replace(dist_env, attempt=attempt)
    run_dir = Run(run_dir.path.absolute())
    report = make_reporter(run_dir, dist_env.is_rank_zero, events, show)
    stack.callback(report.close)
    try:
        report.report_event(worker_started(dist_env))
        for note in notes:
            report.report_event(RunWarning(text=note))
        with telling_others(dist_env), naming_causes():
            resolved = load_resolved_recipe(run_dir.resolved)
            dist_env = replace(dist_env, device=select_device(dist_env.local_rank, os.environ, resolved.device))
            heartbeat = _open_heartbeat(dist_env.local_rank)
            process = WorkerProcess(run_dir, loaded.recipe_dir, dist_env, report, stop, heartbeat)
            configure_torch(resolved, dist_env)
            meet(dist_env, before=come_together)
        with naming_causes():
            # rank 0 wrote resolved.yaml from its own recipe; a worker with another recipe would not notice
            sync = loaded.recipe.model_dump_json(include={"determinism", "grad_sync", "local_sgd"})
            assert_same_on_all_ranks(
                dist_env,
                sync,
                "gradient synchronization in the recipe",
                "join all workers with the same recipe",
                also_single_node=True,
            )
            return Session(process, resolved, force), report, run_dir
    except PhalanxError as error:
        _report_error(report, error, events is not None)
        raise


def _find_run(loaded: LoadedRecipe, run: "str | os.PathLike[str] | None") -> Run:
    return Run(Path(os.environ.get(RUN_DIR_VARIABLE) or run or Path("runs") / loaded.recipe.name))


def _open_heartbeat(local_rank: int) -> HeartbeatWriter | NullHeartbeat:
    """Open this worker's heartbeat. From now on its agent, if it has one, may request its stack."""
    heartbeat = open_heartbeat(local_rank)
    if isinstance(heartbeat, HeartbeatWriter):
        faulthandler.register(signal.SIGUSR2)  # the answer goes to the worker's log
    heartbeat.record("starting")
    return heartbeat


def _report_error(reporter: Any, error: PhalanxError, is_supervised: bool) -> None:
    """Report why a worker ends: to its agent and its log, or on the terminal."""
    from phalanx.train.distributed.oom import OutOfMemory

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
