"""Tells a worker that is stuck from one that is slow, by signs of life. Signs and times go in, a finding comes out.

Workers of a step wait for each other, so when one is stuck all fall silent; the one that gave the fewest signs is
waited for.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from phalanx.run.heartbeat import Heartbeat

MIN_SILENCE_S = 5.0
"""Seconds of silence, at least, before it is remarked; slow steps are allowed more."""
MAX_SILENT_STEPS = 5.0
"""How many usual steps may pass in silence."""
UNTIMED_PHASES = frozenset({"starting", "restoring", "compiling", "ending"})
"""Behind these comes what may take minutes in silence: importing, reading weights, compiling, saving."""
NEXT_PHASES = {
    "data": "forward",
    "forward": "backward",
    "backward": "forward or exchange",
    "exchange": "optimizer",
    "optimizer": "optimizer or checkpoint",
    "checkpoint": "checkpoint or waiting for data",
    "other": "evaluation or checkpoint",
    "evaluation": "evaluation",
}
"""What a worker does after it has finished a part of a step."""
STORAGE_PHASES = frozenset({"optimizer", "checkpoint", "other"})
"""Behind these a worker may wait for storage: data, or a save."""


@dataclass(frozen=True)
class HangSuspect:
    """A worker that the others wait for."""

    rank: int
    step: int
    phase: str
    silence_s: float
    """Seconds since its last sign."""
    is_stopped: bool
    """Whether somebody holds it still (SIGSTOP, a debugger)."""
    is_certain: bool
    """Whether it cannot be merely slow: it is held still, and not all are."""

    @property
    def description(self) -> str:
        """What it looks like, in words."""
        problem = "is held still by a signal" if self.is_stopped else "has given no sign of life"
        return f"worker {self.rank} {problem} for {self.silence_s:.0f} s, in step {self.step}, doing: {self.phase}"


def silence_limit(step_seconds: float | None) -> float:
    """Seconds of silence that are remarked, when a step usually takes so long."""
    return max(MIN_SILENCE_S, MAX_SILENT_STEPS * (step_seconds or 0.0))


def find_hang(
    heartbeats: Mapping[int, Heartbeat | None],
    now: float,
    step_seconds: float | None,
    stopped_ranks: Collection[int],
    suspect: int | None = None,
    others_ended: bool = False,
) -> HangSuspect | None:
    """The worker that holds the others up, when all have been silent for longer than a heartbeat. `stopped`: ranks that
    are held still. `suspect`: who it was at the last look, and still is if no other is further back: when the signs of
    other nodes were given is known to some milliseconds only. `others_ended`: some workers of this attempt have. None
    before all have begun, before the first step has
    ended (`step_seconds` is None), and where the one that is waited for is preparing something, unless it is held
    still."""
    reported = {rank: last_heartbeat for rank, last_heartbeat in heartbeats.items() if last_heartbeat is not None}
    if len(reported) < len(heartbeats) or not reported:
        return None
    silence_s = now - max(last_heartbeat.t for last_heartbeat in reported.values())
    if silence_s <= silence_limit(step_seconds):
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
    # nobody knows yet how long a step takes: the first may compile, or be that of a very large model
    if (last_heartbeat.phase in UNTIMED_PHASES or step_seconds is None) and rank not in stopped_reported:
        return None
    phase = NEXT_PHASES.get(last_heartbeat.phase, last_heartbeat.phase)
    if last_heartbeat.phase in STORAGE_PHASES and rank not in stopped_reported:
        phase += " (slow storage looks like this, too)"
    return HangSuspect(rank, last_heartbeat.step, phase, now - last_heartbeat.t, rank in stopped_reported, certain)
