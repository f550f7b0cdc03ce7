"""Keep a run that trains here at its URL: a process on each node that puts what is new there every few seconds.

It is a process of its own, since a client of a store does not survive a fork, and an upload must not wait for an agent,
nor an agent for an upload. It dies with its agent. The leading node's holds the run's lease, and puts its events and
small files; each node's puts its logs, and claims the lease where the leading node is lost.
"""

import contextlib
import logging
import mmap
import os
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from phalanx.errors import ExitCode, PhalanxError, UsageError, describe_os_error
from phalanx.run.boot_clock import seconds_since_boot
from phalanx.run.call_process import KILL_TIMEOUT_S, CallProcess, value_of
from phalanx.run.directory import Run
from phalanx.run.leader_address import LeaderAddress
from phalanx.run.lock import acquire_lock
from phalanx.run.process_messages import CallRaised, CallReturned
from phalanx.storage.errors import StoreUnavailable
from phalanx.storage.lease import LOOK_INTERVAL_S, MAX_RENEWAL_AGE_S, RENEW_INTERVAL_S, Lease, LeaseLostError
from phalanx.storage.run_objects import RunObjects
from phalanx.storage.store import check_writable

logger = logging.getLogger(__name__)

UPLOAD_INTERVAL_S = 3.0
"""Seconds between two uploads of what is new."""
CLOSE_TIMEOUT_S = 60.0
"""Seconds for the last upload."""
ANSWER_TIMEOUT_S = 10.0
"""Seconds for a look at the lease; then the agent looks after its signals again."""
LOST_FILE = "lease-lost"
"""File next to the local run directory that says why its process ended."""
_RENEWAL_STRUCT = struct.Struct("d")


class StoredRunLostError(PhalanxError):
    """This machine cannot keep the run at its URL any longer."""

    code = ExitCode.UNFINISHED


class StoredRun:
    """The agent's side, and the leadership of the run. `close` ends it. The parameters are those of `keep_at_url`."""

    def __init__(self, run: Run, leads: bool, writes: bool, timeout_s: float, leader: LeaderAddress | None):
        self._run, self._lost_path = run, run.path.parent / LOST_FILE
        self._lost_path.unlink(missing_ok=True)
        renewal_fd = os.memfd_create("phalanx-lease")
        self._renewal, self._may_be_replaced = _map_renewal(renewal_fd), leader is not None
        self._process, self._is_closing = CallProcess(renewal_fd), False
        self._num_unanswered = 0  # calls: one that was given up is answered before the next
        self._next_looks: dict[str, float] = {}
        self._leader: LeaderAddress | None = None  # as the lease said last
        self.on_lost: Callable[[], None] = lambda: None
        """Called by a thread when the run is lost."""
        payload = {"path": str(run.path.absolute()), "leads": leads, "writes": writes, "timeout_s": timeout_s}
        payload |= {"renewal_fd": renewal_fd, "leader": None if leader is None else asdict(leader)}
        try:
            self._call("open_run", payload)
        except BaseException:
            self._process.kill()
            raise
        finally:
            os.close(renewal_fd)
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

    @property
    def stale_reason(self) -> str | None:
        """Why this node must not train the run for now: another one may lead it. None while it may."""
        age_s = seconds_since_boot() - _RENEWAL_STRUCT.unpack(self._renewal[:])[0]
        if not self._may_be_replaced or age_s <= MAX_RENEWAL_AGE_S:
            return None
        return f"{self._run.location}: the lease was not renewed for {age_s:.0f} s, and another node may lead the run"

    def upload(self) -> None:
        """Put what is new there now. StoredRunLostError where another process trains the run, or the store fails."""
        self._call("call_keeper", ["upload"])

    def download(self) -> None:
        """Bring the small files of this node up to date with those of the leading one."""
        self._call("call_keeper", ["download"])

    def read_leader(self) -> LeaderAddress | None:
        """Return where the run is led, or was led last, as far as this process has seen."""
        if (leader := self._look("read_leader")) is not None:
            self._leader = LeaderAddress(**leader)
        return self._leader

    def claim(self, lost: LeaderAddress, own_address: tuple[str, int], node_rank: int) -> bool:
        """Try to lead the run in place of a leader. Returns whether this node leads now. It does not where the lease of
        the leader may be valid, another node was faster, or the store does not answer."""
        return bool(self._look("claim", asdict(lost), [*own_address, node_rank]))

    def close(self) -> None:
        """Put the rest there, and let another machine train the run. StoredRunLostError where the store does not
        answer: the rest is here, and goes there with the next start on this machine."""
        try:
            self._call("call_keeper", ["close"], CLOSE_TIMEOUT_S)
        except TimeoutError:
            raise StoredRunLostError(
                f"{self._run.location}: the store does not answer, and lacks the last events; start again here"
            ) from None
        finally:
            self._is_closing = True
            self._process.kill()

    def _look(self, method: str, *arguments: Any) -> Any:
        """Return the answer of a method about the lease; None where there is none in time, and without a call where it
        was called a moment ago."""
        if (now := time.monotonic()) < self._next_looks.get(method, now):
            return None
        self._next_looks[method] = now + LOOK_INTERVAL_S
        try:
            return self._call("call_keeper", [method, *arguments], ANSWER_TIMEOUT_S)
        except (PhalanxError, OSError) as error:
            logger.warning("%s: cannot look at the lease: %s", self._run.location, error)
            return None

    def _call(self, name: str, payload: Any, timeout_s: float | None = None) -> Any:
        self._process.send_call(f"{__name__}:{name}", payload)
        self._num_unanswered += 1
        while (messages := self._process.receive(timeout_s)) is not None:
            for message in messages:
                if isinstance(message, CallReturned | CallRaised):
                    self._num_unanswered -= 1
                    if self._num_unanswered == 0:
                        return self._value_of(message)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.process.wait(KILL_TIMEOUT_S)  # its socket is closed before it has ended
        raise StoredRunLostError(self.problem or "")

    def _value_of(self, reply: CallReturned | CallRaised) -> Any:
        try:
            return value_of(reply)
        except PhalanxError as error:
            if error.code is not ExitCode.UNFINISHED:
                raise
            raise StoredRunLostError(str(error)) from None

    def _watch(self) -> None:
        self._process.process.wait()
        if not self._is_closing:
            self.on_lost()


@contextlib.contextmanager
def keep_at_url(
    run: Run, *, leads: bool, writes: bool = True, timeout_s: float = 0.0, leader: LeaderAddress | None = None
) -> Iterator[StoredRun | None]:
    """Keep a run at its URL while this node trains it; None for a run that is a directory. UsageError where the URL is
    no place for a run, or another process trains it, which may take `timeout_s` seconds to end. `leads`: the run trains
    under this node's agent, or would under --dry-run (`writes` False); else this node serves another. `leader`: where
    the other nodes find this one that leads, if one of them may lead in its place."""
    if run.store_url is None:
        yield None
        return
    stored = StoredRun(run, leads, writes, timeout_s, leader)
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

    def __init__(
        self, path: str, leads: bool, writes: bool, timeout_s: float, renewal_fd: int, leader: dict[str, Any] | None
    ):
        self._run, self._leads, self._writes, self._timeout_s = Run(Path(path)), leads, writes, timeout_s
        self._leader = None if leader is None else LeaderAddress(**leader)
        self._renewal = _map_renewal(renewal_fd)
        self._objects = RunObjects(self._run)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._lease: Lease | None = None
        self._locked_fds: dict[str, int] = {}
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
                self._lease = self._make_lease(self._leader)
                self._lease.acquire(self._timeout_s)
                self._record_renewal(self._lease)
                self._objects.download()
        except StoreUnavailable as error:
            raise UsageError(f"{url}: cannot be reached ({error.strerror}); check network and endpoint") from None
        if self._writes:
            self._repeat(self.upload, UPLOAD_INTERVAL_S)
        if self._lease is not None:
            self._repeat(partial(self._renew, self._lease), RENEW_INTERVAL_S)

    def upload(self, is_last: bool = False) -> None:
        with self._lock:
            if self._lease is not None:
                while self._lease.is_stale():  # also where a renewal took that long
                    self._renew(self._lease)
                self._objects.upload(is_last)
            if self._lock_file("logs.lock"):  # of several agents on a node one has them
                self._objects.upload_logs(is_last)

    def download(self) -> None:
        with self._lock:
            self._objects.download(events=False)

    def read_leader(self) -> dict[str, Any] | None:
        leader = self._make_lease(None).read_leader()
        return None if leader is None else asdict(leader)

    def claim(self, lost: dict[str, Any], own: tuple[str, int, int]) -> bool:
        """Take the lease of a lost leader, for the process with which this node's agent leads the run next. That one
        has the same local directory, and takes it over at once."""
        if self.read_leader() not in (None, lost) or not self._lock_file("lock"):  # it leads on this machine
            return False
        has_lease = False
        try:
            has_lease = self._make_lease(LeaderAddress(*own, 0, str(self._objects.url))).take()
        finally:
            if not has_lease:
                os.close(self._locked_fds.pop("lock"))
        return has_lease

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.upload(is_last=True)
        if self._lease is not None:
            self._lease.release()

    def end_lost(self, error: LeaseLostError) -> NoReturn:
        """End this process, and say why: the agent ends its workers."""
        (self._run.path.parent / LOST_FILE).write_text(str(error))
        os._exit(ExitCode.UNFINISHED)

    def _make_lease(self, leader: LeaderAddress | None) -> Lease:
        return Lease(self._objects.store, self._objects.url, self._objects.directory_id, leader=leader)

    def _renew(self, lease: Lease) -> None:
        lease.renew()
        self._record_renewal(lease)

    def _record_renewal(self, lease: Lease) -> None:
        self._renewal[:] = _RENEWAL_STRUCT.pack(lease.renewed_at)

    def _lock_file(self, name: str, timeout_s: float = 0.0, what: str = "") -> bool:
        """Lock a file next to the run directory, usually until this process ends."""
        if name in self._locked_fds:
            return True
        fd = os.open(self._run.path.parent / name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            if acquire_lock(fd, timeout_s, what):
                self._locked_fds[name] = fd
                return True
        finally:
            if name not in self._locked_fds:
                os.close(fd)
        return False

    def _repeat(self, act: Callable[[], None], interval_s: float) -> None:
        def run() -> None:
            while not self._stop.wait(interval_s):
                try:
                    act()
                except LeaseLostError as error:
                    self.end_lost(error)
                except (PhalanxError, OSError) as error:
                    logger.warning("%s: %s; trying again", self._objects.url, error)

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()


def _map_renewal(fd: int) -> mmap.mmap:
    """Map the memory in which the process says when it began to renew the lease, in seconds since boot: an agent sees
    that it is late although the process hangs."""
    os.ftruncate(fd, _RENEWAL_STRUCT.size)
    return mmap.mmap(fd, _RENEWAL_STRUCT.size)


_keepers: list[_Keeper] = []


def open_run(payload: dict[str, Any]) -> None:
    """Begin to keep a run at its URL."""
    keeper = _Keeper(**payload)
    keeper.open()
    _keepers.append(keeper)


def call_keeper(call: list[Any]) -> Any:
    """Call a method of what keeps the run at its URL: its name, then its arguments."""
    method, *arguments = call
    try:
        return getattr(_keepers[0], method)(*arguments)
    except LeaseLostError as error:
        _keepers[0].end_lost(error)
    except StoreUnavailable as error:
        raise StoredRunLostError(f"storage fails: {describe_os_error(error)}; start again to resume") from None
