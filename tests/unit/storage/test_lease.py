"""Leases by conditional writes: one holder at a time, by the clock of the store alone."""

from collections.abc import Callable
from typing import cast

import pytest

from clocked_store import ClockedStore
from phalanx.errors import ExitCode, UsageError
from phalanx.storage.lease import LEASE_S, RENEW_INTERVAL_S, Lease, LeaseLostError
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

    def machine(self, directory_id: str) -> Lease:
        return Lease(cast(Store, self.store), URL, directory_id, lambda: self.store.now, self.sleep, self.said.append)

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
