"""The jobs of a backend, read now and then by one thread, their page, and the output of workers: the end of a log. A
log may have gigabytes: what is read for one page is bounded."""

import getpass
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from phalanx.errors import DataError, UsageError
from phalanx.jobs.backends.base import Backend
from phalanx.jobs.log_stream import LOG_NAME_PATTERN, decode_terminal_line
from phalanx.jobs.spec import JobState, JobStatus
from phalanx.run import Run
from phalanx.safe_files import open_regular
from phalanx.serve.pages import render_rows, render_time
from phalanx.serve.run_index import run_id
from phalanx.std_streams import escape_control_chars

logger = logging.getLogger(__name__)

READ_INTERVAL_S = 3.0
"""Slurm's controller is asked no more often than this."""
STOP_TIMEOUT_S = 5.0
MAX_ENDED_JOBS = 100
JOB_COLUMNS = ("job", "name", "state", "attempts", "nodes", "submitted", "started", "ended", "why", "")


@dataclass(frozen=True)
class JobList:
    """The jobs at one time (unix seconds); `problem`: why they could not be read."""

    jobs: Sequence[JobStatus] = ()
    read_at: float | None = None
    problem: str | None = None


class JobReader:
    """Reads the jobs of a backend. `update` reads once; `start` and `stop` have a thread do so. Each thread opens the
    backend for itself, since the local queue is an SQLite file."""

    def __init__(self, backend: str, open_backend: Callable[[str], Backend]):
        self.backend, self._open_backend = backend, open_backend
        self.jobs = JobList()
        self._reader: Backend | None = None
        self._stop_requested = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)

    def start(self) -> None:
        """Keep the jobs up to date in a thread."""
        self._thread.start()

    def stop(self) -> None:
        self._stop_requested.set()
        self._wake.set()
        self._thread.join(STOP_TIMEOUT_S)

    def update(self) -> None:
        """Read the jobs once. One that cannot be read leaves the jobs as they were, with a problem."""
        try:
            self._reader = self._reader or self._open_backend(self.backend)
            self.jobs = JobList(self._reader.list_jobs(), time.time())
        except UsageError as error:
            self.jobs = replace(self.jobs, problem=str(error))
        except Exception as error:  # the thread must not end: the next reading may succeed
            logger.exception("serve: the jobs cannot be read")
            self.jobs = replace(self.jobs, problem=f"the jobs cannot be read: {error}")

    def cancel(self, id: str) -> None:
        """Cancel a job, and say in the log that a page asked for it. UsageError where that fails."""
        self._open_backend(self.backend).cancel(id)
        logger.warning("job %s was cancelled from the page (server of %s)", id, getpass.getuser())
        self._wake.set()

    def _run(self) -> None:
        while not self._stop_requested.is_set():
            self.update()
            self._wake.wait(READ_INTERVAL_S)
            self._wake.clear()


def render_jobs(found: JobList, backend: str, may_cancel: bool) -> str:
    """The table of jobs: those that wait or run first, and the newest of the others."""
    parts = []
    if found.problem is not None:
        parts.append(f'<p class="note problem">{escape(found.problem)}</p>')
    if found.read_at is not None:
        parts.append(f'<p class="note">{backend}, read {render_time(found.read_at)}</p>')
    active = [job for job in found.jobs if not job.state.is_final]
    ended = sorted((job for job in found.jobs if job.state.is_final), key=lambda job: -(job.ended_at or 0.0))
    jobs = [*active, *ended[:MAX_ENDED_JOBS]]
    if not jobs and found.problem is None and found.read_at is not None:
        parts.append('<p class="note">No jobs. <code>phalanx jobs submit RECIPE</code> submits one.</p>')
    if jobs:
        parts.append(render_rows(JOB_COLUMNS, (_render_cells(job, may_cancel) for job in jobs)))
    return "".join(parts)


def _render_cells(job: JobStatus, may_cancel: bool) -> Sequence[str]:
    run = f'<a href="run/{run_id(Path(job.run_dir))}">{escape(job.name)}</a>' if job.run_dir else escape(job.name)
    why = job.reason or (f"exit code {job.exit_code}" if job.exit_code else "")
    if not why and job.state is JobState.QUEUED:
        why = "waits for its turn"
    cancel = (
        f'<button class="act" data-action="jobs/cancel" data-job="{escape(job.id)}" '
        f'data-confirm="Cancel job {escape(job.id)} ({escape(job.name)})?">Cancel</button>'
    )
    return (
        escape(job.id),
        run,
        f'<span class="status {escape(job.state.value)}">{escape(job.state.value)}</span>',
        str(job.num_attempts),
        escape(", ".join(job.nodes)),
        *("" if at is None else render_time(at) for at in (job.submitted_at, job.started_at, job.ended_at)),
        escape(why),
        cancel if may_cancel and not job.state.is_final else "",
    )


TAIL_BYTES = 128 << 10
SHORT_TAIL_BYTES = 8 << 10
"""On the page of the run, where the tail is read every second."""
MAX_LINE_CHARS = 4000
NO_LOG_NOTE = '<p class="note">No worker has printed anything yet.</p>'


def list_logs(run: Run) -> list[str]:
    """Names of the logs of workers, the newest attempt first, ranks ascending."""
    try:
        names = [entry.name for entry in os.scandir(run.logs) if LOG_NAME_PATTERN.fullmatch(entry.name)]
    except OSError:
        return []
    numbers = {name: found.groups() for name in names if (found := LOG_NAME_PATTERN.fullmatch(name))}
    return sorted(numbers, key=lambda name: (-int(numbers[name][0]), int(numbers[name][1])))


def read_log_tail(path: Path, max_bytes: int) -> list[str]:
    """The last lines of a log, in `max_bytes`. DataError for anything but a file; OSError where it cannot be read."""
    if path.parent.is_symlink():  # the run may come from another person, and change while its page is open
        raise DataError(f"{path.parent}: expected a directory, found a link")
    descriptor = open_regular(path, follow_links=False)
    try:
        end = os.fstat(descriptor).st_size
        start = max(0, end - max_bytes)
        text = os.pread(descriptor, end - start, start)
    finally:
        os.close(descriptor)
    lines = text.split(b"\n")
    kept = lines[1:] if start and len(lines) > 1 else lines
    texts = (escape_control_chars(decode_terminal_line(line)) for line in kept if line)
    return [text if len(text) <= MAX_LINE_CHARS else f"{text[:MAX_LINE_CHARS]} ..." for text in texts]


def render_log_tail(run: Run, name: str | None = None, max_bytes: int = SHORT_TAIL_BYTES) -> str:
    """The last lines of one of `list_logs`; of the newest attempt's first rank for None."""
    if not (names := list_logs(run)):
        return NO_LOG_NOTE
    chosen = name if name in names else names[0]
    try:
        lines = read_log_tail(run.logs / chosen, max_bytes)
    except (OSError, DataError) as error:
        return f'<p class="note">{escape(str(error))}</p>'
    text = escape("\n".join(lines))
    note = f'<p class="note">{_describe_name(chosen)}, the last lines.</p>'
    return f'{note}<pre class="log" tabindex="0" data-key="log">{text}</pre>'


def render_logs(run: Run, id: str, name: str | None) -> str:
    """The page with the end of one log of a run; `name` is one of `list_logs`, the first for None."""
    names = list_logs(run)
    options = "".join(
        f'<option value="{escape(each)}"{" selected" if each == name else ""}>{escape(_describe_name(each))}</option>'
        for each in names
    )
    form = f"""<form class="bar-form" method="get" action="run/{id}/logs">
<label>Worker <select name="log">{options}</select></label>
<button>Show</button></form>"""
    title = f'<header><h1>Logs</h1></header><p class="sub"><a href="run/{id}">{escape(str(run.path))}</a></p>'
    return f'{title}{form if names else ""}<div id="log">{render_log_tail(run, name, TAIL_BYTES)}</div>'


def _describe_name(name: str) -> str:
    found = LOG_NAME_PATTERN.fullmatch(name)
    assert found is not None
    return f"rank {found[2]}" + (f", attempt {found[1]}" if int(found[1]) else "")
