"""Makes jobs of what people type, and follows one that trains a recipe as if it ran here."""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from phalanx.cluster import this_machine
from phalanx.errors import ExitCode, RecipeError, UsageError
from phalanx.jobs.array import submit_array
from phalanx.jobs.code import Code, commit_code, folder_code, unpack
from phalanx.jobs.engine import Engine, ReleasingEngine, Request, open_engine
from phalanx.jobs.frameworks import check as check_framework
from phalanx.jobs.spec import Job, State, Status
from phalanx.joining import Shown
from phalanx.recipe import load_recipe
from phalanx.recipe.travelled import CODE_OF
from phalanx.run import EventTail, Run
from phalanx.run.directory import check_place, not_done
from phalanx.streams import word_of

LOOK = 1.0
"""Seconds between two looks at a job that is followed."""
SILENCE = 600.0
"""Seconds for which an engine may not answer while a job is followed."""
UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def recipe_job(
    path: Path,
    overrides: Sequence[str],
    run: Path | None,
    nproc: int | None,
    force: bool,
    name: str | None,
    code: str | None = None,
    environment: Mapping[str, str] | None = None,
    usual: int | None = None,
    **more: object,
) -> Job:
    """The job that trains a recipe, or runs a script with a loop of its own. The recipe is checked here, before
    anything is sent. `code`: what travels, see `carried`; with it the recipe is that of the copy. `usual`: GPUs that it
    takes on a node where nobody says, unless it trains on the CPU."""
    script = path.suffix == ".py"
    if script:
        if not path.is_file():
            raise UsageError(f"{path}: no such file; expected a recipe or a script that calls phalanx.join")
        if (nodes := more.get("nodes")) not in (None, 1):
            raise UsageError(
                f"--nodes {nodes}: {path} is a script, which runs on one node; on several torchrun starts its workers: "
                f"phalanx jobs submit --framework torch --nodes {nodes} -- python {word_of(path)}"
            )
        called = path.stem
    else:
        loaded = load_recipe(path, overrides)
        loaded.check_named()
        called = loaded.recipe.name
        usual = None if loaded.recipe.device == "cpu" else usual
    where = (run if run is not None else Path("runs") / called).absolute()
    check_place(where)
    # a script's paths are relative to where it is started, a recipe's to where it lies
    top = Path.cwd() if script else path.absolute().parent
    there, environment = str(path.absolute()), dict(environment or {})
    travels = None
    if code is not None:
        there = os.path.relpath(path.absolute(), top)
        if there.startswith(".."):
            raise UsageError(
                f"{path}: with --snapshot, start from a directory that contains the script; {top} does not"
            )
        travels = carried(code, top, there)
        environment[CODE_OF] = str(travels.of)
        if travels.commit is not None and not script:
            check_committed(travels, there, overrides)
    words = [sys.executable, "-P", "-m", "phalanx", "train", there, *overrides, "--run", str(where)]
    words += [] if nproc is None else ["--nproc-per-node", str(nproc)]
    words += ["--force"] if force else []
    more |= {} if usual is None else {"devices": usual}
    return _job(name or called, words, code=travels, run=where, environment=environment, **more)


def carried(code: str, top: Path, needed: str | None = None) -> Code:
    """What travels with a job: `workdir` is all of `top` that is code, anything else names a git revision."""
    return folder_code(top, needed=needed) if code == "workdir" else commit_code(top, code, needed)


def check_committed(code: Code, name: str, overrides: Sequence[str]) -> None:
    """RecipeError for a recipe that is wrong in the commit that travels, whatever stands here."""
    with tempfile.TemporaryDirectory(prefix="phalanx-code-") as scratch:
        unpack(code.tar, Path(scratch) / "code")
        start = Path(scratch) / "code" / code.start
        try:
            load_recipe(start / name, overrides)
        except RecipeError as error:
            told = str(error).replace(f"{start}{os.sep}", f"commit {str(code.commit)[:12]}: ")
            raise RecipeError(told) from None


def framework_job(
    framework: str,
    command: Sequence[str],
    nproc: int | None,
    name: str | None,
    code: str | None = None,
    usual: int | None = None,
    **more: object,
) -> Job:
    """The job that starts `nproc` processes of a program on each node, with its framework's variables."""
    check_framework(framework)
    if not command:
        raise UsageError("--framework needs a command: phalanx jobs submit --framework torch -- python script.py")
    words = [sys.executable, "-P", "-m", "phalanx.jobs.launch", framework, str(nproc or 1), "--", *command]
    scripts = [Path(word).stem for word in command if word.endswith((".py", ".sh"))]
    travels = None if code is None else carried(code, Path.cwd())
    more |= {} if usual is None else {"devices": usual}
    return _job(name or (scripts[0] if scripts else framework), words, code=travels, **more)


def _job(name: str, words: Sequence[str], **more: object) -> Job:
    given = {key: value for key, value in more.items() if value is not None}
    return Job(name, tuple(words), Path.cwd(), **given)  # type: ignore[arg-type]


def devices_here(engine: str, nproc: int | None) -> int | None:
    """GPUs that a job takes on a node when nobody says: on this machine one for each worker, or all."""
    machine = this_machine()
    if engine != "local" or not machine.gpus:
        return None
    return min(nproc or machine.gpus, machine.gpus)


def pairs(given: Sequence[str], option: str) -> dict[str, str]:
    """KEY=VALUE options as a mapping."""
    found = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not key or not equals:
            raise UsageError(f"{option} {each}: expected KEY=VALUE")
        found[key] = value
    return found


def seconds_of(text: str | None) -> float | None:
    """`90`, `30s`, `15min`, `2h`, `1d` or HH:MM:SS in seconds."""
    if text is None:
        return None
    parts = text.split(":")
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text[len(number) :] or "s"
    try:
        if len(parts) == 3:
            hours, minutes, seconds = (int(part) for part in parts)
            return 3600.0 * hours + 60 * minutes + seconds
        return float(number) * UNITS[unit]
    except (ValueError, KeyError, OverflowError):
        raise UsageError(f"{text!r} is not a duration: expected such as 90s, 15min, 2h, 1d or 01:30:00") from None


def train_on(engine_name: str, job: Job, run: Path, dry: bool, out: TextIO) -> int:
    """Submit a job that trains in `run`, and follow it to its end; returns the exit code that it ended with."""
    engine = open_engine(engine_name)
    request = engine.render(job)
    if dry:
        print(request)
        return int(ExitCode.DONE)
    happened = EventTail(Run(run).events)
    happened.skip()  # of what others did in this run before
    ident = submit(engine, request, out)
    try:
        with Shown(Run(run), out) as shown:
            status = follow(engine, ident, happened, shown, out)
    except KeyboardInterrupt:
        print(
            f"\nno longer following job {ident}, which keeps running; to cancel it: "
            f"phalanx jobs cancel {ident} --on {engine_name}",
            file=out,
        )
        return int(ExitCode.UNFINISHED)
    if status.state is State.DONE:
        seen = Run(run).resolved.is_file()  # where it lies on a disk that this machine has
        if seen and (wrong := not_done(Run(run))) is not None:
            print(f"error: {wrong}", file=out)
            return int(ExitCode.GAVE_UP)
        result = Run(run).read_json(Run(run).result) or {}
        print(f"digest   {result.get('digest')}\nreport   phalanx report {word_of(run)}", file=out)
        return int(ExitCode.DONE)
    print(f"details  phalanx jobs logs {ident} --on {engine.name}", file=out)
    return status.code if status.code else int(ExitCode.UNFINISHED)


def submit(engine: Engine, request: Request, out: TextIO) -> str:
    """Send a job and say so."""
    ident = engine.submit(request)
    print(f"job {ident} ({request.job.name}) submitted to {engine.name}", file=out)
    return ident


def submit_all(engine: Engine, requests: Sequence[Request], out: TextIO) -> list[str]:
    """Send an array and say so."""
    idents = submit_array(engine, requests)
    jobs = [job for request in requests for job in request.members or (request.job,)]
    for ident, job in zip(idents, jobs, strict=True):
        print(f"job {ident} ({job.name}) submitted to {engine.name}, run {job.run}", file=out)
    print(f"cancel all: phalanx jobs cancel {jobs[0].array} --on {engine.name}", file=out)
    return idents


def follow(
    engine: Engine,
    ident: str,
    happened: EventTail,
    shown: Shown,
    out: TextIO,
    sleep: Callable[[float], None] = time.sleep,
) -> Status:
    """Show what happens in a run that a job trains, until the job is over; how it ended. Only what stands in the run
    directory is shown, so it must be on a file system that this machine sees, too. `happened`: its events that are
    to be shown. A job that is held because a node was unfit is released."""
    told: tuple[State, str | None] | None = None
    unanswered = 0
    while True:
        try:
            if isinstance(engine, ReleasingEngine):
                engine.release(ident)
            status = engine.poll(ident)
            unanswered = 0
        except UsageError as error:  # a controller that starts anew, or a network that is down for a while
            unanswered += 1
            if unanswered * LOOK > SILENCE:
                raise
            if unanswered == 1:
                print(f"{error}; retrying for {SILENCE / 60:.0f} min", file=out)
            sleep(LOOK)
            continue
        for event in happened.read():
            shown.show(event)
        if (status.state, status.reason) != told and status.state is not State.RUNNING:
            print(_line(status), file=out)
        told = status.state, status.reason
        if status.state.over:
            return status
        sleep(LOOK)


def _line(status: Status) -> str:
    code = f", exit code {status.code}" if status.code else ""
    why = f": {status.reason}" if status.reason else ""
    return f"job {status.id} {status.state}{code}{why}"
