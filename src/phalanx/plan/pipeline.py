"""Pipeline schedules as orders of work, and how long they take: a simulation of events, one queue a rank.

GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019 (PipeDream-Flush). Interleaved: Narayanan et al. 2021, section
2.2. Zero bubble (ZB-H1): Qi et al. 2023, where backward is two halves, for inputs and for weights, of which the second
waits for idle time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Kind = Literal["F", "B", "W"]
"""Forward; backward, or with zero bubble that of inputs alone; that of weights."""


@dataclass(frozen=True)
class Span:
    """One piece of work as it was simulated, seconds from the start of the step."""

    rank: int
    kind: Kind
    chunk: int
    micro: int
    start: float
    end: float


@dataclass(frozen=True)
class Stage:
    """Seconds of one stage for one micro-batch."""

    forward: float
    backward: float


def order(schedule: Schedule, rank: int, ranks: int, chunks: int, micros: int) -> list[tuple[Kind, int, int]]:
    """What one rank does, as (kind, chunk, micro-batch), in order."""
    if schedule == "gpipe":
        forward: list[tuple[Kind, int, int]] = [("F", 0, micro) for micro in range(micros)]
        return forward + [("B", 0, micro) for micro in range(micros)]
    if chunks > 1 and schedule == "interleaved":
        return _interleaved(rank, ranks, chunks, micros)
    early = min(ranks - rank - 1, micros)
    found: list[tuple[Kind, int, int]] = [("F", 0, micro) for micro in range(early)]
    for micro in range(early, micros):
        found += [("F", 0, micro), ("B", 0, micro - early)]
    found += [("B", 0, micro) for micro in range(micros - early, micros)]
    return _with_weights_late(found, rank) if schedule == "zero-bubble" else found


def _interleaved(rank: int, ranks: int, chunks: int, micros: int) -> list[tuple[Kind, int, int]]:
    """Micro-batches go in groups of as many as there are ranks, the last of what is left, each group through one chunk
    after the other."""
    groups = [range(at, min(at + ranks, micros)) for at in range(0, micros, ranks)]
    forward: list[tuple[Kind, int, int]] = []
    backward: list[tuple[Kind, int, int]] = []
    for group in groups:
        forward += [("F", chunk, micro) for chunk in range(chunks) for micro in group]
        backward += [("B", chunk, micro) for chunk in reversed(range(chunks)) for micro in group]
    total = micros * chunks
    # Where the last group is smaller, or the only one, all forwards come first: ranks would wait for each other.
    early = total if micros % ranks or micros == ranks else min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)
    found = forward[:early]
    for index in range(early, total):
        found += [forward[index], backward[index - early]]
    return found + backward[total - early :]


def _with_weights_late(order: list[tuple[Kind, int, int]], rank: int) -> list[tuple[Kind, int, int]]:
    """Each backward split in two; a rank further down puts the second half off by as many micro-batches."""
    found: list[tuple[Kind, int, int]] = []
    waiting: list[tuple[Kind, int, int]] = []
    for kind, chunk, micro in order:
        found.append((kind, chunk, micro))
        if kind == "B":
            waiting.append(("W", chunk, micro))
            if len(waiting) > rank:
                found.append(waiting.pop(0))
    return found + waiting


def simulate(schedule: Schedule, stages: Sequence[Stage], ranks: int, micros: int, send: float) -> list[Span]:
    """All work of a step. Stage s stands on rank s % ranks; `send` seconds lie between a stage and the next."""
    chunks = len(stages) // ranks
    queues = [order(schedule, rank, ranks, chunks, micros) for rank in range(ranks)]
    ended: dict[tuple[Kind, int, int], float] = {}
    free, at, spans = [0.0] * ranks, [0] * ranks, list[Span]()
    split = schedule == "zero-bubble"
    left = sum(len(queue) for queue in queues)
    while left:
        before = left
        for rank, queue in enumerate(queues):
            while at[rank] < len(queue):
                kind, chunk, micro = queue[at[rank]]
                stage = chunk * ranks + rank
                ready = _ready(kind, stage, micro, len(stages), ended, send)
                if ready is None:
                    break
                seconds = stages[stage].forward if kind == "F" else stages[stage].backward / (2 if split else 1)
                start = max(free[rank], ready)
                free[rank] = start + seconds
                ended[(kind, stage, micro)] = free[rank]
                spans.append(Span(rank, kind, chunk, micro, start, free[rank]))
                at[rank] += 1
                left -= 1
        if left == before:
            raise ValueError(f"{schedule} with {ranks} ranks and {micros} micro-batches waits for itself")
    return spans


def _ready(
    kind: Kind, stage: int, micro: int, stages: int, ended: dict[tuple[Kind, int, int], float], send: float
) -> float | None:
    """When what a piece of work needs is there; None while it is not known."""
    if kind == "W":
        return ended.get(("B", stage, micro))
    if kind == "F":
        if stage == 0:
            return 0.0
        end = ended.get(("F", stage - 1, micro))
        return None if end is None else end + send
    if stage == stages - 1:
        return ended.get(("F", stage, micro))
    end = ended.get(("B", stage + 1, micro))
    return None if end is None else end + send


def seconds(schedule: Schedule, stages: Sequence[Stage], ranks: int, micros: int, send: float) -> float:
    """Of a step's forwards and backwards. Once the pipeline is full further micro-batches take as long as those before,
    which is more than its slowest rank takes where ranks wait for what is sent; so only as many are simulated as fill
    it."""
    if ranks == 1:
        return micros * sum(each.forward + each.backward for each in stages)

    def end(count: int) -> float:
        return max(span.end for span in simulate(schedule, stages, ranks, count, send))

    few = 3 * ranks + micros % ranks
    if micros <= few + ranks:
        return end(micros)
    full = end(few + ranks)
    return full + (micros - few - ranks) / ranks * (full - end(few))
