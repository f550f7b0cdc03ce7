"""Build jobs and arrays of jobs from command-line options, submit them, and follow a training run on a backend."""

import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from phalanx.app.resume import check_min_nodes
from phalanx.app.train_arguments import TrainArguments
from phalanx.cluster import discover_machine
from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.backends.base import Backend, SubmitRequest, open_backend, poll_again
from phalanx.jobs.frameworks.process_env import check_framework as check_framework
from phalanx.jobs.snapshot import Snapshot, snapshot_folder
from phalanx.jobs.spec import Job, JobState, JobStatus, make_array
from phalanx.observe.progress import DeferredDisplay
from phalanx.recipe import load_recipe
from phalanx.recipe.checks import num_workers_for
from phalanx.recipe.load import LoadedRecipe
from phalanx.recipe.snapshot_paths import SNAPSHOT_SOURCE_VARIABLE
from phalanx.run import EventTail, Run
from phalanx.run.directory import check_run_path, describe_unfinished
from phalanx.run.node_env import parse_num_nodes
from phalanx.std_streams import word_of
from phalanx.storage.run_objects import follow_run, mirror_run
from phalanx.storage.url import is_url

POLL_INTERVAL_S = 1.0
"""Seconds between two polls of a job that is followed."""
BACKEND_TIMEOUT_S = 600.0
"""Seconds for which a backend may fail to answer while a job is followed."""
SECONDS_PER_UNIT = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
MakeJob = Callable[[str, list[str], str], Job]
"""Makes the job that trains a recipe with overrides in a run directory."""


def make_recipe_job(
    arguments: TrainArguments,
    name: str | None = None,
    snapshot: str | None = None,
    environment: Mapping[str, str] | None = None,
    default_gpus: int | None = None,
    **job_fields: object,
) -> Job:
    """Make the job that trains a recipe, or runs a script with a session. The recipe is checked before the job is sent.

    Args:
        snapshot: see `take_snapshot`; the job then reads the recipe from the copy.
        default_gpus: GPUs on each node, unless `gpus_per_node` is given or the recipe trains on the CPU.
        job_fields: fields of `Job`.
    """
    path = Path(arguments.path)
    if arguments.is_script:
        if not path.is_file():
            raise UsageError(f"{path}: no such file; expected a recipe or a script that calls phalanx.session")
        if (nodes := job_fields.get("num_nodes")) not in (None, 1):
            raise UsageError(
                f"--nodes {nodes}: {path} is a script, which runs on one node; on several torchrun starts its workers: "
                f"phalanx jobs submit --framework torch --nodes {nodes} -- python {word_of(path)}"
            )
        job_name = path.stem
    else:
        loaded = arguments.load_recipe()
        loaded.check_required()
        _check_fewer_nodes(loaded, arguments.nproc_per_node or job_fields.get("gpus_per_node"), job_fields)
        job_name = loaded.recipe.name
        default_gpus = None if loaded.recipe.device == "cpu" else default_gpus
    run = arguments.find_run(job_name)
    run_dir = run.path.absolute()
    check_run_path(run_dir)
    run = run if run.store_url is not None else Run(run_dir)
    # paths of a script are relative to the working directory, those of a recipe to its own directory
    source_dir = Path.cwd() if arguments.is_script else path.absolute().parent
    recipe_path = str(arguments.path) if is_url(arguments.path) else str(path.absolute())
    job_snapshot, environment = None, dict(environment or {})
    if snapshot is not None:
        if is_url(arguments.path):
            raise UsageError(f"--snapshot {snapshot}: {arguments.path} is not in a directory here; leave it out")
        recipe_path = os.path.relpath(path.absolute(), source_dir)
        if recipe_path.startswith(".."):
            raise UsageError(
                f"{path}: with --snapshot, start from a directory that contains the script; {source_dir} does not"
            )
        job_snapshot = take_snapshot(snapshot, source_dir, recipe_path)
        environment[SNAPSHOT_SOURCE_VARIABLE] = str(job_snapshot.source_dir)
    command = [sys.executable, "-P", "-m", "phalanx", "train", recipe_path, *arguments.format_options(run)]
    command += ["--force"] if arguments.force else []
    job_fields |= {} if default_gpus is None else {"gpus_per_node": default_gpus}
    return _make_job(
        name or job_name,
        command,
        snapshot=job_snapshot,
        run_dir=run_dir,
        environment=environment,
        workers_per_node=arguments.nproc_per_node,
        **job_fields,
    )


def _check_fewer_nodes(loaded: LoadedRecipe, workers_per_node: object, job_fields: Mapping[str, object]) -> None:
    """Raise RecipeError where it is known that the recipe cannot be divided among the least number of nodes."""
    num_nodes, min_nodes = job_fields.get("num_nodes"), job_fields.get("min_nodes")
    if isinstance(num_nodes, int) and isinstance(min_nodes, int):
        per_node = workers_per_node if isinstance(workers_per_node, int) and workers_per_node else 1
        total = per_node * num_nodes if workers_per_node else num_workers_for(loaded.recipe, num_nodes)
        check_min_nodes(loaded, total, num_nodes, min_nodes)


def take_snapshot(snapshot: str, source_dir: Path, required_file: str | None = None) -> Snapshot:
    """Take a snapshot of the code in `source_dir`. Raises UsageError where `snapshot` is not `workdir`."""
    if snapshot != "workdir":
        raise UsageError(
            f"--snapshot {snapshot}: expected workdir; for a git revision, submit from a `git worktree` of it"
        )
    return snapshot_folder(source_dir, required_file=required_file)


def make_framework_job(
    framework: str,
    command: Sequence[str],
    nproc_per_node: int | None,
    name: str | None,
    snapshot: str | None = None,
    default_gpus: int | None = None,
    **job_fields: object,
) -> Job:
    """Make the job that starts `nproc_per_node` processes of a program on each node, with its framework's environment
    variables."""
    check_framework(framework)
    if job_fields.get("min_nodes") is not None:
        raise UsageError(
            f"--nodes {job_fields['min_nodes']}:{job_fields['num_nodes']}: is for recipes; give a program of another "
            f"framework one number of nodes, such as --nodes {job_fields['num_nodes']}"
        )
    if not command:
        raise UsageError("--framework needs a command: phalanx jobs submit --framework torch -- python script.py")
    launcher = [sys.executable, "-P", "-m", "phalanx.jobs.frameworks.launcher"]
    scripts = [Path(word).stem for word in command if word.endswith((".py", ".sh"))]
    job_snapshot = None if snapshot is None else take_snapshot(snapshot, Path.cwd())
    job_fields |= {} if default_gpus is None else {"gpus_per_node": default_gpus}
    return _make_job(
        name or (scripts[0] if scripts else framework),
        [*launcher, framework, str(nproc_per_node or 1), "--", *command],
        snapshot=job_snapshot,
        workers_per_node=nproc_per_node,
        **job_fields,
    )


def _make_job(name: str, command: Sequence[str], **job_fields: object) -> Job:
    set_fields = {key: value for key, value in job_fields.items() if value is not None}
    return Job(name, tuple(command), Path.cwd(), **set_fields)  # type: ignore[arg-type]


def default_gpus(backend: str, nproc_per_node: int | None) -> int | None:
    """Return the GPUs of a job without --gpus: on this machine one per worker, or all; on other backends None."""
    machine = discover_machine()
    if backend != "local" or not machine.num_gpus:
        return None
    return min(nproc_per_node or machine.num_gpus, machine.num_gpus)


def parse_job_fields(
    nodes: str,
    gpus: int | None,
    cpus: int | None,
    memory: str | None,
    time_limit: str | None,
    backend_options: Sequence[str],
) -> dict[str, Any]:
    """Parse what a job needs of a backend into fields of `Job`."""
    min_nodes, num_nodes = parse_num_nodes(nodes, "--nodes ")
    return {
        "num_nodes": num_nodes,
        "min_nodes": min_nodes if min_nodes < num_nodes else None,
        "gpus_per_node": gpus,
        "cpus_per_node": cpus,
        "memory_bytes": parse_memory(memory),
        "time_limit_s": parse_duration(time_limit),
        "backend_options": parse_assignments(backend_options, "--backend-option"),
    }


def parse_assignments(assignments: Sequence[str], option_name: str) -> dict[str, str]:
    """Parse KEY=VALUE options."""
    values = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not key or not equals:
            raise UsageError(f"{option_name} {assignment}: expected KEY=VALUE")
        values[key] = value
    return values


def parse_duration(text: str | None) -> float | None:
    """Parse `90`, `30s`, `15min`, `2h`, `1d` or HH:MM:SS into seconds."""
    if text is None:
        return None
    parts = text.split(":")
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text[len(number) :] or "s"
    try:
        if len(parts) == 3:
            hours, minutes, seconds = (int(part) for part in parts)
            return 3600.0 * hours + 60 * minutes + seconds
        return float(number) * SECONDS_PER_UNIT[unit]
    except (ValueError, KeyError, OverflowError):
        raise UsageError(f"{text!r} is not a duration: expected one such as 90s, 15min, 2h, 1d or 01:30:00") from None


def parse_memory(text: str | None) -> int | None:
    """Parse `64G`, `512M` or `1.5T` (powers of 1,024, as Slurm has them) into bytes."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([MGT])i?B?", text)
    if match is None:
        raise UsageError(f"--memory {text}: expected a number and a unit, such as 512M, 64G or 1.5T")
    return int(float(match[1]) * 2 ** {"M": 20, "G": 30, "T": 40}[match[2]])


def submit_and_follow(backend_name: str, job: Job, run: Path, dry_run: bool, out: TextIO) -> int:
    """Submit a job that trains in `run`, follow it until it ends, and return its exit code."""
    backend = open_backend(backend_name)
    request = backend.render(job)
    if dry_run:
        print(request)
        return int(ExitCode.DONE)
    if (url := Run(run).store_url) is not None:
        run = follow_run(url)
    event_tail = EventTail(Run(run).events)
    event_tail.skip()  # events of earlier attempts
    job_id = submit_job(backend, request, out)
    try:
        with DeferredDisplay(Run(run), out) as display:
            status = follow_job(backend, job_id, event_tail, display, out)
    except KeyboardInterrupt:
        print(
            f"\nno longer following job {job_id}, which keeps running; to cancel it: "
            f"phalanx jobs cancel {job_id} --on {backend_name}",
            file=out,
        )
        return int(ExitCode.UNFINISHED)
    if status.state is JobState.DONE:
        run = run if url is None else mirror_run(url)
        is_visible = Run(run).resolved.is_file()  # the run directory is on a file system of this machine
        if is_visible and (problem := describe_unfinished(Run(run))) is not None:
            print(f"error: {problem}", file=out)
            return int(ExitCode.GAVE_UP)
        result = Run(run).read_json(Run(run).result) or {}
        print(f"digest   {result.get('digest')}\nreport   phalanx report {word_of(Run(run).location)}", file=out)
        return int(ExitCode.DONE)
    print(f"details  phalanx jobs logs {job_id} --on {backend.name}", file=out)
    return status.exit_code if status.exit_code else int(ExitCode.UNFINISHED)


def submit_job(backend: Backend, request: SubmitRequest, out: TextIO) -> str:
    """Submit a job and print its ID."""
    job_id = backend.submit(request)
    print(f"job {job_id} ({request.job.name}) submitted to {backend.name}", file=out)
    return job_id


def submit_jobs(backend: Backend, requests: Sequence[SubmitRequest], out: TextIO) -> list[str]:
    """Submit an array and print the IDs of its jobs."""
    job_ids = backend.submit_array(requests)
    jobs = [job for request in requests for job in request.array_jobs or (request.job,)]
    for job_id, job in zip(job_ids, jobs, strict=True):
        where = "" if job.run_dir is None else f", run {job.run_dir}"
        print(f"job {job_id} ({job.name}) submitted to {backend.name}{where}", file=out)
    print(f"cancel all: phalanx jobs cancel {jobs[0].array_name} --on {backend.name}", file=out)
    return job_ids


def follow_job(
    backend: Backend,
    job_id: str,
    event_tail: EventTail,
    display: DeferredDisplay,
    out: TextIO,
    sleep: Callable[[float], None] = time.sleep,
) -> JobStatus:
    """Show the events of a job's run until the job ends; return its last status.

    The run directory must be on a file system of this machine. A job that is held because a node was unfit is released.
    """
    last_printed: tuple[JobState, str | None] | None = None
    for status in poll_until_final(backend, job_id, lambda text: print(text, file=out), sleep):
        for event in event_tail.read():
            display.show_event(event)
        if (status.state, status.reason) != last_printed and status.state is not JobState.RUNNING:
            print(format_status(status), file=out)
        last_printed = status.state, status.reason
    return status


def poll_until_final(
    backend: Backend, job_id: str, report: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> Iterator[JobStatus]:
    """Yield the status of a job every POLL_INTERVAL_S; the last is final.

    A job that is held because a node was unfit is released. `report` is called when the backend does not answer, which
    is retried for BACKEND_TIMEOUT_S.
    """
    num_failed_polls = 0
    status: JobStatus | None = None
    while True:
        try:
            backend.restart_dead_daemon()
            backend.release(job_id)
            status = backend.poll(job_id) if status is None else poll_again(backend, status)
        except UsageError as error:  # a controller that restarts, or a network that is down for a while
            num_failed_polls += 1
            if num_failed_polls * POLL_INTERVAL_S > BACKEND_TIMEOUT_S:
                raise
            if num_failed_polls == 1:
                report(f"{error}; retrying for {BACKEND_TIMEOUT_S / 60:.0f} min")
        else:
            num_failed_polls = 0
            yield status
            if status.state.is_final:
                return
        sleep(POLL_INTERVAL_S)


def format_status(status: JobStatus) -> str:
    code_text = f", exit code {status.exit_code}" if status.exit_code else ""
    reason_text = f": {status.reason}" if status.reason else ""
    return f"job {status.id} {status.state}{code_text}{reason_text}"


def split_recipes_and_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `a.yaml b.yaml steps=5` into recipes and overrides. Words after a script are its arguments."""
    if arguments[0].endswith(".py"):
        return [arguments[0]], list(arguments[1:])
    more_recipes = itertools.takewhile(lambda word: word.endswith((".yaml", ".yml")) and "=" not in word, arguments[1:])
    recipes = [arguments[0], *more_recipes]
    return recipes, list(arguments[len(recipes) :])


def expand_sweep(sweep: Sequence[str]) -> list[tuple[str, ...]]:
    """Return each combination of the values of `--sweep KEY=VALUE,VALUE` as overrides; without it one empty one."""
    axes = []
    for given in sweep:
        key, equals, values = given.partition("=")
        values_list = [value.strip() for value in values.split(",")]
        if not key or not equals or not all(values_list):
            raise UsageError(f"--sweep {given}: expected KEY=VALUE,VALUE,... such as optimizer.lr=1e-3,3e-4")
        if len(set(values_list)) < len(values_list):
            raise UsageError(f"--sweep {given}: duplicate value")
        axes.append([f"{key}={value}" for value in values_list])
    keys = [given.partition("=")[0] for given in sweep]
    if len(set(keys)) < len(keys):
        raise UsageError(f"--sweep {max(keys, key=keys.count)} is given twice; list all values of a key in one --sweep")
    return list(itertools.product(*axes))


def make_sweep(
    recipes: Sequence[str],
    overrides: Sequence[str],
    combinations: Sequence[Sequence[str]],
    runs_dir: str | Path | None,
    name: str | None,
    max_parallel: int | None,
    make_job: MakeJob,
) -> tuple[Job, ...]:
    """Make the jobs of an array. Each run is named after its recipe and its values. All recipes are checked before
    anything is sent."""
    jobs = []
    first_name = None
    for path in recipes:
        for values in combinations:
            given = [*overrides, *values]
            recipe_name = load_recipe(path, given).recipe.name
            first_name = first_name or recipe_name
            label = "-".join([recipe_name, *(re.sub(r"[^A-Za-z0-9._=+-]+", "_", value) for value in values)])
            jobs.append(make_job(path, given, f"{str(runs_dir or 'runs').rstrip('/')}/{label}"))
    assert first_name is not None
    return make_array(name or first_name, jobs, max_parallel)
