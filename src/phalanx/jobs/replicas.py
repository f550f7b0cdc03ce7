"""Going on without a lost replica, and with another in its place, as the agent sees it: who trains together, and when
they are to meet anew. What workers do about it is `train/regroup.py`.

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

from phalanx.jobs.attempt import Attempt
from phalanx.jobs.nodes import Node
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

MEETING = 10.0
"""Seconds in which workers that were told must have met."""
STEPS = 4
"""Further steps that they may take for it where nobody was lost: they meet at the end of one."""
TRIES = 3
"""Workers that may end before they are at work, one after another, in the same place."""


class Replicas:
    """The replicas of one attempt, of `size` workers each. `start` is what their nurseries were told."""

    def __init__(
        self,
        attempt: Attempt,
        start: StartWorkers,
        clock: Callable[[], float],
        emit: Callable[[Event], None],
        size: int = 1,
    ):
        self._attempt, self._start, self._clock, self._emit, self._size = attempt, start, clock, emit, size
        self._ready: set[int] = set()
        self._let: set[int] = set()  # in, but they have not met the others yet
        self._tries: Counter[int] = Counter()
        self._steps = 0  # told since they met last
        self._told = 0  # the last of them
        self._deadline: float | None = None
        self._meeting = False  # they were told to
        self._lost = False  # because somebody is gone
        self._gathered = False  # all have come, and cannot be called back any more
        self._adrift = self._ended = False  # some left those with whom they worked; some came to the end of the run
        self._met = attempt.number  # the last attempt for which they did meet

    def can_spare(self, ranks: Collection[int]) -> bool:
        """Whether the others can go on without these: they are at work, or have yet to come together to meet anew, and
        nothing else is wrong."""
        there = not self._gathered if self._meeting else self._steps > 0
        return self._well and there and bool(self.left(ranks))

    def left(self, ranks: Collection[int]) -> set[int]:
        """Who would go on without these. Who has not met the others yet has nothing to go on from."""
        return self._attempt.members - self.with_mates(ranks) - self._let

    @property
    def _well(self) -> bool:
        attempt = self._attempt
        return not attempt.codes and attempt.ending is None and attempt.error is None

    def with_mates(self, ranks: Collection[int]) -> set[int]:
        """All workers of the replicas of these."""
        firsts = {rank - rank % self._size for rank in ranks}
        return {first + position for first in firsts for position in range(self._size)}

    def spare(self, ranks: Collection[int], status: int) -> None:
        """Have the others go on without these, which ended with a status, and end the mates of these; and those who
        were to take their places, since they wait to meet somebody who will not come."""
        attempt = self._attempt
        mates = (self.with_mates(ranks) | self._let) & attempt.members - set(ranks)
        self._tries.update(self._let & set(ranks))
        self._let = set()
        attempt.away |= dict.fromkeys(ranks, status) | dict.fromkeys(mates, -signal.SIGKILL)
        attempt.leaving |= mates
        self._meet(lost=True)
        for node, own in attempt.places.items():
            if here := sorted(mates & set(own)):
                with suppress(ConnectionError):  # noticed where it is read
                    node.send(SendSignal(signal=int(signal.SIGKILL), ranks=tuple(here)))

    def replace(self, node: Node, ranks: Collection[int]) -> None:
        """Start workers on a node in the places of lost ones."""
        attempt = self._attempt
        place = attempt.places[node]
        start = dataclasses.replace(
            self._start,
            attempt=attempt.number,
            first_rank=place.start,
            local_world_size=len(place),
            rejoining_ranks=tuple(sorted(ranks)),
        )
        with suppress(ConnectionError):  # noticed where it is read
            node.send(start)
            attempt.joining |= set(ranks)
            attempt.logs |= dict.fromkeys(ranks, attempt.number)

    def fell(self, rank: int) -> None:
        """A worker ended before it was to take its place, or because its mate was lost."""
        attempt = self._attempt
        self._tries[rank] += rank in attempt.joining
        attempt.joining.discard(rank)
        attempt.leaving.discard(rank)
        self._ready.discard(rank)
        if attempt.codes or attempt.ending is not None:
            return
        self.again(rank)
        self._let_in()

    def again(self, rank: int) -> None:
        """Start another in the place of a worker that ended, unless too many did there before they were at work."""
        if self._tries[rank] < TRIES:
            node = next(node for node, ranks in self._attempt.places.items() if rank in ranks)
            self.replace(node, [rank])
        else:
            text = f"worker {rank} ended {TRIES} times before it was at work: the run goes on without it"
            self._emit(RunWarning(text=text))

    def gone(self, ranks: Collection[int]) -> None:
        """Those of these who were getting ready went away with their node."""
        self._attempt.joining -= set(ranks)
        self._attempt.leaving -= set(ranks)
        self._ready -= set(ranks)

    def see(self, event: Event) -> None:
        """One event that a worker reports."""
        if isinstance(event, StepDone):
            self._steps += 1
            self._told = max(self._told, event.step)
            if self._let:  # they work, and meet when a checkpoint that is being written is whole
                self._deadline = self._until(lost=False)
            self._let_in()
        elif isinstance(event, AttemptStarted):
            self._met = event.attempt
            if event.attempt < self._attempt.number:
                return
            for rank in self._let:
                del self._tries[rank]
            self._deadline, self._meeting, self._gathered, self._let = None, False, False, set()
            self._steps, self._adrift = 0, False  # the others were of the world before

    def hear(self, message: StandbyReady | JoinedGroup | LeftGroup) -> None:
        """One message of a worker that is no event."""
        if isinstance(message, StandbyReady):
            self._ready.add(message.rank)
            self._let_in()
        elif isinstance(message, JoinedGroup):
            if message.attempt == self._attempt.number:
                self._gathered = True
            elif message.attempt > self._met:
                self._deadline = self._clock()  # to meet one who was lost since; it would wait for ever
        elif message.rank in self._attempt.members:
            self._adrift = True
            if self._ended and self._lost:
                self._deadline = self._clock()
            elif self._deadline is None:
                self._deadline = self._clock() + MEETING  # somebody it worked with is gone, which is told soon

    def ends(self) -> None:
        """One came to the end of the run, and meets nobody any more. Who was to take a place has come too late; who was
        torn out of the end by a loss waits in vain."""
        attempt = self._attempt
        attempt.away |= dict.fromkeys(self._let, 0)
        attempt.joining |= self._let
        self._let, self._ended = set(), True
        if not self._meeting or not self._lost:
            self._deadline = None
        elif self._adrift:
            self._deadline = self._clock()

    @property
    def apart(self) -> bool:
        """Whether they were told to meet, and have not."""
        return self._meeting

    def late(self) -> bool:
        """Whether they should have met by now."""
        return self._deadline is not None and self._clock() > self._deadline

    def _let_in(self) -> None:
        """Have all meet with those who are ready, when everybody who is to come is; by whole replicas."""
        attempt = self._attempt
        all_ready = self._ready == attempt.joining and not attempt.leaving
        whole = {rank for rank in self._ready if self.with_mates([rank]) <= self._ready}
        if whole and all_ready and self._well and self._steps > 0 and not self._meeting:
            for rank in whole:
                del attempt.away[rank]
            self._let = whole
            self._ready -= whole
            attempt.joining -= whole
            self._meet(lost=False)

    def _until(self, lost: bool) -> float:
        """When workers that are told now must have met."""
        return self._clock() + MEETING + (0.0 if lost else STEPS * (self._attempt.step_seconds or 0.0))

    def _meet(self, lost: bool) -> None:
        attempt = self._attempt
        attempt.number += 1
        attempt.paces = {}
        self._steps, self._meeting, self._lost, self._gathered = 0, True, lost, False
        self._deadline = self._until(lost)
        update = MembershipUpdate(
            attempt=attempt.number,
            active_ranks=tuple(sorted(attempt.members)),
            last_reported_step=self._told,
            worker_lost=lost,
        )
        for node, ranks in attempt.places.items():
            if mine := sorted(attempt.members & set(ranks)):
                with suppress(ConnectionError):  # noticed where it is read
                    node.send(UpdateMembership(recipients=tuple(mine), update=update))
