"""Tells a worker that is stuck from one that is slow, by signs of life. Signs and times go in, a finding comes out.

Workers of a step wait for each other, so when one is stuck all fall silent; the one that gave the fewest signs is
waited for.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from phalanx.run.pulse import Beat

HEARTBEAT = 5.0
"""Seconds of silence, at least, before it is remarked; slow steps are allowed more."""
STEPS = 5.0
"""How many usual steps may pass in silence."""
PREPARING = frozenset({"starting", "restoring", "compiling", "ending"})
"""Behind these comes what may take minutes in silence: importing, reading weights, compiling, saving."""
NEXT = {
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
STORAGE = frozenset({"optimizer", "checkpoint", "other"})
"""Behind these a worker may wait for storage: data, or a save."""


@dataclass(frozen=True)
class Stuck:
    """A worker that the others wait for."""

    rank: int
    step: int
    doing: str
    silent: float
    """Seconds since its last sign."""
    stopped: bool
    """Whether somebody holds it still (SIGSTOP, a debugger)."""
    certain: bool
    """Whether it cannot be merely slow: it is held still, and not all are."""

    @property
    def words(self) -> str:
        """What it looks like, in words."""
        how = "is held still by a signal" if self.stopped else "has given no sign of life"
        return f"worker {self.rank} {how} for {self.silent:.0f} s, in step {self.step}, doing: {self.doing}"


def heartbeat(usual: float | None) -> float:
    """Seconds of silence that are remarked, when a step usually takes so long."""
    return max(HEARTBEAT, STEPS * (usual or 0.0))


def stuck(
    beats: Mapping[int, Beat | None],
    now: float,
    usual: float | None,
    stopped: Collection[int],
    suspect: int | None = None,
    others_ended: bool = False,
) -> Stuck | None:
    """The worker that holds the others up, when all have been silent for longer than a heartbeat. `stopped`: ranks that
    are held still. `suspect`: who it was at the last look, and still is if no other is further back: when the signs of
    other nodes were given is known to some milliseconds only. `others_ended`: some workers of this attempt have. None
    before all have begun, before the first step has
    ended (`usual` is None), and where the one that is waited for is preparing something, unless it is held still."""
    known = {rank: beat for rank, beat in beats.items() if beat is not None}
    if len(known) < len(beats) or not known:
        return None
    quiet = now - max(beat.t for beat in known.values())
    if quiet <= heartbeat(usual):
        return None
    rank = min(known, key=lambda each: (known[each].count, each not in stopped, each != suspect, known[each].t))
    held = set(stopped) & set(known)
    certain = bool(held) and (others_ended or len(held) < len(known))
    if certain and rank not in held:
        rank = min(held, key=lambda each: (known[each].count, each != suspect))
    beat = known[rank]
    # nobody knows yet how long a step takes: the first may compile, or be that of a very large model
    if (beat.place in PREPARING or usual is None) and rank not in held:
        return None
    doing = NEXT.get(beat.place, beat.place)
    if beat.place in STORAGE and rank not in held:
        doing += " (slow storage looks like this, too)"
    return Stuck(rank, beat.step, doing, now - beat.t, rank in held, certain)
