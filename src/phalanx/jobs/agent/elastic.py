"""Going on without a lost replica, and with another in its place, as the agent sees it: who trains together, and when
they are to meet anew. What workers do about it is `train/elastic/reconfigure.py`.

A worker is lost: the others are told at once, come together, and meet from memory. Who is lost before all have come is
left out as well. A new one is forked in its place, gets ready while they train, and says so; then all are told, and
meet at the end of a step. Whatever goes wrong when they meet, or takes too long, ends the attempt, and the run starts
again as it would have without. Where several workers hold a replica together, they come and go together: the mates of a
lost one are of no use to anybody, are ended, and started again.
"""

import dataclasses
import signal
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress

from phalanx.jobs.agent.attempt import AttemptState
from phalanx.jobs.agent.node_group import NodeHandle
from phalanx.run import Event
from phalanx.run.event_types import AttemptStarted, RunWarning, StepDone
from phalanx.run.messages import (
    JoinedGroup,
    LeftGroup,
    MembershipUpdate,
    SendSignal,
    StandbyReady,
    StartWorkers,
    UpdateMembership,
)

RENDEZVOUS_TIMEOUT_S = 10.0
"""Seconds in which workers that were told must have met."""
MAX_STEPS_BEFORE_RENDEZVOUS = 4
"""Further steps that they may take for it where nobody was lost: they meet at the end of one."""
MAX_REJOIN_ATTEMPTS = 3
"""Workers that may end before they are at work, one after another, in the same place."""


class ElasticReplicas:
    """The replicas of one attempt, of `replica_size` workers each. `start_message` is what their nurseries were
    told."""

    def __init__(
        self,
        attempt: AttemptState,
        start_message: StartWorkers,
        clock: Callable[[], float],
        emit: Callable[[Event], None],
        replica_size: int = 1,
    ):
        self._attempt, self._start_message, self._clock, self._emit, self._replica_size = (
            attempt,
            start_message,
            clock,
            emit,
            replica_size,
        )
        self._ready_ranks: set[int] = set()
        self._admitted_ranks: set[int] = set()  # in, but they have not met the others yet
        self._rejoin_attempts: Counter[int] = Counter()
        self._steps_since_rendezvous = 0  # told since they met last
        self._last_step = 0  # the last of them
        self._deadline: float | None = None
        self._is_rendezvous_pending = False  # they were told to
        self._is_after_loss = False  # because somebody is gone
        self._all_gathered = False  # all have come, and cannot be called back any more
        self._any_detached = self._any_finished = (
            False  # some left those with whom they worked; some came to the end of the run
        )
        self._last_rendezvous = attempt.number  # the last attempt for which they did meet

    def can_continue_without(self, ranks: Collection[int]) -> bool:
        """Whether the others can go on without these: they are at work, or have yet to come together to meet anew, and
        nothing else is wrong."""
        can_reconfigure = not self._all_gathered if self._is_rendezvous_pending else self._steps_since_rendezvous > 0
        return self._is_healthy and can_reconfigure and bool(self.surviving_ranks(ranks))

    def surviving_ranks(self, ranks: Collection[int]) -> set[int]:
        """Who would go on without these. Who has not met the others yet has nothing to go on from."""
        return self._attempt.active_ranks - self.whole_replicas(ranks) - self._admitted_ranks

    @property
    def _is_healthy(self) -> bool:
        attempt = self._attempt
        return not attempt.exit_statuses and attempt.abort_reason is None and attempt.error is None

    def whole_replicas(self, ranks: Collection[int]) -> set[int]:
        """All workers of the replicas of these."""
        firsts = {rank - rank % self._replica_size for rank in ranks}
        return {first + position for first in firsts for position in range(self._replica_size)}

    def continue_without(self, ranks: Collection[int], status: int) -> None:
        """Have the others go on without these, which ended with a status, and end the mates of these; and those who
        were to take their places, since they wait to meet somebody who will not come."""
        attempt = self._attempt
        mates = (self.whole_replicas(ranks) | self._admitted_ranks) & attempt.active_ranks - set(ranks)
        self._rejoin_attempts.update(self._admitted_ranks & set(ranks))
        self._admitted_ranks = set()
        attempt.lost_ranks |= dict.fromkeys(ranks, status) | dict.fromkeys(mates, -signal.SIGKILL)
        attempt.leaving_ranks |= mates
        self._start_rendezvous(after_loss=True)
        for node, node_range in attempt.ranks_by_node.items():
            if node_ranks := sorted(mates & set(node_range)):
                with suppress(ConnectionError):  # noticed where it is read
                    node.send(SendSignal(signal=int(signal.SIGKILL), ranks=tuple(node_ranks)))

    def start_replacements(self, node: NodeHandle, ranks: Collection[int]) -> None:
        """Start workers on a node in the places of lost ones."""
        attempt = self._attempt
        node_range = attempt.ranks_by_node[node]
        start = dataclasses.replace(
            self._start_message,
            attempt=attempt.number,
            first_rank=node_range.start,
            local_world_size=len(node_range),
            rejoining_ranks=tuple(sorted(ranks)),
        )
        with suppress(ConnectionError):  # noticed where it is read
            node.send(start)
            attempt.rejoining_ranks |= set(ranks)
            attempt.log_attempt_by_rank |= dict.fromkeys(ranks, attempt.number)

    def on_exit(self, rank: int) -> None:
        """A worker ended before it was to take its place, or because its mate was lost."""
        attempt = self._attempt
        self._rejoin_attempts[rank] += rank in attempt.rejoining_ranks
        attempt.rejoining_ranks.discard(rank)
        attempt.leaving_ranks.discard(rank)
        self._ready_ranks.discard(rank)
        if attempt.exit_statuses or attempt.abort_reason is not None:
            return
        self.respawn(rank)
        self._admit_ready_ranks()

    def respawn(self, rank: int) -> None:
        """Start another in the place of a worker that ended, unless too many did there before they were at work."""
        if self._rejoin_attempts[rank] < MAX_REJOIN_ATTEMPTS:
            node = next(node for node, ranks in self._attempt.ranks_by_node.items() if rank in ranks)
            self.start_replacements(node, [rank])
        else:
            text = f"worker {rank} ended {MAX_REJOIN_ATTEMPTS} times before it was at work: the run goes on without it"
            self._emit(RunWarning(text=text))

    def on_node_lost(self, ranks: Collection[int]) -> None:
        """Those of these who were getting ready went away with their node."""
        self._attempt.rejoining_ranks -= set(ranks)
        self._attempt.leaving_ranks -= set(ranks)
        self._ready_ranks -= set(ranks)

    def see(self, event: Event) -> None:
        """One event that a worker reports."""
        if isinstance(event, StepDone):
            self._steps_since_rendezvous += 1
            self._last_step = max(self._last_step, event.step)
            if self._admitted_ranks:  # they work, and meet when a checkpoint that is being written is whole
                self._deadline = self._rendezvous_deadline(after_loss=False)
            self._admit_ready_ranks()
        elif isinstance(event, AttemptStarted):
            self._last_rendezvous = event.attempt
            if event.attempt < self._attempt.number:
                return
            for rank in self._admitted_ranks:
                del self._rejoin_attempts[rank]
            self._deadline, self._is_rendezvous_pending, self._all_gathered, self._admitted_ranks = (
                None,
                False,
                False,
                set(),
            )
            self._steps_since_rendezvous, self._any_detached = 0, False  # the others were of the world before

    def on_message(self, message: StandbyReady | JoinedGroup | LeftGroup) -> None:
        """One message of a worker that is no event."""
        if isinstance(message, StandbyReady):
            self._ready_ranks.add(message.rank)
            self._admit_ready_ranks()
        elif isinstance(message, JoinedGroup):
            if message.attempt == self._attempt.number:
                self._all_gathered = True
            elif message.attempt > self._last_rendezvous:
                self._deadline = self._clock()  # to meet one who was lost since; it would wait for ever
        elif message.rank in self._attempt.active_ranks:
            self._any_detached = True
            if self._any_finished and self._is_after_loss:
                self._deadline = self._clock()
            elif self._deadline is None:
                self._deadline = (
                    self._clock() + RENDEZVOUS_TIMEOUT_S
                )  # somebody it worked with is gone, which is told soon

    def on_finish(self) -> None:
        """One came to the end of the run, and meets nobody any more. Who was to take a place has come too late; who was
        torn out of the end by a loss waits in vain."""
        attempt = self._attempt
        attempt.lost_ranks |= dict.fromkeys(self._admitted_ranks, 0)
        attempt.rejoining_ranks |= self._admitted_ranks
        self._admitted_ranks, self._any_finished = set(), True
        if not self._is_rendezvous_pending or not self._is_after_loss:
            self._deadline = None
        elif self._any_detached:
            self._deadline = self._clock()

    @property
    def is_rendezvous_pending(self) -> bool:
        """Whether they were told to meet, and have not."""
        return self._is_rendezvous_pending

    def has_timed_out(self) -> bool:
        """Whether they should have met by now."""
        return self._deadline is not None and self._clock() > self._deadline

    def _admit_ready_ranks(self) -> None:
        """Have all meet with those who are ready, when everybody who is to come is; by whole replicas."""
        attempt = self._attempt
        all_ready = self._ready_ranks == attempt.rejoining_ranks and not attempt.leaving_ranks
        whole_ranks = {rank for rank in self._ready_ranks if self.whole_replicas([rank]) <= self._ready_ranks}
        if (
            whole_ranks
            and all_ready
            and self._is_healthy
            and self._steps_since_rendezvous > 0
            and not self._is_rendezvous_pending
        ):
            for rank in whole_ranks:
                del attempt.lost_ranks[rank]
            self._admitted_ranks = whole_ranks
            self._ready_ranks -= whole_ranks
            attempt.rejoining_ranks -= whole_ranks
            self._start_rendezvous(after_loss=False)

    def _rendezvous_deadline(self, after_loss: bool) -> float:
        """When workers that are told now must have met."""
        return (
            self._clock()
            + RENDEZVOUS_TIMEOUT_S
            + (0.0 if after_loss else MAX_STEPS_BEFORE_RENDEZVOUS * (self._attempt.step_seconds or 0.0))
        )

    def _start_rendezvous(self, after_loss: bool) -> None:
        attempt = self._attempt
        attempt.number += 1
        attempt.straggler_baseline = {}
        self._steps_since_rendezvous, self._is_rendezvous_pending, self._is_after_loss, self._all_gathered = (
            0,
            True,
            after_loss,
            False,
        )
        self._deadline = self._rendezvous_deadline(after_loss)
        update = MembershipUpdate(
            attempt=attempt.number,
            active_ranks=tuple(sorted(attempt.active_ranks)),
            last_reported_step=self._last_step,
            worker_lost=after_loss,
        )
        for node, ranks in attempt.ranks_by_node.items():
            if node_ranks := sorted(attempt.active_ranks & set(ranks)):
                with suppress(ConnectionError):  # noticed where it is read
                    node.send(UpdateMembership(recipients=tuple(node_ranks), update=update))
