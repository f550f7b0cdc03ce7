"""Detect a worker that hangs by the heartbeats of all workers. Pure: heartbeats and times in, a suspect out.

Workers wait for each other in every step, so when one hangs, all stop sending heartbeats. The one with the fewest
heartbeats is the one that the others wait for.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from phalanx.run.heartbeat import Heartbeat
from phalanx.run.process_messages import PendingCollective, WaitingInCollective

MIN_SILENCE_S = 5.0
"""Minimum seconds without heartbeats that count as a hang; slow steps get more."""
MAX_SILENT_STEPS = 5.0
"""Step times that may pass without heartbeats."""
UNTIMED_PHASES = frozenset({"rendezvous", "restoring", "compiling", "ending"})
"""Phases after which minutes may pass without heartbeats: importing, reading weights, compiling, saving."""
RENDEZVOUS_SILENCE_S = 30.0
"""Seconds without heartbeats that count as a hang in the rendezvous, which waits for the slowest worker to start."""
NEXT_PHASES = {
    "starting": "rendezvous with the other workers",
    "data_wait": "forward",
    "forward": "backward",
    "backward": "forward or gradient sync",
    "grad_sync": "optimizer",
    "optimizer": "optimizer or checkpoint",
    "checkpoint_stall": "checkpoint or waiting for data",
    "other": "evaluation or checkpoint",
    "evaluation": "evaluation",
}
"""Activity of a worker after its last heartbeat, by the phase that it finished."""
STORAGE_PHASES = frozenset({"optimizer", "checkpoint_stall", "other"})
"""After these phases a worker may wait for storage: for data, or for a save."""


@dataclass(frozen=True)
class HangSuspect:
    """A worker that the others wait for."""

    rank: int
    step: int
    phase: str
    silence_s: float
    is_stopped: bool
    """Whether it is stopped by a signal (SIGSTOP) or a debugger."""
    is_certain: bool
    """Whether it cannot just be slow: it is stopped, and not all workers are."""

    @property
    def description(self) -> str:
        """Description for users."""
        problem = "has been stopped by a signal" if self.is_stopped else "has sent no heartbeat"
        return f"worker {self.rank} {problem} for {self.silence_s:.0f} s, in step {self.step}, doing: {self.phase}"


def find_hang(
    heartbeats: Mapping[int, Heartbeat | None],
    now: float,
    step_seconds: float | None,
    stopped_ranks: Collection[int],
    suspect: int | None = None,
    others_ended: bool = False,
) -> HangSuspect | None:
    """Find the worker that the others wait for, when all have sent no heartbeat for too long.

    `stopped_ranks`: ranks that are stopped by a signal. `suspect`: the suspect of the last check, which is kept on a
    tie, because times of other nodes' heartbeats are only known to some milliseconds. `others_ended`: whether workers
    of this attempt have ended.

    Returns None before all workers have started. Unless the suspect is stopped, also returns None before the end of the
    first step (`step_seconds` is None), and while the suspect is in one of `UNTIMED_PHASES`.
    """
    reported = {rank: last_heartbeat for rank, last_heartbeat in heartbeats.items() if last_heartbeat is not None}
    if len(reported) < len(heartbeats) or not reported:
        return None
    silence_s = now - max(last_heartbeat.t for last_heartbeat in reported.values())
    is_meeting = all(last_heartbeat.phase == "starting" for last_heartbeat in reported.values())
    limit_s = max(MIN_SILENCE_S, MAX_SILENT_STEPS * (step_seconds or 0.0))
    if silence_s <= (RENDEZVOUS_SILENCE_S if is_meeting and not stopped_ranks else limit_s):
        return None
    rank = min(
        reported,
        key=lambda candidate: (
            reported[candidate].count,
            candidate not in stopped_ranks,
            candidate != suspect,
            reported[candidate].t,
        ),
    )
    stopped_reported = set(stopped_ranks) & set(reported)
    certain = bool(stopped_reported) and (others_ended or len(stopped_reported) < len(reported))
    if certain and rank not in stopped_reported:
        rank = min(stopped_reported, key=lambda candidate: (reported[candidate].count, candidate != suspect))
    last_heartbeat = reported[rank]
    # the step time is not known yet: the first step may compile, or belong to a very large model
    is_untimed = last_heartbeat.phase in UNTIMED_PHASES or (step_seconds is None and not is_meeting)
    if is_untimed and rank not in stopped_reported:
        return None
    phase = NEXT_PHASES.get(last_heartbeat.phase, last_heartbeat.phase)
    if last_heartbeat.phase in STORAGE_PHASES and rank not in stopped_reported:
        phase += " (slow storage looks like this, too)"
    return HangSuspect(rank, last_heartbeat.step, phase, now - last_heartbeat.t, rank in stopped_reported, certain)


@dataclass(frozen=True)
class Deadlock:
    """Two workers of which each waits in a collective that cannot end, by rank."""

    collectives: dict[int, PendingCollective]

    @property
    def description(self) -> str:
        """Description for users."""
        waits = ", ".join(
            f"worker {rank} in collective {each.number} ({each.operation}) of the process group of ranks "
            f"{', '.join(map(str, each.ranks))}"
            for rank, each in self.collectives.items()
        )
        return (
            f"workers wait in different collectives, so none can end: {waits}; every rank of a process group must "
            "issue the same ones in the same order"
        )


def find_deadlock(waits: Mapping[int, WaitingInCollective]) -> Deadlock | None:
    """Find workers in collectives that cannot end, whatever the others do; None if there is no proof.

    `waits`: what the main threads of workers wait in, by rank, of about the same time. Either two ranks are in
    different operations at the same place of a process group. Or workers wait in a circle: each in collectives that a
    worker which waits, too, has not issued. A collective that all its ranks have issued may only be slow, as may a
    worker that does not wait, or of which it is not known.
    """
    first: dict[tuple[str, int], tuple[int, PendingCollective]] = {}
    for rank, wait in sorted(waits.items()):
        for each in wait.pending:
            other_rank, other = first.setdefault((each.group, each.number), (rank, each))
            if other.ranks == each.ranks and other.operation != each.operation:
                return Deadlock({other_rank: other, rank: each})
    circle = {rank for rank, wait in waits.items() if wait.pending}
    while True:
        held_up = {rank for rank in circle if all(_absent_ranks(each, waits) & circle for each in waits[rank].pending)}
        if held_up == circle:
            break
        circle = held_up
    if not circle:
        return None
    rank = min(circle)
    collective = waits[rank].pending[0]
    peer = min(_absent_ranks(collective, waits) & circle)
    return Deadlock({rank: collective, peer: waits[peer].pending[0]})


def _absent_ranks(collective: PendingCollective, waits: Mapping[int, WaitingInCollective]) -> set[int]:
    """Return the ranks that wait elsewhere and have not issued this collective."""
    return {
        rank
        for rank in collective.ranks
        if rank in waits and waits[rank].issued.get(collective.group, collective.number) < collective.number
    }
