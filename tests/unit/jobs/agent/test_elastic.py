"""Who trains together when a replica was lost, and when the others are told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from made_events import made
from made_messages import start_workers
from phalanx.jobs.agent.attempt import AttemptState
from phalanx.jobs.agent.elastic import (
    MAX_REJOIN_ATTEMPTS,
    MAX_STEPS_BEFORE_RENDEZVOUS,
    RENDEZVOUS_TIMEOUT_S,
    ElasticReplicas,
)
from phalanx.run import Event
from phalanx.run.event_types import AttemptStarted, RunWarning, StepDone
from phalanx.run.messages import Message
from phalanx.run.process_messages import (
    JoinedGroup,
    LeftGroup,
    MembershipUpdate,
    SendSignal,
    StandbyReady,
    StartWorkers,
    UpdateMembership,
    WorkerError,
)

START = start_workers("f", {}, Path("logs"), 4, attempt=3, is_elastic=True)


class Told:
    """A node that keeps what it is sent."""

    name = "here"

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, *messages: Message) -> None:
        self.messages += messages

    def orders(self) -> list[MembershipUpdate]:
        return [message.update for message in self.messages if isinstance(message, UpdateMembership)]

    def starts(self) -> list[tuple[int, ...]]:
        return [message.rejoining_ranks or () for message in self.messages if isinstance(message, StartWorkers)]


def order(attempt: int, ranks: tuple[int, ...], step: int, lost: bool = True) -> MembershipUpdate:
    return MembershipUpdate(attempt=attempt, active_ranks=ranks, last_reported_step=step, worker_lost=lost)


class Case:
    """Four workers on two nodes, in the attempt of number 3."""

    def __init__(self, size: int = 1) -> None:
        self.now, self.said = 100.0, list[str]()
        self.nodes = [Told(), Told()]
        places: dict[Any, range] = {self.nodes[0]: range(2), self.nodes[1]: range(2, 4)}
        self.attempt = AttemptState(4, places, 3, log_attempt_by_rank=dict.fromkeys(range(4), 3), step_seconds=2.0)
        self.replicas = ElasticReplicas(self.attempt, START, lambda: self.now, self.emit, size)

    def emit(self, event: Event) -> None:
        assert isinstance(event, RunWarning)
        self.said.append(event.text)

    def step(self, step: int) -> None:
        self.replicas.see(made(StepDone, step=step))

    def started(self) -> None:
        self.replicas.see(made(AttemptStarted, attempt=self.attempt.number))

    def lose(self, rank: int) -> None:
        self.replicas.continue_without([rank], -9)
        self.replicas.respawn(rank)

    def met(self, step: int) -> None:
        """They have met, and done a step."""
        self.started()
        self.step(step)

    def gathered(self, rank: int, attempt: int) -> None:
        self.replicas.on_message(JoinedGroup(rank=rank, attempt=attempt))


@pytest.fixture
def case() -> Case:
    case = Case()
    case.step(7)
    return case


def test_the_others_are_told_who_is_left_and_which_step_is_known(case: Case) -> None:
    case.step(8)
    case.lose(2)
    words = order(4, (0, 1, 3), 8)
    assert [node.orders() for node in case.nodes] == [[words], [words]]
    sent = [message for node in case.nodes for message in node.messages if isinstance(message, UpdateMembership)]
    assert [message.recipients for message in sent] == [(0, 1), (3,)]
    assert case.nodes[1].starts() == [(2,)]
    assert case.attempt.log_attempt_by_rank == {0: 3, 1: 3, 2: 4, 3: 3}


def test_who_is_ready_takes_its_place_when_the_others_are_at_work_again(case: Case) -> None:
    case.lose(2)
    case.replicas.on_message(StandbyReady(rank=2))
    case.started()
    assert len(case.nodes[0].orders()) == 1
    case.step(8)
    assert case.nodes[0].orders()[-1] == order(5, (0, 1, 2, 3), 8, lost=False)
    assert case.attempt.active_ranks == {0, 1, 2, 3}


def test_all_who_are_to_come_come_together(case: Case) -> None:
    case.replicas.continue_without([2, 3], 76)
    case.replicas.start_replacements(case.nodes[1], [2, 3])  # type: ignore[arg-type]
    case.started()
    case.step(8)
    case.replicas.on_message(StandbyReady(rank=3))
    assert case.attempt.active_ranks == {0, 1}
    case.replicas.on_message(StandbyReady(rank=2))
    assert case.attempt.active_ranks == {0, 1, 2, 3}


def at_the_beginning(case: Case) -> None:
    case.__init__()  # type: ignore[misc]


def when_they_have_come_together(case: Case) -> None:
    case.lose(1)
    case.gathered(2, 4)


def when_another_ended(case: Case) -> None:
    case.attempt.exit_statuses[1] = 0


def when_it_is_to_end(case: Case) -> None:
    case.attempt.abort_reason = "a hang"


def when_somebody_told_an_error(case: Case) -> None:
    case.attempt.error = WorkerError(rank=0, message="broken", exit_code=65)


@pytest.mark.parametrize(
    "happens",
    [
        at_the_beginning,
        when_they_have_come_together,
        when_another_ended,
        when_it_is_to_end,
        when_somebody_told_an_error,
    ],
)
def test_nobody_can_be_spared(case: Case, happens: Callable[[Case], None]) -> None:
    assert case.replicas.can_continue_without([0])
    happens(case)
    assert not case.replicas.can_continue_without([0])


def test_not_all_can_be_spared(case: Case) -> None:
    assert not case.replicas.can_continue_without(range(4))


@pytest.mark.parametrize("late", [False, True])
def test_those_who_do_not_meet_in_time_are_late(case: Case, late: bool) -> None:
    case.lose(2)
    case.now += RENDEZVOUS_TIMEOUT_S + (1 if late else -1)
    assert case.replicas.has_timed_out() is late
    case.started()
    assert not case.replicas.has_timed_out()


def test_a_meeting_at_the_end_of_a_step_may_take_some_steps(case: Case) -> None:
    case.lose(2)
    case.started()
    case.step(8)
    case.replicas.on_message(StandbyReady(rank=2))
    case.now += RENDEZVOUS_TIMEOUT_S + MAX_STEPS_BEFORE_RENDEZVOUS * 2.0 - 1
    assert not case.replicas.has_timed_out()
    case.now += 2
    assert case.replicas.has_timed_out()


def test_workers_that_lost_a_connection_and_nobody_are_late_after_a_while(case: Case) -> None:
    case.replicas.on_message(LeftGroup(rank=1))
    assert case.replicas.can_continue_without([0])
    case.now += RENDEZVOUS_TIMEOUT_S + 1
    assert case.replicas.has_timed_out()


def test_another_is_started_for_one_that_ended_before_it_was_ready_but_not_for_ever(case: Case) -> None:
    case.lose(2)
    for _ in range(MAX_REJOIN_ATTEMPTS):
        case.replicas.on_exit(2)
    assert case.nodes[1].starts() == [(2,)] * MAX_REJOIN_ATTEMPTS
    assert case.attempt.rejoining_ranks == set()
    assert case.said == ["worker 2 ended 3 times before it trained: the run continues without it"]


def test_another_is_lost_before_they_have_come_together(case: Case) -> None:
    case.lose(2)
    assert case.replicas.can_continue_without([1])
    case.lose(1)
    assert case.nodes[0].orders()[-1] == order(5, (0, 3), 7)
    case.met(8)
    assert [node.starts() for node in case.nodes] == [[(1,)], [(2,)]]


def test_who_was_about_to_meet_one_who_was_lost_is_late(case: Case) -> None:
    """All had come, which was not known yet when another was lost."""
    case.lose(2)
    case.lose(1)
    case.gathered(3, 4)
    case.now += 0.1
    assert case.replicas.has_timed_out()


def test_what_is_heard_late_of_a_meeting_that_was_is_nothing(case: Case) -> None:
    case.lose(2)
    case.met(8)
    case.lose(1)
    case.gathered(3, 4)
    case.now += 0.1
    assert not case.replicas.has_timed_out()


@pytest.fixture
def growing(case: Case) -> Case:
    """Another is ready in the place of worker 2, and waits until the others have ended a checkpoint."""
    case.lose(2)
    case.met(8)
    case.replicas.on_message(StandbyReady(rank=2))
    case.step(9)
    assert case.attempt.active_ranks == {0, 1, 2, 3}
    return case


def test_another_is_lost_before_the_new_one_has_its_place(growing: Case) -> None:
    """The new one is ended: it waits for the one that was lost."""
    growing.lose(1)
    assert growing.nodes[0].orders()[-1] == order(6, (0, 3), 9)
    assert growing.nodes[1].messages[-1] == SendSignal(signal=9, ranks=(2,))
    growing.replicas.on_exit(2)
    growing.met(10)
    assert [node.starts() for node in growing.nodes] == [[(1,)], [(2,), (2,)]]


def test_the_new_one_cannot_go_on_alone(growing: Case) -> None:
    assert growing.replicas.can_continue_without([0, 1])
    assert not growing.replicas.can_continue_without([0, 1, 3])


def test_the_new_one_is_lost_before_it_has_its_place_but_not_for_ever(growing: Case) -> None:
    for step in range(10, 10 + MAX_REJOIN_ATTEMPTS):
        growing.lose(2)
        growing.met(step)
        growing.replicas.on_message(StandbyReady(rank=2))
        growing.step(step)
    assert growing.attempt.active_ranks == {0, 1, 3}
    assert growing.nodes[1].starts() == [(2,)] * MAX_REJOIN_ATTEMPTS
    assert growing.said == ["worker 2 ended 3 times before it trained: the run continues without it"]


def test_who_comes_after_the_last_step_is_not_waited_for(case: Case) -> None:
    case.lose(2)
    case.started()
    case.step(8)
    case.replicas.on_message(StandbyReady(rank=2))
    case.attempt.exit_statuses[0] = 0
    case.replicas.on_finish()
    assert case.attempt.active_ranks == {0, 1, 3}
    case.now += 1000
    assert not case.replicas.has_timed_out()
    case.attempt.exit_statuses |= {1: 0, 3: 0}
    case.replicas.on_exit(2)
    assert case.attempt.is_over


@pytest.mark.parametrize("torn", ["before", "after", "never"])
def test_who_was_torn_out_of_the_end_does_not_wait_for_one_that_came_to_it(case: Case, torn: str) -> None:
    if torn == "before":
        case.replicas.on_message(LeftGroup(rank=1))
    case.lose(2)
    case.attempt.exit_statuses[0] = 0
    case.replicas.on_finish()
    if torn == "after":
        case.replicas.on_message(LeftGroup(rank=1))
    case.now += 0.1
    assert case.replicas.has_timed_out() == (torn != "never")
    case.now += RENDEZVOUS_TIMEOUT_S
    assert case.replicas.has_timed_out()


@pytest.fixture
def pairs() -> Case:
    """Two replicas of two workers each, {0, 1} on one node and {2, 3} on the other."""
    case = Case(size=2)
    case.step(7)
    return case


def test_the_mates_of_a_lost_worker_are_ended_and_the_other_replicas_go_on(pairs: Case) -> None:
    pairs.lose(3)
    assert pairs.attempt.active_ranks == {0, 1}
    assert pairs.nodes[0].orders() == [order(4, (0, 1), 7)]
    ended = [message for node in pairs.nodes for message in node.messages if isinstance(message, SendSignal)]
    assert ended == [SendSignal(signal=9, ranks=(2,))]
    assert pairs.nodes[1].starts() == [(3,)]


def test_a_mate_is_started_again_when_it_has_ended(pairs: Case) -> None:
    pairs.lose(3)
    assert not pairs.attempt.is_over
    pairs.replicas.on_exit(2)
    assert pairs.nodes[1].starts() == [(3,), (2,)]
    assert (pairs.attempt.leaving_ranks, pairs.attempt.rejoining_ranks) == (set(), {2, 3})


def test_a_replica_is_let_in_when_all_its_workers_are_ready(pairs: Case) -> None:
    pairs.lose(3)
    pairs.started()
    pairs.step(8)
    pairs.replicas.on_message(StandbyReady(rank=3))
    assert pairs.attempt.active_ranks == {0, 1}
    pairs.replicas.on_exit(2)
    pairs.replicas.on_message(StandbyReady(rank=2))
    assert pairs.attempt.active_ranks == {0, 1, 2, 3}


def test_a_replica_of_which_one_worker_does_not_come_stays_out(pairs: Case) -> None:
    pairs.lose(3)
    pairs.started()
    pairs.step(8)
    pairs.replicas.on_exit(2)
    pairs.replicas.on_message(StandbyReady(rank=3))
    for _ in range(MAX_REJOIN_ATTEMPTS):
        pairs.replicas.on_exit(2)
    assert pairs.attempt.active_ranks == {0, 1}
    assert pairs.said == ["worker 2 ended 3 times before it trained: the run continues without it"]


def test_no_replica_can_be_spared_when_each_has_lost_a_worker(pairs: Case) -> None:
    assert pairs.replicas.can_continue_without([2, 3])
    assert not pairs.replicas.can_continue_without([1, 2])


def test_what_a_worker_that_is_to_end_says_of_lost_connections_does_not_count(pairs: Case) -> None:
    pairs.lose(3)
    pairs.started()
    pairs.replicas.on_message(LeftGroup(rank=2))
    pairs.now += 1000
    assert not pairs.replicas.has_timed_out()


def test_an_attempt_is_not_over_while_a_worker_that_was_told_to_end_is_there(pairs: Case) -> None:
    pairs.lose(3)
    pairs.attempt.exit_statuses |= {0: 0, 1: 0}
    pairs.replicas.on_exit(3)
    assert not pairs.attempt.is_over
    pairs.replicas.on_exit(2)
    assert pairs.attempt.is_over


def test_who_is_at_work_is_not_late_for_a_meeting_that_waits_for_a_checkpoint(case: Case) -> None:
    case.lose(2)
    case.started()
    case.step(8)
    case.replicas.on_message(StandbyReady(rank=2))
    for step in range(9, 40):
        case.now += RENDEZVOUS_TIMEOUT_S
        case.step(step)
    assert not case.replicas.has_timed_out()
    case.now += RENDEZVOUS_TIMEOUT_S + MAX_STEPS_BEFORE_RENDEZVOUS * 2.0 + 1
    assert case.replicas.has_timed_out()
