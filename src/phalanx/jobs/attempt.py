"""One attempt at a run: what its workers have shown so far, and what their ends mean for the run."""

import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.errors import ExitCode
from phalanx.jobs.hang import Hang
from phalanx.jobs.nodes import Node
from phalanx.jobs.nursery import GPU, LOST_PEER, STORAGE, signal_name
from phalanx.run.event_types import FailureCause, WorkerFailure
from phalanx.run.messages import WorkerError
from phalanx.run.pulse import Beat

FINAL_CODES = frozenset({ExitCode.DATA, ExitCode.RECIPE, ExitCode.UNFIT_NODE, ExitCode.GAVE_UP, ExitCode.USAGE})
"""Codes of a worker after which starting it again would only repeat them."""
IN_ORDER = frozenset({ExitCode.DONE, ExitCode.UNFINISHED})
"""Codes of a worker that came to its end, if it said so: anything in it may have left with them."""
CAUSES: dict[int, FailureCause] = {LOST_PEER: "peer_disconnected", STORAGE: "storage_failed", GPU: "gpu_failed"}
"""By the status with which a worker ends that knows its cause."""
NEVER_CAME = "ended without training: it never came to `with phalanx.join(...)`"


ORPHANED = "the process that forks workers died, and they with it"
HELD = "the process that forks workers does not report their end: it is stopped (SIGSTOP), or the kernel keeps a worker"
OVERDUE = 120.0
"""Seconds in which workers that were killed must have ended, whatever memory they give back, and ends be reported."""


@dataclass
class Attempt:
    """What one attempt has shown so far."""

    world: int
    places: dict[Node, range] = field(default_factory=dict)
    """The ranks of each node's workers."""
    number: int = 0
    """Of the attempt that workers make now: one more each time that they met anew."""
    logs: dict[int, int] = field(default_factory=dict)
    """By rank, the number under which its worker was started."""
    codes: dict[int, int] = field(default_factory=dict)
    started: set[Node] = field(default_factory=set)
    """Nodes that have said that their workers are forked."""
    came: set[int] = field(default_factory=set)
    """Workers that have said that they began to get ready."""
    left: dict[int, int] = field(default_factory=dict)
    """Workers that have said that they come to their end, and with which code."""
    away: dict[int, int] = field(default_factory=dict)
    """Workers that were lost, by the status with which they ended, and whose work the others do."""
    joining: set[int] = field(default_factory=set)
    """Those of them that were started again, and are not ready."""
    leaving: set[int] = field(default_factory=set)
    """Those of them that are being ended, because others of their replica were lost."""
    begun: int | None = None  # the step from which it went on first, once it is known
    saved: int = 0  # highest step of a checkpoint in it
    steps: int = 0  # steps done in it
    orphaned: str = ""  # what happened to the nursery that forked its workers, if it is gone
    killed: bool = False  # all of its workers
    due: float | None = None  # when the end of its workers must have been reported
    lost: dict[Node, str] = field(default_factory=dict)  # nodes that went away, and how
    step_seconds: float | None = None  # of the last step
    hung: Hang | None = None
    compared: float = 0.0  # when workers were last compared, by their signs at that time
    paces: Mapping[int, Beat] = field(default_factory=dict)
    slow: set[int] = field(default_factory=set)  # stragglers that were named
    storeless: bool = False  # the process through which they find each other died before they had met
    ending: str | None = None  # why its workers were killed
    error: WorkerError | None = None
    crashes: dict[int, str] = field(default_factory=dict)
    """By rank, the exception that ended a worker: type, message and the user's line."""
    result: dict[str, Any] | None = None

    @property
    def members(self) -> set[int]:
        """Ranks that train together."""
        return set(range(self.world)) - self.away.keys()

    @property
    def remaining(self) -> set[int]:
        """Workers whose end was not reported."""
        return self.members - self.codes.keys()

    def overdue(self, now: float, ending: bool) -> bool:
        """Whether the end of workers that were killed, or are `ending`, should have been reported by `now`."""
        if not (self.killed or ending):
            self.due = None
        elif self.due is None:
            self.due = now + OVERDUE
        return self.due is not None and now >= self.due

    @property
    def early(self) -> set[int]:
        """Workers whose status looks like a proper end that they never came to: something in them ended the process."""
        return {rank for rank, code in self.codes.items() if code in IN_ORDER and self.left.get(rank) != code}

    @property
    def over(self) -> bool:
        """Whether no worker is left."""
        return self.codes.keys() >= self.members and not self.joining and not self.leaving

    def signs(self) -> tuple[dict[int, Beat | None], Callable[[], set[int]]]:
        """The last signs of the workers that are still there, and what finds those that somebody holds still."""
        by_node = {}
        for node, ranks in self.places.items():
            there = self.members & set(ranks) - self.codes.keys()
            here = {rank: beat for rank, beat in node.beats(ranks).items() if rank in there}
            by_node[node] = here
        beats = {rank: beat for found in by_node.values() for rank, beat in found.items()}
        return beats, lambda: {rank for node, found in by_node.items() for rank in node.held(found)}

    @property
    def storage(self) -> bool:
        """Whether it ended because storage failed."""
        return self.ending is None and not self.lost and first_to_fall(self.codes, self.early)[1] == STORAGE

    @property
    def broken(self) -> bool:
        """Whether it ended because a GPU failed."""
        return self.ending is None and not self.lost and first_to_fall(self.codes, self.early)[1] == GPU

    def step_of(self, rank: int) -> int | None:
        """The step of a worker's last sign, where it gave one."""
        for node, ranks in self.places.items():
            if rank in ranks and (beat := node.beats(ranks)[rank]) is not None:
                return beat.step
        return None

    def node_of(self, rank: int) -> str | None:
        """The host of a worker."""
        return next((node.name for node, ranks in self.places.items() if rank in ranks), None)


def verdict(attempt: Attempt, logs: Path, number: int) -> tuple[ExitCode | None, str | None]:
    """The exit code that an attempt means for the run, with a message if there is one; None as code means: start
    again, and why."""
    codes = attempt.codes
    if attempt.result is not None and all(code == 0 for code in codes.values()):
        return ExitCode.UNFINISHED if attempt.result.get("status") == "interrupted" else ExitCode.DONE, None
    if attempt.ending is not None:
        return None, attempt.ending
    for node, how in attempt.lost.items():
        return None, f"node {node.name} was lost: {how}"
    if attempt.error is not None:
        final = ExitCode(attempt.error.exit_code)
        if final in FINAL_CODES:
            return final, attempt.error.message
    if attempt.early - attempt.came:
        return ExitCode.USAGE, NEVER_CAME
    if not attempt.early and all(code in IN_ORDER for code in codes.values()):
        if not any(codes.values()):
            return None, "the workers ended without telling how the run ended"
        return ExitCode.UNFINISHED, None if attempt.error is None else attempt.error.message
    rank, code = first_to_fall(codes, attempt.early)
    if rank in attempt.early:
        step = attempt.step_of(rank)
        when = "" if step is None else f" in step {step}"
        why = "something in it ended the process (os._exit, say)"
        return None, f"worker {rank} left{when} with exit code {code}, before the run was done: {why}"
    log = worker_log(logs, attempt.logs.get(rank, number), rank)
    if code == STORAGE and attempt.error is not None:
        return None, f"worker {rank} {how_ended(code)}: {attempt.error.message}"
    crash = attempt.crashes.get(rank) if code > 0 else None
    return None, f"worker {rank} {how_ended(code)}{last_words(log) if crash is None else f': {crash} (log: {log})'}"


def how_ended(code: int) -> str:
    """What a worker's status tells, in words."""
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    if code == LOST_PEER:
        how = "lost the connection to another worker"
    if code == STORAGE:
        how = "ended because storage failed"
    if code == GPU:
        how = "ended because its GPU failed"
    if code == -signal.SIGBUS:
        how += " (possibly a file that is mapped into memory could not be read)"
    if code == -signal.SIGKILL:
        how += " (possibly out of memory: try a smaller batch.micro_size)"
    return how


def first_to_fall(codes: Mapping[int, int], early: Collection[int] = ()) -> tuple[int, int]:
    """Rank and status of the worker that failed first, or left first before its end (`early`); those that the agent
    killed died after it, and who only lost a peer did not fail by itself. Where none did, of the first that ended."""
    fallen = [(rank, code) for rank, code in codes.items() if code not in IN_ORDER or rank in early]
    fallen = fallen or list(codes.items())
    return next((one for one in fallen if one[1] != LOST_PEER), fallen[0])


def fault(attempt: Attempt, message: str) -> WorkerFailure:
    """An attempt's first failure."""
    if attempt.ending is not None and attempt.hung is not None:
        return WorkerFailure(rank=attempt.hung.rank, cause="hang", message=message)
    if attempt.storeless:
        return WorkerFailure(rank=0, cause="store_died", message=message)
    for node in attempt.lost:
        return WorkerFailure(rank=attempt.places[node].start, cause="node_lost", host=node.name, message=message)
    return failure_of(*first_to_fall(attempt.codes, attempt.early), message)


def failure_of(rank: int, status: int, message: str) -> WorkerFailure:
    """The failure of a worker that ended with a status."""
    if status < 0:
        return WorkerFailure(rank=rank, cause="signal", signal=signal_name(-status), message=message)
    if (cause := CAUSES.get(status)) is not None:
        return WorkerFailure(rank=rank, cause=cause, message=message)
    return WorkerFailure(rank=rank, cause="exit_code", exit_code=status, message=message)


def worker_log(logs: Path, attempt: int, rank: int) -> Path:
    """Where a worker prints to."""
    return logs / f"attempt-{attempt}-rank-{rank}.log"


def last_words(log: Path, limit: int = 300) -> str:
    """The last line that a worker printed, if any can be read, and where its log lies."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return f": {lines[-1][-limit:]} (log: {log})" if lines else ""
