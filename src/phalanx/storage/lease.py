"""One holder at a time for what lies at a URL: objects `lease/<number>.json`, made by conditional writes.

The holder of the highest number holds the lease. It writes its object again every RENEW_INTERVAL_S; one that was not
renewed for LEASE_S, by the clock of the store, may be taken over by the next number. Nothing else is asked of a store:
neither locks nor conditional overwrites, and no clock of a machine.

The holder itself knows no later than MAX_RENEWAL_AGE_S after its last renewal that it may have lost the lease: before
another can hold it.
"""

import json
import math
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from phalanx.deadline import Deadline, print_status
from phalanx.errors import ExitCode, PhalanxError, UsageError
from phalanx.run.boot_clock import seconds_since_boot
from phalanx.run.fields import read_as
from phalanx.run.leader_address import LeaderAddress
from phalanx.storage.errors import NotFound, ObjectExists
from phalanx.storage.store import ObjectInfo, Store
from phalanx.storage.url import StoreUrl

RENEW_INTERVAL_S = 10.0
"""Seconds between two renewals of a lease."""
LEASE_S = 60.0
"""Seconds without a renewal after which another may take a lease over."""
MAX_RENEWAL_AGE_S = 45.0
"""Seconds after its last renewal for which a holder may act without another look; the rest of LEASE_S is for its
workers to end in."""
LOOK_INTERVAL_S = 2.0
"""Seconds between two looks at the lease of another."""


class LeaseLostError(PhalanxError):
    """Another process holds the lease now."""

    code = ExitCode.UNFINISHED


@dataclass(frozen=True)
class LeaseHolder:
    """The process that holds a lease. `token`: of this process alone. `directory`: an id of its local directory, which
    is locked. `leader`: where the nodes of its run find it, if one of them may lead in its place."""

    host: str
    pid: int
    since: str
    directory: str
    token: str
    leader: LeaderAddress | None = None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class Lease:
    """The lease of a URL. `directory_id`: of the locked local directory: a holder with the same is known to be dead.
    `leader`: as of LeaseHolder."""

    def __init__(
        self,
        store: Store,
        url: StoreUrl,
        directory_id: str,
        clock: Callable[[], float] = seconds_since_boot,
        sleep: Callable[[float], None] = time.sleep,
        report: Callable[[str], None] = print_status,
        leader: LeaderAddress | None = None,
    ):
        self._store, self._url, self._prefix = store, url, (url / "lease").key
        self._clock, self._sleep, self._report = clock, sleep, report
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._self = LeaseHolder(socket.gethostname(), os.getpid(), since, directory_id, secrets.token_hex(8), leader)
        self.number = 0
        """Number of the lease that this process holds; 0 for none."""
        self.renewed_at = -math.inf
        """When this process began to write its last renewal, by its clock."""

    def acquire(self, timeout_s: float = 0.0) -> None:
        """Take the lease, or wait for one that is not renewed to expire. UsageError where the holder is alive: one that
        may be about to end has `timeout_s` seconds to do so. LeaseLostError where another node of the run leads it."""
        deadline: Deadline | None = None
        first_seen: dict[str, float] = {}
        while not self.take():
            if (newest := self._find_newest()) is None:
                continue
            holder = self._read_holder(newest.key)
            is_renewed = first_seen.setdefault(newest.key, newest.modified) != newest.modified
            if is_renewed and holder is not None and self._is_led_by_another_node(holder):
                raise LeaseLostError(f"{self._url}: another node leads this run ({holder}); start again to join it")
            if deadline is None:
                what = f"{self._url}: the lease of {holder}"
                limit_s = max(timeout_s, 2 * LEASE_S)
                deadline = Deadline(what, limit_s, self._report, self._clock)
                deadline.announce()
            if deadline.check_expired() or (is_renewed and deadline.waited_s >= timeout_s):
                raise UsageError(
                    f"{self._url}: another process is training this run ({holder}); wait, or choose another --run"
                )
            self._sleep(LOOK_INTERVAL_S)

    def take(self) -> bool:
        """Take the lease if it is free: released, of a process that is known to be dead, or not renewed for LEASE_S.
        Returns whether this process holds it now."""
        seen = self._list()
        newest = max(seen, key=lambda each: each.key, default=None)
        if newest is not None:
            holder = self._read_holder(newest.key)
            # On a file system that machines share, the lock of the directory may hold on one machine only.
            is_dead = holder is None or (holder.directory, holder.host) == (self._self.directory, self._self.host)
            if not is_dead and self._now() - newest.modified <= LEASE_S:
                return False
        number = 1 + (0 if newest is None else _parse_number(newest.key))
        began = self._clock()
        try:
            self._store.write(self._key(number), self._content(), if_absent=True)
        except ObjectExists:
            if not self._is_own(number):  # else the answer to an earlier try was lost
                return False
        # Numbers begin again after a release: what changed since the look may be the lease of another process.
        if {each for each in self._list() if each.key != self._key(number)} - set(seen):
            self._store.delete([self._key(number)])
            return False
        self.number, self.renewed_at = number, began
        self._store.delete([each.key for each in seen])
        return True

    def read_leader(self) -> LeaderAddress | None:
        """Return where the holder leads its run; None where there is none, or no node may lead in its place."""
        newest = self._find_newest()
        holder = None if newest is None else self._read_holder(newest.key)
        if newest is None or holder is None or holder.leader is None:
            return None
        return replace(holder.leader, term=_parse_number(newest.key))

    def is_stale(self) -> bool:
        """Whether another process may hold the lease, since this one did not renew it for MAX_RENEWAL_AGE_S."""
        return self._clock() - self.renewed_at > MAX_RENEWAL_AGE_S

    def renew(self) -> None:
        """Write the lease again. LeaseLostError where another process has taken it over, also while this one wrote."""
        began = self._clock()
        self._check_held()
        self._store.write(self._key(self.number), self._content())
        try:
            self._check_held()
        except LeaseLostError:
            self._store.delete([self._key(self.number)])
            raise
        self.renewed_at = max(self.renewed_at, began)  # another thread may have renewed it meanwhile

    def _check_held(self) -> None:
        newest = self._find_newest()
        if newest is None or _parse_number(newest.key) != self.number or not self._is_own(self.number):
            holder = None if newest is None else self._read_holder(newest.key)
            raise LeaseLostError(
                f"{self._url}: another process has taken over this run{f' ({holder})' if holder else ''}, since this "
                f"one did not renew its lease for {LEASE_S:.0f} s; this one stops without saving"
            )

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
            holder: LeaseHolder = read_as(LeaseHolder, json.loads(self._store.read(key)))
        except (NotFound, ValueError, OverflowError):
            return None
        return holder

    def _is_led_by_another_node(self, holder: LeaseHolder) -> bool:
        own, other = self._self.leader, holder.leader
        return own is not None and other is not None and own.node_rank != other.node_rank

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
