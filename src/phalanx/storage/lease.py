"""One holder at a time for what lies at a URL: objects `lease/<number>.json`, made by conditional writes.

The holder of the highest number holds the lease. It writes its object again every RENEW_INTERVAL_S; one that was not
renewed for LEASE_S, by the clock of the store, may be taken over by the next number. Nothing else is asked of a store:
neither locks nor conditional overwrites, and no clock of a machine.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from phalanx.deadline import Deadline, print_status
from phalanx.errors import ExitCode, PhalanxError, UsageError
from phalanx.storage.errors import NotFound, ObjectExists
from phalanx.storage.store import ObjectInfo, Store
from phalanx.storage.url import StoreUrl

RENEW_INTERVAL_S = 10.0
"""Seconds between two renewals of a lease."""
LEASE_S = 60.0
"""Seconds without a renewal after which another may take a lease over."""
_LOOK_INTERVAL_S = 2.0


class LeaseLostError(PhalanxError):
    """Another process holds the lease now."""

    code = ExitCode.UNFINISHED


@dataclass(frozen=True)
class LeaseHolder:
    """The process that holds a lease. `token`: of this process alone. `directory`: an id of its local directory, which
    is locked."""

    host: str
    pid: int
    since: str
    directory: str
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class Lease:
    """The lease of a URL. `directory_id`: of the locked local directory: a holder with the same is known to be dead."""

    def __init__(
        self,
        store: Store,
        url: StoreUrl,
        directory_id: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        report: Callable[[str], None] = print_status,
    ):
        self._store, self._url, self._prefix = store, url, (url / "lease").key
        self._clock, self._sleep, self._report = clock, sleep, report
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._self = LeaseHolder(socket.gethostname(), os.getpid(), since, directory_id, secrets.token_hex(8))
        self.number = 0
        """Number of the lease that this process holds; 0 for none."""

    def acquire(self, timeout_s: float = 0.0) -> None:
        """Take the lease, or wait for one that is not renewed to expire. UsageError where the holder is alive: one that
        may be about to end has `timeout_s` seconds to do so."""
        deadline: Deadline | None = None
        first_seen: dict[str, float] = {}
        while (newest := self._find_newest()) is not None:
            holder = self._read_holder(newest.key)
            is_dead = holder is None or holder.directory == self._self.directory
            if is_dead or self._now() - newest.modified > LEASE_S:
                break
            is_renewed = first_seen.setdefault(newest.key, newest.modified) != newest.modified
            if deadline is None:
                what = f"{self._url}: the lease of {holder}"
                limit_s = max(timeout_s, 2 * LEASE_S)
                deadline = Deadline(what, limit_s, self._report, self._clock)
                deadline.announce()
            if deadline.check_expired() or (is_renewed and deadline.waited_s >= timeout_s):
                raise UsageError(
                    f"{self._url}: another process is training this run ({holder}); wait, or choose another --run"
                )
            self._sleep(_LOOK_INTERVAL_S)
        number = 1 + (0 if newest is None else _parse_number(newest.key))
        try:
            self._store.write(self._key(number), self._content(), if_absent=True)
        except ObjectExists:
            if not self._is_own(number):  # else the answer to an earlier try was lost
                return self.acquire(timeout_s)
        self.number = number
        self._store.delete([each.key for each in self._list() if _parse_number(each.key) < number])
        return None

    def renew(self) -> None:
        """Write the lease again. LeaseLostError where another process has taken it over."""
        newest = self._find_newest()
        if newest is None or _parse_number(newest.key) != self.number or not self._is_own(self.number):
            holder = None if newest is None else self._read_holder(newest.key)
            raise LeaseLostError(
                f"{self._url}: another process has taken over this run{f' ({holder})' if holder else ''}, since this "
                f"one did not renew its lease for {LEASE_S:.0f} s; this one stops without saving"
            )
        self._store.write(self._key(self.number), self._content())

    def release(self) -> None:
        """Let another process take the lease at once."""
        if self.number and self._is_own(self.number):
            self._store.delete([self._key(self.number)])
        self.number = 0

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number:08d}.json"

    def _content(self) -> bytes:
        return json.dumps(asdict(self._self)).encode()

    def _list(self) -> list[ObjectInfo]:
        return [each for each in self._store.list_objects(self._prefix) if each.key.endswith(".json")]

    def _find_newest(self) -> ObjectInfo | None:
        return max(self._list(), key=lambda each: each.key, default=None)

    def _read_holder(self, key: str) -> LeaseHolder | None:
        try:
            return LeaseHolder(**json.loads(self._store.read(key)))
        except (NotFound, ValueError, TypeError):
            return None

    def _is_own(self, number: int) -> bool:
        return self._read_holder(self._key(number)) == self._self

    def _now(self) -> float:
        """The store's own time: that of an object which was just written."""
        key = f"{self._prefix}/clock-{self._self.token}"
        self._store.write(key, b"")
        now = self._store.head(key).modified
        self._store.delete([key])
        return now


def _parse_number(key: str) -> int:
    return int(key.rpartition("/")[2].removesuffix(".json"))
