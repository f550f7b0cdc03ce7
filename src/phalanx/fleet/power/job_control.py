"""Reach jobs of backends by handles such as local:7, to pause and resume them for a load target."""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from functools import cache

from phalanx.errors import UsageError
from phalanx.fleet.power.job_shedder import PausableState
from phalanx.jobs.backends.base import PAUSED_PREFIX, Backend, open_backend, restart_dead_daemon
from phalanx.jobs.spec import JobState


class BackendJobControl:
    """A `JobControl` of all backends. `reason`: why, as `phalanx jobs status` shows it; jobs that are
    paused for another reason stay paused."""

    def __init__(self, reason: str):
        self._reason = reason
        self._open = cache(lambda name, thread: open_backend(name))
        """A database of a queue belongs to the thread that opened it."""

    def check_handle(self, handle: str) -> None:
        """Raise UsageError for a handle of no backend or no job."""
        backend, job_id = self._find(handle)
        backend.poll(job_id)

    def read_state(self, handle: str) -> PausableState:
        """Return the state of a job."""
        backend, job_id = self._find(handle)
        with _translate_storage_errors(handle):
            restart_dead_daemon(backend)
            status = backend.poll(job_id)
        if status.state.is_final:
            return PausableState.ENDED
        if status.state is JobState.RUNNING:
            return PausableState.RUNNING
        if status.reason == f"{PAUSED_PREFIX}{self._reason}":
            return PausableState.PAUSED
        return PausableState.HELD if (status.reason or "").startswith(PAUSED_PREFIX) else PausableState.WAITING

    def pause(self, handle: str) -> None:
        """Ask a job to save and stop; one that is paused already keeps its reason."""
        backend, job_id = self._find(handle)
        if self.read_state(handle) is PausableState.HELD:
            return
        with _translate_storage_errors(handle):
            backend.pause(job_id, self._reason)

    def resume(self, handle: str) -> None:
        """Let a job start that was paused for this reason."""
        backend, job_id = self._find(handle)
        if self.read_state(handle) is not PausableState.PAUSED:
            return
        with _translate_storage_errors(handle):
            backend.resume(job_id)

    def _find(self, handle: str) -> tuple[Backend, str]:
        name, _, job_id = handle.partition(":")
        return self._open(name, threading.get_ident()), job_id


@contextlib.contextmanager
def _translate_storage_errors(handle: str) -> Iterator[None]:
    """Raise UsageError for a full disk and the like: a guard that ends by it holds no budget."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise UsageError(f"{handle}: {error}") from None
