"""Where the leader agent of a run with `--nodes MIN:MAX` listens: `leader.json` in the run directory.

Another node leads when the leader is lost. A lock decides which: the node that takes it writes the next term with its
address before it releases the lock, so that the others find it. The lock is on a file, since some network file systems
keep locks on directories to one machine.

A run at a URL has its lease in place of both, file and lock (`storage/stored_run.py`).
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from phalanx.run.directory import Run, write_json
from phalanx.run.fields import read_as

LOCK_FILE = "leader.lock"


@dataclass(frozen=True)
class LeaderAddress:
    """Address of a leader. `term`: number of leaders before it. `run`: the run's path, since directories are copied, or
    its URL."""

    host: str
    port: int
    node_rank: int
    term: int
    run: str

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port


@dataclass(frozen=True)
class SharedLeadership:
    """The leadership of a run in a directory that its nodes share. `StoredRun` is that of a run at a URL."""

    run: Run

    def read_leader(self) -> LeaderAddress | None:
        """See `read_leader_address`."""
        return read_leader_address(self.run)

    def claim(self, lost: LeaderAddress, own_address: tuple[str, int], node_rank: int) -> bool:
        """See `claim_leadership`."""
        return claim_leadership(self.run, lost, own_address, node_rank)


def read_leader_address(run: Run) -> LeaderAddress | None:
    """Return where a run is led, or was led last; None where no leader said so."""
    try:
        leader: LeaderAddress = read_as(LeaderAddress, run.read_json_or_empty(run.leader))
    except ValueError:
        return None
    return leader if leader.run == os.path.realpath(run.path) else None


def write_leader_address(run: Run, address: tuple[str, int], node_rank: int) -> None:
    """Write that this node leads a run, unless that is written. Hold `lock_leadership`."""
    before = read_leader_address(run)
    if before is None or (before.address, before.node_rank) != (address, node_rank):
        term = 0 if before is None else before.term + 1
        write_json(run.leader, asdict(LeaderAddress(*address, node_rank, term, os.path.realpath(run.path))))


@contextlib.contextmanager
def lock_leadership(run: Run) -> Iterator[bool]:
    """Yield whether this process leads a run from now on, until the block ends. Raises OSError where the run's
    directory is out of reach, or its file system has no locks."""
    fd = os.open(run.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def claim_leadership(run: Run, lost: LeaderAddress, own_address: tuple[str, int], node_rank: int) -> bool:
    """Try to lead a run in place of a leader. Returns whether this node leads now. It does not where the leader still
    holds the lock, another node was faster, the file system has no locks, or the run's directory is out of reach."""
    try:
        with lock_leadership(run) as is_free:
            if not is_free or read_leader_address(run) != lost:
                return False
            write_json(run.leader, asdict(LeaderAddress(*own_address, node_rank, lost.term + 1, lost.run)))
            return True
    except OSError:
        return False
