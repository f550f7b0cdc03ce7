"""The lease of a run at a URL between an agent and the process that keeps the run there."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from phalanx.errors import ExitCode
from phalanx.run import Run
from phalanx.run.boot_clock import seconds_since_boot
from phalanx.run.leader_address import LeaderAddress
from phalanx.storage.lease import LOOK_INTERVAL_S, MAX_RENEWAL_AGE_S
from phalanx.storage.run_objects import make_local_directory
from phalanx.storage.stored_run import StoredRun, StoredRunLostError

OWN, OTHER = ("10.0.0.1", 4711), ("10.0.0.2", 4711)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/run"


class Machines:
    """Machines that keep one run at its URL."""

    def __init__(self, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.url, self._folder, self._monkeypatch = url, folder, monkeypatch
        self.lease = folder / "store/run/lease"
        self.opened: list[StoredRun] = []

    def directory(self, name: str) -> Run:
        self._monkeypatch.setenv("PHALANX_CACHE_DIR", str(self._folder / name))
        return make_local_directory(self.url, "runs")

    def lead(self, name: str, node_rank: int | None) -> StoredRun:
        leader = None if node_rank is None else LeaderAddress(*OWN, node_rank, 0, self.url)
        return self._open(StoredRun(self.directory(name), True, True, 0.0, leader))

    def follow(self, name: str) -> StoredRun:
        return self._open(StoredRun(self.directory(name), False, True, 0.0, None))

    def _open(self, stored: StoredRun) -> StoredRun:
        self.opened.append(stored)
        return stored

    def expire(self) -> None:
        """The lease is not renewed for LEASE_S."""
        (path,) = self.lease.glob("*.json")
        os.utime(path, (0, 0))


@pytest.fixture
def machines(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    machines = Machines(url, tmp_path, monkeypatch)
    yield machines
    for stored in machines.opened:
        stored._process.kill()


def test_one_of_two_nodes_leads_a_run_when_the_lease_of_its_leader_has_expired(machines: Machines) -> None:
    leader, first, second = machines.lead("a", 0), machines.follow("b"), machines.follow("c")
    lost = first.read_leader()
    assert lost == second.read_leader() == LeaderAddress(*OWN, 0, 1, machines.url)
    assert not first.claim(lost, OTHER, 1)  # it is alive
    leader._process.kill()
    machines.expire()
    assert not first.claim(lost, OTHER, 1)  # it looked a moment ago
    for stored in (first, second):
        stored._next_looks.clear()
    assert first.claim(lost, OTHER, 1)
    assert not second.claim(lost, OTHER, 2)
    assert second.read_leader() == LeaderAddress(*OTHER, 1, 2, machines.url)
    first.close()
    again = machines.lead("b", 1)  # the process with which the node leads has the same directory
    assert sorted(path.name for path in machines.lease.glob("*")) == ["00000003.json"]
    again.close()


def test_a_leader_that_leaves_is_followed_at_once(machines: Machines) -> None:
    leader, other = machines.lead("a", 0), machines.follow("b")
    lost = other.read_leader()
    assert lost is not None
    leader.close()
    other._next_looks.clear()
    assert other.read_leader() == lost
    assert other.claim(lost, OTHER, 1)


def test_a_store_that_does_not_answer_leaves_a_node_what_it_knows(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines.lead("a", 0)
    other = machines.follow("b")
    lost = other.read_leader()
    assert lost is not None
    monkeypatch.setattr("phalanx.storage.stored_run.ANSWER_TIMEOUT_S", 0.1)
    process = psutil.Process(other._process.process.pid)
    process.suspend()
    other._next_looks.clear()
    assert (other.read_leader(), other.claim(lost, OTHER, 1)) == (lost, False)
    process.resume()
    monkeypatch.undo()
    other._next_looks.clear()
    assert other.read_leader() == lost  # the answers of before are not those of this call
    assert not other.claim(lost, OTHER, 1)


@pytest.mark.parametrize("node_rank", [0, None])
def test_an_agent_knows_that_its_lease_is_late_although_the_process_hangs(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, node_rank: int | None
) -> None:
    """Where no other node may lead in its place, it trains on."""
    leader = machines.lead("a", node_rank)
    psutil.Process(leader._process.process.pid).suspend()
    assert leader.stale_reason is None
    later = seconds_since_boot() + MAX_RENEWAL_AGE_S + LOOK_INTERVAL_S
    monkeypatch.setattr("phalanx.storage.stored_run.seconds_since_boot", lambda: later)
    reason = leader.stale_reason
    assert (reason is None) == (node_rank is None)
    if reason is not None:
        assert "the lease was not renewed for" in reason


def test_no_attempt_begins_after_another_has_taken_the_lease(machines: Machines) -> None:
    leader = machines.lead("a", 0)
    leader._run.create()
    with open(leader._run.events, "a") as events:
        events.write('{"kind": "mine"}\n')
    (machines.lease.parent / "events").mkdir()
    (machines.lease.parent / "events/0000000000000000.jsonl").write_text('{"kind": "of another process"}\n')
    with pytest.raises(StoredRunLostError, match="another process has written events") as error:
        leader.upload()
    assert error.value.code is ExitCode.UNFINISHED
    leader._process.process.wait(10)
    assert leader.problem is not None
