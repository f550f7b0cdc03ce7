"""The agent's part of elastic training: which workers form the world, and when they rendezvous again.
`train/elastic/reconfigure.py` is the workers' part.

When a worker is lost, the agent notifies the surviving replicas at once; they rendezvous and continue from memory. A
worker that is lost before all have gathered is left out as well. A replacement is forked, prepares while the others
train, and reports that it is ready; then all are notified and rendezvous at the end of a step. An error or a timeout of
the rendezvous ends the attempt, and the run restarts as without elastic training. Workers that form one replica leave
and rejoin together: when one is lost, its mates are killed and restarted.
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
from phalanx.run.process_messages import (
    JoinedGroup,
    LeftGroup,
    MembershipUpdate,
    SendSignal,
    StandbyReady,
    StartWorkers,
    UpdateMembership,
)

RENDEZVOUS_TIMEOUT_S = 10.0
"""Seconds for the rendezvous of workers that were notified."""
MAX_STEPS_BEFORE_RENDEZVOUS = 4
"""Steps that workers may run before a rendezvous without a loss, which takes place at the end of a step."""
MAX_REJOIN_ATTEMPTS = 3
"""Replacements of one rank that may end before they train."""


class ElasticReplicas:
    """The replicas of one attempt, of `replica_size` workers each. `start_message`: the message that started them."""

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
        self._admitted_ranks: set[int] = set()  # in the world, but not through the rendezvous yet
        self._rejoin_attempts: Counter[int] = Counter()
        self._steps_since_rendezvous = 0  # reported steps
        self._last_step = 0  # the last of them
        self._deadline: float | None = None
        self._is_rendezvous_pending = False  # workers were notified
        self._is_after_loss = False  # the pending rendezvous follows a loss
        self._all_gathered = False  # all have gathered, and the rendezvous cannot be changed any more
        self._any_detached = self._any_finished = False  # some workers left their process group; some finished the run
        self._last_rendezvous = attempt.number  # attempt of the last complete rendezvous

    def can_continue_without(self, ranks: Collection[int]) -> bool:
        """Whether the other replicas can continue without these workers: they train, or a pending rendezvous has not
        gathered yet, and nothing else has failed."""
        can_reconfigure = not self._all_gathered if self._is_rendezvous_pending else self._steps_since_rendezvous > 0
        return self._is_healthy and can_reconfigure and bool(self.surviving_ranks(ranks))

    def surviving_ranks(self, ranks: Collection[int]) -> set[int]:
        """Return the ranks that would continue without these. Ranks before their first rendezvous have no state."""
        return self._attempt.active_ranks - self.whole_replicas(ranks) - self._admitted_ranks

    @property
    def _is_healthy(self) -> bool:
        attempt = self._attempt
        return not attempt.exit_statuses and attempt.abort_reason is None and attempt.error is None

    def whole_replicas(self, ranks: Collection[int]) -> set[int]:
        """Return all ranks of the replicas of these ranks."""
        firsts = {rank - rank % self._replica_size for rank in ranks}
        return {first + position for first in firsts for position in range(self._replica_size)}

    def continue_without(self, ranks: Collection[int], status: int) -> None:
        """Continue without these workers, which ended with `status`.

        Kills the other workers of their replicas, and replacements that were just admitted, since they wait for a
        rendezvous that will not complete.
        """
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
        """Start replacements of lost workers on a node."""
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
        """Handle the end of a replacement before it trained, or of a worker that was killed with its replica."""
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
        """Start a replacement for this rank, unless too many ended before they trained."""
        if self._rejoin_attempts[rank] < MAX_REJOIN_ATTEMPTS:
            node = next(node for node, ranks in self._attempt.ranks_by_node.items() if rank in ranks)
            self.start_replacements(node, [rank])
        else:
            text = f"worker {rank} ended {MAX_REJOIN_ATTEMPTS} times before it trained: the run continues without it"
            self._emit(RunWarning(text=text))

    def on_node_lost(self, ranks: Collection[int]) -> None:
        """Forget replacements that were lost with their node."""
        self._attempt.rejoining_ranks -= set(ranks)
        self._attempt.leaving_ranks -= set(ranks)
        self._ready_ranks -= set(ranks)

    def see(self, event: Event) -> None:
        """Handle an event of a worker."""
        if isinstance(event, StepDone):
            self._steps_since_rendezvous += 1
            self._last_step = max(self._last_step, event.step)
            if self._admitted_ranks:  # they train until a checkpoint that is being written is complete
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
            self._steps_since_rendezvous, self._any_detached = 0, False  # earlier steps belong to the previous world

    def on_message(self, message: StandbyReady | JoinedGroup | LeftGroup) -> None:
        """Handle a message of a worker that is no event."""
        if isinstance(message, StandbyReady):
            self._ready_ranks.add(message.rank)
            self._admit_ready_ranks()
        elif isinstance(message, JoinedGroup):
            if message.attempt == self._attempt.number:
                self._all_gathered = True
            elif message.attempt > self._last_rendezvous:
                self._deadline = (
                    self._clock()
                )  # it gathered with a worker that was lost since, and would wait without end
        elif message.rank in self._attempt.active_ranks:
            self._any_detached = True
            if self._any_finished and self._is_after_loss:
                self._deadline = self._clock()
            elif self._deadline is None:
                self._deadline = (
                    self._clock() + RENDEZVOUS_TIMEOUT_S
                )  # a peer is gone, which its agent will report soon

    def on_finish(self) -> None:
        """Handle the first worker that finishes the run, after which no rendezvous can complete.

        Admitted replacements are too late, and a worker that left its process group after a loss would wait without
        end.
        """
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
        """Whether workers were notified of a rendezvous that is not complete."""
        return self._is_rendezvous_pending

    def has_timed_out(self) -> bool:
        """Whether the rendezvous should be complete by now."""
        return self._deadline is not None and self._clock() > self._deadline

    def _admit_ready_ranks(self) -> None:
        """Start a rendezvous with whole replicas of replacements when all replacements are ready."""
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
        """Return the deadline of a rendezvous that starts now."""
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
