"""The life of nodes: healthy, suspect, drained, in repair, under test. One SQLite table of a site that only grows: each
row is a change with its actor and reason; a node is in the state of its newest row, and healthy without one.

    healthy -> suspect     evidence: an Xid, memory or link errors, a straggler, or an operator's word
    suspect -> healthy     it was nothing
    healthy, suspect -> drained
    drained -> repair      people work on it: it may draw its maximum, whatever is read
    repair -> drained
    drained, repair -> testing     `phalanx doctor` runs there
    testing -> healthy     every check passed
    testing -> drained     a check failed
    drained, repair -> healthy     an operator takes it back without a test
"""

import contextlib
import os
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from phalanx.errors import UsageError
from phalanx.run.private_files import is_storage_failure

FORMAT_VERSION = 1
LOCK_TIMEOUT_S = 30.0
CANNOT_OPEN_TEXT = "unable to open database file"
"""What SQLite says of a folder or a file that it may not use."""


class NodeState(StrEnum):
    """Whether work may be started on a node."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DRAINED = "drained"
    REPAIR = "repair"
    TESTING = "testing"


NEXT_STATES = {
    NodeState.HEALTHY: (NodeState.SUSPECT, NodeState.DRAINED),
    NodeState.SUSPECT: (NodeState.HEALTHY, NodeState.DRAINED),
    NodeState.DRAINED: (NodeState.REPAIR, NodeState.TESTING, NodeState.HEALTHY),
    NodeState.REPAIR: (NodeState.DRAINED, NodeState.TESTING, NodeState.HEALTHY),
    NodeState.TESTING: (NodeState.HEALTHY, NodeState.DRAINED),
}
OUT_OF_SERVICE = (NodeState.DRAINED, NodeState.REPAIR, NodeState.TESTING)
_SCHEMA_SQL = """
CREATE TABLE changes (
  id INTEGER PRIMARY KEY AUTOINCREMENT, node TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
  actor TEXT NOT NULL, time REAL NOT NULL
);
CREATE INDEX by_node ON changes (node, id);
"""


@dataclass(frozen=True)
class NodeChange:
    """A node came into a state. `actor`: a user's name, or the part of Phalanx that found the
    evidence."""

    node: str
    state: NodeState
    reason: str
    actor: str
    time: float


class NodeStates:
    """The states of a fleet's nodes in the file at `path`, which any number of processes share.

    The file is made by the first change, for the group that may write its directory.
    UsageError for a file that is no such table, or that cannot be opened.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time):
        self._path, self._clock = path, clock
        self._connection: sqlite3.Connection | None = None
        if path.exists():
            self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._connection is not None:
            self._connection.close()

    def list_in_repair(self) -> frozenset[str]:
        """The nodes that people work on."""
        return frozenset(name for name, change in self.newest().items() if change.state is NodeState.REPAIR)

    def find(self, node: str) -> NodeChange | None:
        """The newest change of a node; None for a node that never changed, and so is healthy."""
        return next(iter(self._select("WHERE node = ? ORDER BY id DESC LIMIT 1", node)), None)

    def find_state(self, node: str) -> NodeState:
        change = self.find(node)
        return NodeState.HEALTHY if change is None else change.state

    def newest(self) -> dict[str, NodeChange]:
        """The newest change of each node that has one."""
        rows = self._select("WHERE id IN (SELECT max(id) FROM changes GROUP BY node) ORDER BY node")
        return {change.node: change for change in rows}

    def history(self, node: str) -> list[NodeChange]:
        """All changes of a node, the oldest first."""
        return self._select("WHERE node = ? ORDER BY id", node)

    def change(self, node: str, state: NodeState, reason: str, actor: str) -> NodeChange:
        """Bring a node into a state. UsageError where it cannot come there from its state, or is in it."""
        with self._transaction():
            return self._change(node, state, reason, actor)

    def change_healthy(self, node: str, state: NodeState, reason: str, actor: str) -> NodeChange | None:
        """Bring a healthy node into a state; None, and nothing is changed, for one that is not healthy (any more)."""
        with self._transaction():
            if self.find_state(node) is not NodeState.HEALTHY:
                return None
            return self._change(node, state, reason, actor)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        if self._connection is None:
            self._open()
        with self._naming_errors(), self._db:  # which commits, or rolls back where this raises
            self._db.execute("BEGIN IMMEDIATE")
            yield

    def _change(self, node: str, state: NodeState, reason: str, actor: str) -> NodeChange:
        if not reason.strip():
            raise UsageError(f"{node}: say why it becomes {state}")
        last = self.find(node)
        current = NodeState.HEALTHY if last is None else last.state
        if state not in NEXT_STATES[current]:
            since = "" if last is None else f" ({last.reason}; {last.actor})"
            allowed = " or ".join(NEXT_STATES[current])
            raise UsageError(f"{node}: is {current}{since}; it can become {allowed}, not {state}")
        change = NodeChange(node, state, reason, actor, self._clock())
        self._db.execute(
            "INSERT INTO changes (node, state, reason, actor, time) VALUES (?, ?, ?, ?, ?)",
            (change.node, str(change.state), change.reason, change.actor, change.time),
        )
        return change

    @property
    def _db(self) -> sqlite3.Connection:
        assert self._connection is not None
        return self._connection

    def _open(self) -> None:
        with self._naming_errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._share_new_file()
            self._connection = sqlite3.connect(self._path, timeout=LOCK_TIMEOUT_S, isolation_level=None)
            if self._read_version() == 0:
                self._create()
            version = self._read_version()
        if version != FORMAT_VERSION:
            raise UsageError(f"{self._path}: format {version}; this version of Phalanx knows {FORMAT_VERSION}")

    def _share_new_file(self) -> None:
        """Make the file with its permissions at once, and without WAL, so that operators may be on several hosts."""
        if not self._path.exists():
            descriptor, temporary = tempfile.mkstemp(dir=self._path.parent)
            os.fchmod(descriptor, 0o660 if self._path.parent.stat().st_mode & stat.S_IWGRP else 0o600)
            os.close(descriptor)
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(temporary, self._path)
            os.unlink(temporary)

    def _create(self) -> None:
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            if self._read_version() == 0:  # no other process was faster
                for statement in filter(str.strip, _SCHEMA_SQL.split(";")):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version={FORMAT_VERSION}")

    def _read_version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def _select(self, clause: str, *values: str) -> list[NodeChange]:
        if self._connection is None:
            if not self._path.exists():  # no process has changed a node so far
                return []
            self._open()
        with self._naming_errors():
            rows = self._db.execute(f"SELECT node, state, reason, actor, time FROM changes {clause}", values).fetchall()
            return [
                NodeChange(node, NodeState(state), reason, actor, time) for node, state, reason, actor, time in rows
            ]

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, ValueError) as error:
            if isinstance(error, PermissionError) or (CANNOT_OPEN_TEXT in str(error) and not self._path.is_dir()):
                raise UsageError(
                    f"{self._path}: the table of nodes cannot be opened ({error}); name a directory that you may "
                    "write by PHALANX_STATE_DIR, or by `state_dir` of the fleet file"
                ) from error
            if is_storage_failure(error):
                raise UsageError(f"{self._path}: the table of nodes cannot be used ({error})") from error
            raise UsageError(
                f"{self._path}: not a table of nodes ({error}); move it away to begin with healthy nodes"
            ) from error
