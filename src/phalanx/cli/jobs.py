"""`phalanx jobs`: the local queue, or the backend's own queue, behind the same commands."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from phalanx.jobs.engine import Engine
    from phalanx.jobs.spec import Status

app = typer.Typer(add_completion=False, help="Submit, list, follow and cancel jobs, locally or on a cluster.")

On = Annotated[str, typer.Option("--on", metavar="BACKEND", help="Backend: local, slurm, kubernetes or ray.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="Job ID, as shown by `phalanx jobs ls`.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def submit(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE... [KEY=VALUE]...", help="Recipes and overrides; with --framework, a command after `--`."
        ),
    ],
    on: On = "local",
    name: Annotated[str | None, typer.Option(help="Job name.", show_default="name of the recipe or script")] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run directory; of an array, the directory of its runs.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc-per-node", min=1, max=100_000, metavar="N", help="Workers on each node.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=10**6, metavar="N", help="Number of nodes.")] = 1,
    devices: Annotated[
        int | None, typer.Option("--gpus", min=0, max=10_000, metavar="N", help="GPUs on each node.")
    ] = None,
    cores: Annotated[
        int | None, typer.Option("--cpus", min=1, max=100_000, metavar="N", help="CPU cores on each node.")
    ] = None,
    limit: Annotated[
        str | None, typer.Option("--time-limit", metavar="TIME", help="Time limit of each attempt, such as 2h.")
    ] = None,
    priority: Annotated[
        int, typer.Option(min=-(10**6), max=10**6, help="Priority: higher starts first; an hour of waiting adds 1.")
    ] = 0,
    framework: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run a command: torch, jax, tensorflow, mpi, mxnet or plain.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Environment variable of the job (repeatable).")
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Pass this environment variable without exposing its value (repeatable)."),
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
            help="Run a copy of the recipe's directory, or of a git revision.",
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=VALUE,VALUE",
            help="Submit an array: one run per value, or combination (repeatable).",
        ),
    ] = None,
    at_most: Annotated[
        int | None,
        typer.Option("--max-parallel", min=1, max=10**6, metavar="N", help="Array members that run concurrently."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Resume although the recipe or the data changed.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be submitted, and submit nothing.")
    ] = False,
) -> int:
    """Submit a recipe, or with --framework any program.

    The backend restarts the job until it is done. A training run: `phalanx jobs submit recipe.yaml steps=500`. An array
    of runs: `phalanx jobs submit a.yaml b.yaml`, or `recipe.yaml --sweep optimizer.lr=1e-3,3e-4`. Any program: `phalanx
    jobs submit --framework jax --nproc-per-node 2 -- python script.py`.
    """
    from phalanx.cli import submitting, sweep
    from phalanx.jobs.array import render_array
    from phalanx.jobs.engine import open_engine

    more: dict[str, Any] = {
        "nodes": nodes,
        "devices": devices,
        "usual": submitting.devices_here(on, nproc) if devices is None else None,
        "cores": cores,
        "limit": submitting.seconds_of(limit),
        "priority": priority,
        "environment": submitting.pairs(env or [], "--env"),
        "secrets": tuple(secret or ()),
        "options": submitting.pairs(option or [], "--backend-option"),
        "code": code,
    }
    recipes, overrides = sweep.recipes_and_overrides(what)
    several = framework is None and (len(recipes) > 1 or bool(vary))
    if (vary and not several) or (vary and recipes[0].suffix == ".py"):
        raise UsageError("--sweep is for recipes, not for programs: a sweep sets recipe keys")
    if at_most is not None and not several:
        raise UsageError("--max-parallel is for arrays: give several recipes, or --sweep")
    dropped = [option for option, value in (("--run", run), ("--force", force or None)) if value is not None]
    if framework is not None and dropped:
        raise UsageError(
            f"{dropped[0]} is for recipes and scripts of runs; with --framework give it to the command itself"
        )
    if several:
        jobs = sweep.array(
            recipes,
            overrides,
            sweep.variations(vary or []),
            run,
            name,
            at_most,
            lambda path, given, where: submitting.recipe_job(path, given, where, nproc, force, None, **more),
        )
        engine = open_engine(on)
        requests = render_array(engine, jobs)
    else:
        if framework is not None:
            job = submitting.framework_job(framework, what, nproc, name, **more)
        else:
            job = submitting.recipe_job(recipes[0], overrides, run, nproc, force, name, **more)
        engine = open_engine(on)
        requests = [engine.render(job)]
    if dry_run:
        print("\n\n".join(map(str, requests)))
    elif several:
        submitting.submit_all(engine, requests, sys.stdout)
    else:
        submitting.submit(engine, requests[0], sys.stdout)
    return int(ExitCode.DONE)


@app.command("ls")
def list_jobs(
    array: Annotated[str | None, typer.Argument(metavar="[ARRAY]", help="Show only the members of this array.")] = None,
    on: On = "local",
    as_json: Json = False,
) -> None:
    """List jobs, oldest first."""
    from phalanx.jobs.array import members
    from phalanx.jobs.engine import open_engine

    found = open_engine(on).jobs()
    if array is not None and not (found := members(found, array)):
        raise UsageError(f"{array}: {on} knows no array of this name; `phalanx jobs ls --on {on}` lists all jobs")
    if as_json:
        print(json.dumps([asdict(status) for status in found], indent=2))
        return
    if not found:
        print(f"no jobs in {on}'s queue; `phalanx jobs submit RECIPE` adds one")
        return
    rows: list[tuple[str, ...]] = [("ID", "NAME", "STATE", "ATTEMPTS", "AGE", "REASON")]
    rows += [_row(status, time.time()) for status in found]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip())


@app.command("status")
def show(job: Id, on: On = "local", as_json: Json = False) -> None:
    """Show the state of a job."""
    from phalanx.jobs.engine import open_engine

    status = open_engine(on).poll(job)
    if as_json:
        print(json.dumps(asdict(status), indent=2))
        return
    for key, value in asdict(status).items():
        if value not in (None, ()):
            print(f"{key:<10}{_told(key, value)}")


@app.command()
def logs(
    job: Id,
    on: On = "local",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job ends.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Print the backend's log also for a training run.")] = False,
) -> None:
    """Print the logs of a job.

    Shows all attempts; of a training run, the output of all workers and the events, by time and rank.
    """
    from phalanx.cli.job_logs import lines_of
    from phalanx.jobs.engine import open_engine

    for line in lines_of(open_engine(on), job, follow, raw):
        print(line, flush=follow)


@app.command()
def signal(
    job: Id,
    name: Annotated[
        str, typer.Argument(metavar="SIGNAL", help="Signal, such as USR1, which makes a run save and stop.")
    ],
    on: On = "local",
) -> None:
    """Send a signal to a job's processes on each node."""
    import signal as signals

    from phalanx.jobs.engine import open_engine

    wanted = name.upper().removeprefix("SIG")
    if f"SIG{wanted}" not in signals.Signals.__members__:
        raise UsageError(f"{name}: no such signal; expected such as USR1, TERM or INT")
    open_engine(on).signal(job, signals.Signals[f"SIG{wanted}"])


@app.command()
def release(job: Id, on: On = "local") -> None:
    """Release a held job.

    A job is held after its nodes were found unfit; when released, it resumes on other nodes.
    """
    from phalanx.jobs.engine import ReleasingEngine, open_engine

    engine = open_engine(on)
    if not isinstance(engine, ReleasingEngine):
        raise UsageError(
            f"{on} holds no jobs: it restarts a job whose node was unfit on another node automatically, or ends it"
        )
    if not engine.release(job):
        raise UsageError(
            f"job {job} is not held because of unfit nodes; `phalanx jobs status {job} --on {on}` shows its state"
        )


@app.command("cancel")
def stop(
    jobs: Annotated[
        list[str], typer.Argument(metavar="ID...", help="Job IDs or names of arrays, as shown by `phalanx jobs ls`.")
    ],
    on: On = "local",
) -> None:
    """Cancel jobs or arrays.

    A training run saves a checkpoint first, so that it can be resumed later.
    """
    from phalanx.jobs.engine import open_engine

    engine: Engine = open_engine(on)
    found = [ident for job in jobs for ident in _meant(engine, job)]  # all must be there before the first is cancelled
    for ident in found:
        engine.cancel(ident)


@app.command("prune")
def forget(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="Job IDs or names of arrays, as shown by `phalanx jobs ls`."),
    ] = None,
    older: Annotated[
        str | None, typer.Option("--older-than", metavar="TIME", help="Prune jobs that ended longer ago, such as 7d.")
    ] = None,
) -> None:
    """Remove ended jobs from the local queue.

    Removes their logs and snapshots. Run directories are kept. `generate` and `evaluate` need the snapshot of a run
    whose modules came from it.
    """
    from phalanx.cli.submitting import seconds_of
    from phalanx.jobs.engines.local import Local

    if bool(jobs) == (older is not None):
        raise UsageError("nothing to prune: give job IDs, or --older-than TIME")
    engine = Local()
    if older is not None:
        found = engine.over_for(seconds_of(older) or 0.0)
    else:
        found = [ident for job in jobs or () for ident in _meant(engine, job)]
    for ident in found:
        engine.forget(ident)
    print(f"removed {len(found)} {'job' if len(found) == 1 else 'jobs'}")


def _meant(engine: "Engine", word: str) -> list[str]:
    """The job of this id, or the members of the array of this name."""
    from phalanx.jobs.array import members

    try:
        return [engine.poll(word).id]
    except UsageError:
        found = [status.id for status in members(engine.jobs(), word)]
        if not found:
            raise
        return found


def _row(status: "Status", now: float) -> tuple[str, ...]:
    from phalanx.observe.units import duration

    moments = (status.ended, status.started, status.submitted)
    since = next((moment for moment in moments if moment is not None), None)
    why = status.reason or (f"exit code {status.code}" if status.code else "")
    ago = duration(max(0.0, now - since)) if since is not None else ""  # the clock may have been set back
    return status.id, status.name, status.state, str(status.attempts), ago, why


def _told(key: str, value: object) -> object:
    if key in ("submitted", "started", "ended") and isinstance(value, float):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    return " ".join(value) if isinstance(value, tuple) else value
