"""Leases by conditional writes: one holder at a time, by the clock of the store alone."""

import socket
from collections.abc import Callable
from typing import cast

import pytest

from clocked_store import ClockedStore
from phalanx.errors import ExitCode, UsageError
from phalanx.run.leader_address import LeaderAddress
from phalanx.storage.lease import LEASE_S, MAX_RENEWAL_AGE_S, RENEW_INTERVAL_S, Lease, LeaseLostError
from phalanx.storage.store import Store
from phalanx.storage.url import parse_url

URL = parse_url("s3://bucket/runs/a")
FIRST = "runs/a/lease/00000001.json"


class Machines:
    """Machines that ask for the lease of one URL. Sleeping moves the store's clock; `meanwhile` is called with it."""

    def __init__(self) -> None:
        self.store = ClockedStore()
        self.said: list[str] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def machine(self, directory_id: str, node_rank: int | None = None) -> Lease:
        leader = None if node_rank is None else LeaderAddress(f"10.0.0.{node_rank}", 4711, node_rank, 0, str(URL))
        clock, report = lambda: self.store.now, self.said.append
        return Lease(cast(Store, self.store), URL, directory_id, clock, self.sleep, report, leader)

    def sleep(self, seconds: float) -> None:
        self.store.now += seconds
        self.meanwhile()


@pytest.fixture
def machines() -> Machines:
    return Machines()


def test_the_first_to_ask_holds_the_lease_and_leaves_no_other_object(machines: Machines) -> None:
    lease = machines.machine("a")
    lease.acquire()
    assert lease.number == 1
    assert list(machines.store.objects) == [FIRST]


def test_a_renewed_lease_is_refused_with_its_holder_and_64(machines: Machines) -> None:
    holder = machines.machine("a")
    holder.acquire()
    renewed_at = machines.store.now

    def renew() -> None:
        nonlocal renewed_at
        if machines.store.now - renewed_at >= RENEW_INTERVAL_S:
            renewed_at = machines.store.now
            holder.renew()

    machines.meanwhile = renew
    began = machines.store.now
    with pytest.raises(UsageError, match=r"another process is training this run \(process \d+ on .*, since ") as error:
        machines.machine("b").acquire()
    assert error.value.code is ExitCode.USAGE
    assert machines.store.now - began <= RENEW_INTERVAL_S + 2
    assert "waiting for s3://bucket/runs/a: the lease of process" in machines.said[0]


def test_a_lease_that_is_not_renewed_is_taken_over_by_the_next_number(machines: Machines) -> None:
    old, new = machines.machine("a"), machines.machine("b")
    old.acquire()
    began = machines.store.now
    new.acquire()
    assert LEASE_S < machines.store.now - began <= LEASE_S + 4
    assert new.number == 2
    with pytest.raises(LeaseLostError, match=r"has taken over this run .*stops without saving") as error:
        old.renew()
    assert error.value.code is ExitCode.UNFINISHED
    new.renew()


def test_the_clocks_of_machines_do_not_matter(machines: Machines) -> None:
    machines.machine("a").acquire()
    lease = Lease(cast(Store, machines.store), URL, "b", lambda: -1e6, machines.sleep, machines.said.append)
    lease.acquire()
    assert lease.number == 2


def test_a_released_lease_is_free_at_once(machines: Machines) -> None:
    old, new = machines.machine("a"), machines.machine("b")
    old.acquire()
    old.release()
    assert not machines.store.objects
    began = machines.store.now
    new.acquire()
    assert machines.store.now == began


def test_the_machine_of_a_dead_holder_takes_its_lease_at_once(machines: Machines) -> None:
    machines.machine("a").acquire()
    began, again = machines.store.now, machines.machine("a")
    again.acquire()
    assert (again.number, machines.store.now) == (2, began)


def test_a_directory_that_machines_share_says_nothing_of_a_holder_on_another(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines.machine("a", node_rank=0).acquire()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert not machines.machine("a", node_rank=1).take()


def test_of_two_that_take_over_one_holds_the_lease(machines: Machines) -> None:
    machines.machine("dead").acquire()
    one, other = machines.machine("a"), machines.machine("b")
    machines.store.now += LEASE_S + 1
    machines.store.before_create, machines.meanwhile = one.acquire, one.renew
    with pytest.raises(UsageError, match="another process is training this run"):
        other.acquire()
    assert (one.number, other.number) == (2, 0)


def test_a_conditional_write_whose_answer_was_lost_still_counts(machines: Machines) -> None:
    machines.store.lost_answers = 1
    lease = machines.machine("a")
    lease.acquire()
    assert lease.number == 1


def test_a_holder_that_slept_through_a_release_does_not_take_a_new_lease_for_its_own(machines: Machines) -> None:
    asleep, between, new = (machines.machine(name) for name in "abc")
    asleep.acquire()
    between.acquire()
    between.release()
    new.acquire()
    assert new.number == asleep.number == 1
    with pytest.raises(LeaseLostError):
        asleep.renew()


def test_a_run_on_several_nodes_waits_for_a_holder_that_is_about_to_end(machines: Machines) -> None:
    old, new = machines.machine("a"), machines.machine("b")
    old.acquire()
    ends_at = machines.store.now + 100

    def end() -> None:
        if machines.store.now < ends_at:
            old.renew()
        elif old.number:
            old.release()

    machines.meanwhile = end
    new.acquire(timeout_s=300)
    assert new.number == 1
    assert machines.store.now == ends_at


def test_a_lease_says_where_its_holder_leads_the_run(machines: Machines) -> None:
    assert machines.machine("a").read_leader() is None
    machines.machine("a", node_rank=0).acquire()
    machines.store.now += LEASE_S + 1
    assert machines.machine("b", node_rank=1).take()
    assert machines.machine("c").read_leader() == LeaderAddress("10.0.0.1", 4711, 1, 2, str(URL))


def test_a_start_that_finds_another_node_leading_ends_with_75(machines: Machines) -> None:
    leader = machines.machine("a", node_rank=1)
    leader.acquire()
    machines.meanwhile = leader.renew
    with pytest.raises(LeaseLostError, match="another node leads this run") as error:
        machines.machine("b", node_rank=0).acquire(timeout_s=300)
    assert error.value.code is ExitCode.UNFINISHED


def test_a_holder_knows_that_it_is_late_before_another_can_take_the_lease(machines: Machines) -> None:
    old, new = machines.machine("a"), machines.machine("b")
    assert old.is_stale()
    old.acquire()
    machines.store.now += MAX_RENEWAL_AGE_S
    assert not old.is_stale()
    while not new.take():
        machines.store.now += 1
        assert old.is_stale()


def test_a_renewal_that_arrives_after_another_has_taken_the_lease_does_not_count(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = machines.machine("a"), machines.machine("b")
    old.acquire()
    write, store = machines.store.write, machines.store

    def write_late(key: str, data: bytes, if_absent: bool = False) -> None:
        monkeypatch.setattr(store, "write", write)
        store.now += LEASE_S + 1
        assert new.take()
        write(key, data, if_absent)

    monkeypatch.setattr(store, "write", write_late)
    with pytest.raises(LeaseLostError):
        old.renew()
    assert old.is_stale()
    assert FIRST not in store.objects
    new.renew()


def test_a_claim_of_a_lease_that_was_renewed_or_released_meanwhile_is_withdrawn(machines: Machines) -> None:
    """Numbers begin again: the number of the claim may be free although another process holds the lease."""
    store = machines.store
    late, first, second = (machines.machine(name) for name in ("late", "first", "second"))
    machines.machine("dead").acquire()
    store.now += LEASE_S + 1

    def take_and_release() -> None:
        assert first.take()
        first.release()
        assert second.take()

    store.before_create = take_and_release
    assert not late.take()
    assert second.number == 1
    second.renew()
    store.now += LEASE_S + 1
    store.before_create = second.renew
    assert not late.take()
    second.renew()
