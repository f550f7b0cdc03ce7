"""The jobs of a backend, read now and then by one thread, and their page."""

import getpass
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import Backend
from phalanx.jobs.spec import JobState, JobStatus
from phalanx.serve.pages import render_rows, render_time
from phalanx.serve.run_index import run_id

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
        """End the thread."""
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
