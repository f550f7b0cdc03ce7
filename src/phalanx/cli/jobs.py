"""`phalanx jobs`: the local queue, or the backend's own queue, behind the same commands."""

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli import options
from phalanx.errors import ExitCode, UsageError
from phalanx.formatting import format_duration
from phalanx.std_streams import escape_control_chars
from phalanx.text_table import Column, format_facts, format_table

if TYPE_CHECKING:
    from phalanx.jobs.backends.base import Backend
    from phalanx.jobs.spec import JobStatus

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Submit, list, follow and cancel jobs, locally or on a cluster."
)

JobIdArgument = Annotated[str, typer.Argument(metavar="ID", help="Job ID, as shown by `phalanx jobs ls`.")]


@app.command(cls=options.BackendOptionsCommand)
def submit(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE... [KEY=VALUE]...", help="Recipes and overrides; with --framework, a command after `--`."
        ),
    ],
    on: options.BackendOption = "local",
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Job name.", show_default="name of the recipe or script")
    ] = None,
    run: Annotated[
        str | None, typer.Option(metavar="DIR|URL", help="Run directory or URL; of an array, that of its runs.")
    ] = None,
    nproc_per_node: options.NprocOption = None,
    nodes: options.NodesOption = "1",
    gpus: options.GpusOption = None,
    cpus: options.CpusOption = None,
    memory: options.MemoryOption = None,
    time_limit: options.TimeLimitOption = None,
    priority: Annotated[int, typer.Option(metavar="N", help="Priority: higher starts first.")] = 0,
    framework: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run a command: torch, jax, tensorflow, mpi or plain.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Environment variable of the job (repeatable).")
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Pass this environment variable without exposing its value (repeatable)."),
    ] = None,
    backend_option: options.BackendOptionOption = None,
    snapshot: options.SnapshotOption = None,
    sweep_axes: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=VALUE,VALUE",
            help="Submit an array: one run per value, or combination (repeatable).",
        ),
    ] = None,
    max_parallel: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Array members that run concurrently.")
    ] = None,
    force: options.ForceOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be submitted, and submit nothing.")
    ] = False,
) -> int:
    """Submit a recipe, or with --framework any program.

    The backend restarts the job until it is done. A training run: `phalanx jobs submit recipe.yaml steps=500`. An array
    of runs: `phalanx jobs submit a.yaml b.yaml`, or `recipe.yaml --sweep optimizer.lr=1e-3,3e-4`. Any program: `phalanx
    jobs submit --framework jax --nproc-per-node 2 -- python script.py`.
    """
    from phalanx.app import submit as app_submit
    from phalanx.app.train_arguments import TrainArguments

    job_fields: dict[str, Any] = {
        **app_submit.parse_job_fields(nodes, gpus, cpus, memory, time_limit, backend_option or []),
        "default_gpus": app_submit.default_gpus(on, nproc_per_node) if gpus is None else None,
        "priority": priority,
        "environment": app_submit.parse_assignments(env or [], "--env"),
        "secrets": tuple(secret or ()),
        "snapshot": snapshot,
    }
    recipes, overrides = app_submit.split_recipes_and_overrides(what)
    is_array = framework is None and (len(recipes) > 1 or bool(sweep_axes))
    if (sweep_axes and not is_array) or (sweep_axes and recipes[0].endswith(".py")):
        raise UsageError("--sweep is for recipes, not for programs: a sweep sets recipe keys")
    if max_parallel is not None and not is_array:
        raise UsageError("--max-parallel is for arrays: give several recipes, or --sweep")
    rejected = [option for option, is_given in (("--run", run is not None), ("--force", force)) if is_given]
    if framework is not None and rejected:
        problem = f"{rejected[0]} is for recipes and scripts of runs"
        raise UsageError(f"{problem}; with --framework give it to the command itself")
    if is_array:
        jobs = app_submit.make_sweep(
            recipes,
            overrides,
            app_submit.expand_sweep(sweep_axes or []),
            run,
            name,
            max_parallel,
            lambda path, given, where: app_submit.make_recipe_job(
                TrainArguments(path, given, where, nproc_per_node, force), **job_fields
            ),
        )
        backend = _open_backend(on)
        requests = backend.render_array(jobs)
    else:
        if framework is not None:
            job = app_submit.make_framework_job(framework, what, nproc_per_node, name, **job_fields)
        else:
            arguments = TrainArguments(recipes[0], overrides, run, nproc_per_node, force)
            job = app_submit.make_recipe_job(arguments, name, **job_fields)
        backend = _open_backend(on)
        requests = [backend.render(job)]
    if dry_run:
        print("\n\n".join(map(str, requests)))
    elif is_array:
        app_submit.submit_jobs(backend, requests, sys.stdout)
    else:
        app_submit.submit_job(backend, requests[0], sys.stdout)
    return int(ExitCode.DONE)


@app.command("ls")
def list_jobs(
    array: Annotated[str | None, typer.Argument(metavar="[ARRAY]", help="Show only the members of this array.")] = None,
    on: options.BackendOption = "local",
    as_json: options.JsonOption = False,
) -> None:
    """List jobs, oldest first."""
    backend = _open_backend(on, restart_daemon=True)
    jobs = backend.list_jobs(array)
    if array is not None and not jobs:
        raise UsageError(f"{array}: {on} has no array of this name; `phalanx jobs ls --on {on}` lists all jobs")
    if as_json:
        print(json.dumps([asdict(status) for status in jobs], indent=2))
        return
    if not jobs:
        print(f"no jobs were submitted to {on} from here; submit one with: phalanx jobs submit RECIPE --on {on}")
        return
    columns = [Column(title) for title in ("ID", "NAME", "STATE", "ATTEMPTS", "AGE", "REASON")]
    print(*format_table(columns, [_table_row(status, time.time()) for status in jobs]), sep="\n")


@app.command("status")
def status(job: JobIdArgument, on: options.BackendOption = "local", as_json: options.JsonOption = False) -> None:
    """Show the state of a job."""
    backend = _open_backend(on, restart_daemon=True)
    status = backend.poll(job)
    if as_json:
        print(json.dumps(asdict(status), indent=2))
        return
    facts = [(key, str(_format_value(key, value))) for key, value in asdict(status).items() if value not in (None, ())]
    print(*format_facts(facts), sep="\n")


@app.command()
def logs(
    job: JobIdArgument,
    on: options.BackendOption = "local",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job ends.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Print the backend's log also for a training run.")] = False,
) -> None:
    """Print the logs of a job.

    Shows all attempts; of a training run, the output of all workers and the events, by time and rank.
    """
    from phalanx.app.job_handle import iter_log_lines

    def print_note(text: str) -> None:
        print(escape_control_chars(text), file=sys.stderr, flush=True)

    for line in iter_log_lines(_open_backend(on), job, follow, raw, note=print_note):
        print(line, flush=follow)


@app.command()
def signal(
    job: JobIdArgument,
    signal_name: Annotated[
        str, typer.Argument(metavar="SIGNAL", help="Signal, such as USR1, which makes a run save and stop.")
    ],
    on: options.BackendOption = "local",
) -> None:
    """Send a signal to a job's processes on each node."""
    import signal as signals

    signal_suffix = signal_name.upper().removeprefix("SIG")
    if f"SIG{signal_suffix}" not in signals.Signals.__members__:
        raise UsageError(f"{signal_name}: no such signal; expected a name such as USR1, TERM or INT")
    backend = _open_backend(on, restart_daemon=True)
    backend.send_signal(job, signals.Signals[f"SIG{signal_suffix}"])


@app.command()
def pause(job: JobIdArgument, on: options.BackendOption = "local") -> None:
    """Save, stop and hold a job until `jobs resume`."""
    from phalanx.jobs.backends.base import PAUSED_PREFIX

    backend = _open_backend(on)
    is_paused = (backend.poll(job).reason or "").startswith(PAUSED_PREFIX)
    backend.pause(job, "by `phalanx jobs pause`")
    print(f"job {job} is paused already" if is_paused else f"pausing job {job}")


@app.command()
def resume(job: JobIdArgument, on: options.BackendOption = "local") -> None:
    """Resume a paused or held job.

    It resumes from its checkpoint; a job that is held because of unfit nodes, on other nodes.
    """
    if not _open_backend(on).resume(job):
        raise UsageError(f"job {job} is not paused or held; `phalanx jobs status {job} --on {on}` shows its state")
    print(f"resumed job {job}")


@app.command("cancel")
def cancel(
    jobs: Annotated[
        list[str], typer.Argument(metavar="ID...", help="Job IDs or names of arrays, as shown by `phalanx jobs ls`.")
    ],
    on: options.BackendOption = "local",
) -> None:
    """Cancel jobs or arrays.

    A training run saves a checkpoint first, so that it can be resumed later.
    """
    backend = _open_backend(on)
    # all must exist before the first is cancelled
    job_ids = [job_id for job in jobs for job_id in _resolve_job_ids(backend, job)]
    for job_id in job_ids:
        has_ended = backend.poll(job_id).state.is_final
        backend.cancel(job_id)
        typer.echo(f"job {job_id} has already ended" if has_ended else f"cancelled job {job_id}")


@app.command("prune")
def prune(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="Job IDs or names of arrays, as shown by `phalanx jobs ls`."),
    ] = None,
    older: Annotated[
        str | None, typer.Option("--older-than", metavar="TIME", help="Prune jobs that ended longer ago, such as 7d.")
    ] = None,
) -> None:
    """Remove ended jobs from the local queue.

    Removes their logs and snapshots. Run directories are kept. A run that was trained from a snapshot needs
    it for `generate` and `evaluate` if the recipe imports modules.
    """
    from phalanx.app.submit import parse_duration
    from phalanx.jobs.backends.local import LocalBackend

    if bool(jobs) == (older is not None):
        raise UsageError("nothing to prune: give job IDs, or --older-than TIME")
    backend = LocalBackend()
    if older is not None:
        job_ids = backend.list_ended_before(parse_duration(older) or 0.0)
    else:
        job_ids = [job_id for job in jobs or () for job_id in _resolve_job_ids(backend, job)]
    for job_id in job_ids:
        backend.delete_job(job_id)
    print(f"removed {len(job_ids)} {'job' if len(job_ids) == 1 else 'jobs'}")


def _open_backend(name: str, restart_daemon: bool = False) -> "Backend":
    """Open a backend. `restart_daemon`: start the daemon of the local queue again if it has died."""
    from phalanx.jobs.backends.base import open_backend

    backend = open_backend(name)
    if restart_daemon:
        backend.restart_dead_daemon()
    return backend


def _resolve_job_ids(backend: "Backend", name_or_id: str) -> list[str]:
    """Return the ID of a job, or those of the members of an array."""
    try:
        return [backend.poll(name_or_id).id]
    except UsageError:
        job_ids = [status.id for status in backend.list_jobs(name_or_id)]
        if not job_ids:
            raise
        return job_ids


def _table_row(status: "JobStatus", now: float) -> tuple[str, ...]:
    timestamps = (status.ended_at, status.started_at, status.submitted_at)
    last_change = next((moment for moment in timestamps if moment is not None), None)
    reason = status.reason or (f"exit code {status.exit_code}" if status.exit_code else "")
    # the clock may have been set back
    age = "" if last_change is None else format_duration(max(0.0, now - last_change))
    return status.id, status.name, status.state, str(status.num_attempts), age, reason


def _format_value(key: str, value: object) -> object:
    if key.endswith("_at") and isinstance(value, float):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    return " ".join(value) if isinstance(value, tuple) else value
