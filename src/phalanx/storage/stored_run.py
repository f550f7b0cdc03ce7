"""Keep a run that trains here at its URL: a process on each node that puts what is new there every few seconds.

It is a process of its own, since a client of a store does not survive a fork, and an upload must not wait for an agent,
nor an agent for an upload. It dies with its agent. The leading node's holds the run's lease, and puts its events and
small files; each node's puts its logs.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from phalanx.errors import ExitCode, PhalanxError, UsageError, describe_os_error
from phalanx.run.call_process import CallProcess, value_of
from phalanx.run.directory import Run
from phalanx.run.lock import acquire_lock
from phalanx.run.process_messages import CallRaised, CallReturned
from phalanx.storage.errors import StoreUnavailable
from phalanx.storage.lease import RENEW_INTERVAL_S, Lease, LeaseLostError
from phalanx.storage.run_objects import RunObjects
from phalanx.storage.store import check_writable

logger = logging.getLogger(__name__)

UPLOAD_INTERVAL_S = 3.0
"""Seconds between two uploads of what is new."""
CLOSE_TIMEOUT_S = 60.0
"""Seconds for the last upload."""
LOST_FILE = "lease-lost"
"""File next to the local run directory that says why its process ended."""


class StoredRunLostError(PhalanxError):
    """This machine cannot keep the run at its URL any longer."""

    code = ExitCode.UNFINISHED


class StoredRun:
    """The agent's side. `close` ends it. The parameters are those of `keep_at_url`."""

    def __init__(self, run: Run, leads: bool, writes: bool, timeout_s: float):
        self._run, self._lost_path = run, run.path.parent / LOST_FILE
        self._lost_path.unlink(missing_ok=True)
        self._process, self._is_closing = CallProcess(), False
        self.on_lost: Callable[[], None] = lambda: None
        """Called by a thread when the run is lost."""
        try:
            path = str(run.path.absolute())
            self._call("open_run", {"path": path, "leads": leads, "writes": writes, "timeout_s": timeout_s})
        except BaseException:
            self._process.kill()
            raise
        if leads and writes:
            threading.Thread(target=self._watch, name="stored-run", daemon=True).start()

    @property
    def problem(self) -> str | None:
        """Why this process must not train the run any longer; None while it may."""
        if self._process.process.poll() is None or self._is_closing:
            return None
        with contextlib.suppress(FileNotFoundError):
            return self._lost_path.read_text()
        return f"{self._run.location}: the process that puts the run there was killed; start again to resume"

    def upload(self) -> None:
        """Put what is new there now."""
        self._call("call_keeper", "upload")

    def download(self) -> None:
        """Bring the small files of this node up to date with those of the leading one."""
        self._call("call_keeper", "download")

    def close(self) -> None:
        """Put the rest there, and let another machine train the run. StoredRunLostError where the store does not
        answer: the rest is here, and goes there with the next start on this machine."""
        try:
            self._call("call_keeper", "close", CLOSE_TIMEOUT_S)
        except TimeoutError:
            raise StoredRunLostError(
                f"{self._run.location}: the store does not answer, and lacks the last events; start again here"
            ) from None
        finally:
            self._is_closing = True
            self._process.kill()

    def _call(self, name: str, payload: Any, timeout_s: float | None = None) -> None:
        self._process.send_call(f"{__name__}:{name}", payload)
        while (messages := self._process.receive(timeout_s)) is not None:
            for message in messages:
                if isinstance(message, CallReturned | CallRaised):
                    value_of(message)
                    return
        raise StoredRunLostError(self.problem or "")

    def _watch(self) -> None:
        self._process.process.wait()
        if not self._is_closing:
            self.on_lost()


@contextlib.contextmanager
def keep_at_url(run: Run, *, leads: bool, writes: bool = True, timeout_s: float = 0.0) -> Iterator[StoredRun | None]:
    """Keep a run at its URL while this node trains it; None for a run that is a directory. UsageError where the URL is
    no place for a run, or another process trains it, which may take `timeout_s` seconds to end. `leads`: the run trains
    under this node's agent, or would under --dry-run (`writes` False); else this node serves another."""
    if run.store_url is None:
        yield None
        return
    stored = StoredRun(run, leads, writes, timeout_s)
    try:
        yield stored
    except BaseException:
        with contextlib.suppress(PhalanxError, OSError):  # the first error is the one to report
            stored.close()
        raise
    if stored.problem is None:
        stored.close()


class _Keeper:
    """The process's side."""

    def __init__(self, path: str, leads: bool, writes: bool, timeout_s: float):
        self._run, self._leads, self._writes, self._timeout_s = Run(Path(path)), leads, writes, timeout_s
        self._objects = RunObjects(self._run)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._lease: Lease | None = None
        self._has_logs = False
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        url = self._objects.url
        try:
            if not self._leads:
                if self._writes:
                    check_writable(url)
                self._objects.download(events=False)
            elif not self._writes:
                with contextlib.suppress(UsageError):
                    self._objects.check_run()
                    self._objects.download()
            else:
                self._objects.begin()
                if not self._lock_file("lock", self._timeout_s, f"{url}, which another process is training"):
                    raise UsageError(f"{url}: another process is training this run; wait, or choose another --run")
                self._lease = Lease(self._objects.store, url, self._objects.directory_id)
                self._lease.acquire(self._timeout_s)
                self._objects.download()
        except StoreUnavailable as error:
            raise UsageError(f"{url}: cannot be reached ({error.strerror}); check network and endpoint") from None
        if self._writes:
            self._repeat(self.upload, UPLOAD_INTERVAL_S)
        if self._lease is not None:
            self._repeat(self._lease.renew, RENEW_INTERVAL_S)

    def upload(self, is_last: bool = False) -> None:
        with self._lock:
            if self._lease is not None:
                self._objects.upload(is_last)
            self._has_logs = self._has_logs or self._lock_file("logs.lock")  # of several agents on a node one has them
            if self._has_logs:
                self._objects.upload_logs(is_last)

    def download(self) -> None:
        with self._lock:
            self._objects.download(events=False)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.upload(is_last=True)
        if self._lease is not None:
            self._lease.release()

    def _lock_file(self, name: str, timeout_s: float = 0.0, what: str = "") -> bool:
        """Lock a file next to the run directory until this process ends."""
        fd = os.open(self._run.path.parent / name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        if acquire_lock(fd, timeout_s, what):
            return True
        os.close(fd)
        return False

    def _repeat(self, act: Callable[[], None], interval_s: float) -> None:
        def run() -> None:
            while not self._stop.wait(interval_s):
                try:
                    act()
                except LeaseLostError as error:
                    (self._run.path.parent / LOST_FILE).write_text(str(error))
                    os._exit(ExitCode.UNFINISHED)
                except (PhalanxError, OSError) as error:
                    logger.warning("%s: %s; trying again", self._objects.url, error)

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()


_keepers: list[_Keeper] = []


def open_run(payload: dict[str, Any]) -> None:
    """Begin to keep a run at its URL."""
    keeper = _Keeper(**payload)
    keeper.open()
    _keepers.append(keeper)


def call_keeper(method: str) -> None:
    """Call `upload`, `download` or `close` of what keeps the run at its URL."""
    try:
        getattr(_keepers[0], method)()
    except StoreUnavailable as error:
        raise StoredRunLostError(f"storage fails: {describe_os_error(error)}; start again to resume") from None
