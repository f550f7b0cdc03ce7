"""Read the logs of a job line by line, until it ends if they are followed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from phalanx.jobs.backends.base import Backend, open_log_reader, poll_again, restart_dead_daemon
from phalanx.jobs.log_stream import LogStream
from phalanx.jobs.spec import JobState, JobStatus
from phalanx.run import Event, Run
from phalanx.run.event_types import AttemptStarted
from phalanx.safe_files import check_links

POLL_INTERVAL_S = 0.5
"""Seconds between two polls."""
NO_OUTPUT_TEXTS = {
    JobState.QUEUED: "waits in the queue: no output yet",
    JobState.RUNNING: "runs: no output yet",
}


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
    restart_dead_daemon(backend)
    status = backend.poll(job_id)
    stream, noted = None, None
    if status.run_dir is not None and not raw:
        run = Run(Path(status.run_dir))
        check_links(run.path)
        stream = LogStream(run, status.submitted_at or 0.0, make_event_formatter(run), clock)
    read, width, is_silent = open_log_reader(backend, job_id), 0, True
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
        restart_dead_daemon(backend)
        status = poll_again(backend, status)
    if follow and stream is not None and stream.has_output:
        yield _format_end(status, backend.name)


def make_event_formatter(run: Run) -> Callable[[Event], list[str]]:
    """Return a function that formats events as `phalanx train` does in a log."""
    from phalanx.observe.progress import EventFormatter
    from phalanx.observe.run_progress import RunFacts, read_run_facts

    formatter = EventFormatter(0, RunFacts(run.path.name))

    def format_event(event: Event) -> list[str]:
        nonlocal formatter
        if isinstance(event, AttemptStarted) and run.resolved.is_file():  # not written earlier
            formatter = EventFormatter(0, read_run_facts(run))
        return [part for text in formatter.format_event(event) for part in text.splitlines()]

    return format_event


def _format_end(status: JobStatus, backend: str) -> str:
    code = f", exit code {status.exit_code}" if status.exit_code else ""
    more = (
        "" if status.state is JobState.DONE else f"; `phalanx jobs logs {status.id} --on {backend} --raw` has the rest"
    )
    return f"job {status.id} {status.state}{code}{more}"
