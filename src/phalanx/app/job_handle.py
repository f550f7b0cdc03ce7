"""Submit a training job from Python, handle it, and read its logs line by line. `phalanx.submit` is here."""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.app.submit import default_gpus, format_status, make_recipe_job, parse_job_fields, poll_until_final
from phalanx.app.train_arguments import TrainArguments
from phalanx.errors import DataError, ExitCode, GaveUpError
from phalanx.jobs.backends.base import Backend, open_backend, poll_again
from phalanx.jobs.log_stream import LogStream
from phalanx.jobs.spec import JobState, JobStatus
from phalanx.run import Event, Run
from phalanx.run.directory import describe_unfinished
from phalanx.run.event_types import AttemptStarted
from phalanx.safe_files import check_links
from phalanx.storage.run_objects import follow_run, mirror_run

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.5
"""Seconds between two polls."""
NO_OUTPUT_TEXTS = {JobState.QUEUED: "waits in the queue: no output yet", JobState.RUNNING: "runs: no output yet"}


@dataclass(frozen=True)
class JobHandle:
    """A submitted job that trains a run."""

    id: str
    backend: Backend
    run: Run

    def status(self) -> JobStatus:
        """Return the state of the job, as `phalanx jobs status` does."""
        self.backend.restart_dead_daemon()
        return self.backend.poll(self.id)

    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Wait until the job ends, and return its last status.

        A job that is held because a node was unfit is released. A backend that does not answer is asked again for 10
        minutes.

        Raises:
            TimeoutError: the job has not ended after `timeout_s`; it keeps running.
            UsageError: the backend does not answer.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s

        def sleep(seconds: float) -> None:
            if (left_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"job {self.id} has not ended after {timeout_s:g} s")
            time.sleep(min(seconds, left_s))

        *_, status = poll_until_final(self.backend, self.id, logger.warning, sleep)
        return status

    def logs(self, follow: bool = False) -> Iterator[str]:
        """Yield the lines of the log, as `phalanx jobs logs` prints them; with `follow` until the job ends."""
        return iter_log_lines(self.backend, self.id, follow, raw=False)

    def cancel(self) -> None:
        """Cancel the job. It saves a checkpoint first, so that the run can be resumed. An ended job is not changed."""
        self.backend.cancel(self.id)

    def result(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait until the job ends, and return the content of `result.json`.

        Raises:
            GaveUpError: the job did not end as done; `code` is its exit code, if the command line has it.
            DataError: the run directory is on no file system of this machine.
            TimeoutError: as `wait`.
        """
        status = self.wait(timeout_s)
        if status.state is not JobState.DONE:
            why = f"{format_status(status)}; see `phalanx jobs logs {self.id} --on {self.backend.name}`"
            codes = {int(code): code for code in ExitCode if code is not ExitCode.DONE}
            raise GaveUpError(why, codes.get(status.exit_code or 0))
        if not self.run.path.is_dir():
            raise DataError(f"{self.run.path}: not on this machine, and job {self.id} is done")
        run = Run(mirror_run(self.run.location))
        if (problem := describe_unfinished(run)) is not None:
            raise GaveUpError(problem)
        return run.read_json(run.result) or {}


def submit(
    recipe: "str | os.PathLike[str]",
    overrides: Sequence[str] = (),
    *,
    on: str = "local",
    nodes: int | str = 1,
    nproc_per_node: int | None = None,
    gpus: int | None = None,
    run: "str | os.PathLike[str] | None" = None,
    time_limit: str | None = None,
    backend_options: Mapping[str, str] | None = None,
    snapshot: str | None = None,
    force: bool = False,
) -> JobHandle:
    """Submit a job that trains a recipe, as `phalanx jobs submit` does.

    The backend restarts the job until it is done. The recipe is checked before the job is sent. The parameters are the
    options of the command.

    Args:
        recipe: a recipe file, its URL, or a script that calls `phalanx.session`.
        overrides: `key=value` of the recipe, or arguments of the script.
        on: backend: local, slurm, kubernetes or ray.
        nodes: number of nodes, or `MIN:MAX`: train on while MIN are left, and take in nodes that return.
        nproc_per_node: workers on each node; default: as the recipe's parallelism requires, else one per GPU, else 1.
        gpus: GPUs on each node; default: in the local queue one per worker, or all.
        run: run directory, on a file system that all nodes share, or a URL; default: `runs/<name>`.
        time_limit: time limit of each attempt, such as `2h`.
        backend_options: options of the backend, such as `{"partition": "gpu"}`.
        snapshot: `workdir`: train a copy of the recipe's directory.
        force: resume although the recipe or the data changed.

    Raises:
        RecipeError: the recipe is wrong.
        UsageError: the backend is not installed, does not answer, or cannot run the job.
    """
    options = [f"{key}={value}" for key, value in (backend_options or {}).items()]
    job = make_recipe_job(
        TrainArguments(os.fspath(recipe), overrides, None if run is None else os.fspath(run), nproc_per_node, force),
        snapshot=snapshot,
        default_gpus=default_gpus(on, nproc_per_node) if gpus is None else None,
        **parse_job_fields(str(nodes), gpus, None, None, time_limit, options),
    )
    assert job.run_dir is not None
    backend = open_backend(on)
    return JobHandle(backend.submit(backend.render(job)), backend, Run(job.run_dir))


def iter_log_lines(
    backend: Backend,
    job_id: str,
    follow: bool,
    raw: bool,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.time,
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[str]:
    """Yield the lines of a job's log.

    Of a training run: the output of its workers and its events, from the run directory. The backend's log is read with
    `raw`, for other jobs, and until the run directory has output that this machine can read. `note` is called with a
    line for people when the job has no output yet.
    """
    backend.restart_dead_daemon()
    status = backend.poll(job_id)
    stream, noted = None, None
    if status.run_dir is not None and not raw:
        run = Run(Path(status.run_dir))
        if (url := run.store_url) is not None:
            run = Run(follow_run(url))
        check_links(run.path)
        stream = LogStream(run, status.submitted_at or 0.0, make_event_formatter(run), clock)
    read = backend.follow_logs(job_id)
    width = 0
    is_silent = True
    while True:
        is_over = not follow or status.state.is_final
        lines = stream.read_new(is_last=is_over) if stream is not None else []
        if stream is None or not stream.has_output:
            for text in read(is_over):
                is_silent = False
                yield text
        for line in lines:
            is_silent, width = False, max(width, len(line.source))
            yield str(replace(line, source=line.source.ljust(width)))
        if is_silent and status.state is not noted:
            noted = status.state
            note(f"job {job_id} {NO_OUTPUT_TEXTS.get(noted, f'{noted}: it has no output')}")
        if is_over:
            break
        sleep(POLL_INTERVAL_S)
        backend.restart_dead_daemon()
        status = poll_again(backend, status)
    if follow and stream is not None and stream.has_output:
        yield _format_end(status, backend.name)


def make_event_formatter(run: Run) -> Callable[[Event], list[str]]:
    """Return a function that formats events as `phalanx train` does in a log."""
    from phalanx.observe.progress import EventFormatter, RunFacts, read_run_facts

    formatter = EventFormatter(0, RunFacts(run.path.name))

    def format_event(event: Event) -> list[str]:
        nonlocal formatter
        if isinstance(event, AttemptStarted) and run.resolved.is_file():  # not written earlier
            formatter = EventFormatter(0, read_run_facts(run))
        return [part for text in formatter.format_event(event) for part in text.splitlines()]

    return format_event


def _format_end(status: JobStatus, backend: str) -> str:
    code = f", exit code {status.exit_code}" if status.exit_code else ""
    more = f"; `phalanx jobs logs {status.id} --on {backend} --raw` has the rest"
    return f"job {status.id} {status.state}{code}{'' if status.state is JobState.DONE else more}"
