"""Draw a fault plan: the kind, target and trigger of each fault, as a pure function of a seed.

A trigger names a phase of the run and a share of the usual duration of this phase, so that a plan means the same on a
slow and on a fast machine. The plan alone must not exhaust the restarts: faults come in rounds of one, or of two, of
which the second strikes the restart, and each round after the first waits for a newer checkpoint.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from phalanx.errors import UsageError


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault. `ends_attempt`: it ends the attempt. `needs_peers`: needs more than one worker. `needs_nodes`:
    needs several nodes. `needs_queue`: needs a run in the local queue."""

    description: str
    ends_attempt: bool = True
    needs_peers: bool = False
    needs_nodes: bool = False
    needs_queue: bool = False
    weight: int = 1
    """Relative frequency."""
    is_opt_in: bool = False
    """Whether it must be requested: it takes long, or is similar to another kind."""


FAULT_KINDS = {
    "kill": FaultKind("a worker is killed (SIGKILL)", weight=4),
    "crash": FaultKind("a worker crashes (SIGSEGV)"),
    "abort": FaultKind("a worker aborts (SIGABRT)"),
    "fork-server": FaultKind("the fork server of a node is killed"),
    "agent": FaultKind("the leader agent is killed, with all processes below it"),
    "preempt": FaultKind("the run is asked to stop (SIGTERM), and started again"),
    "interrupt": FaultKind("Ctrl-C in the run (SIGINT), and it is started again", is_opt_in=True),
    "time-limit": FaultKind("a time limit: SIGTERM, and SIGKILL up to a second later"),
    "corrupt-checkpoint": FaultKind("a bit of the newest checkpoint flips, and a worker is killed"),
    "disk-full": FaultKind("a worker can write no file until a save has failed of it", ends_attempt=False),
    "storage-outage": FaultKind(
        "checkpoints cannot be reached until a save or an attempt has failed of it", ends_attempt=False
    ),
    "freeze": FaultKind("a worker is stopped for up to 2 s (SIGSTOP, SIGCONT)", ends_attempt=False),
    "hang": FaultKind("a worker is stopped for good (SIGSTOP)", needs_peers=True),
    "node-loss": FaultKind("a node that does not lead dies with all its processes", needs_nodes=True),
    "partition": FaultKind("a node is cut off until it is given up, and comes back", needs_nodes=True, is_opt_in=True),
    "job-runner": FaultKind("the process above the job is killed, and everything with it", needs_queue=True),
    "queue-daemon": FaultKind("the queue's daemon is killed", ends_attempt=False, needs_queue=True),
}


class FaultPhase(StrEnum):
    """Phase of a run in which a fault is injected."""

    STEP = "step"
    SAVE = "save"
    RESTART = "restart"


@dataclass(frozen=True)
class FaultTrigger:
    """When a fault is injected: `fraction` of the usual duration of a step, save or restart, after its start was
    observed. `min_step`: not before this step is done, if given. `after_new_checkpoint`: not before a checkpoint exists
    that is newer than all at the time of the previous fault."""

    phase: FaultPhase
    fraction: float
    min_step: int | None = None
    after_new_checkpoint: bool = False

    def __str__(self) -> str:
        percent = f"{100 * self.fraction:.0f}%"
        if self.phase is FaultPhase.RESTART:
            return f"{percent} into the restart"
        step_text = "" if self.min_step is None else f" after step {self.min_step}"
        checkpoint_text = " and a new checkpoint" if self.after_new_checkpoint else ""
        phase_text = "of a step" if self.phase is FaultPhase.STEP else "into a save"
        return f"{percent} {phase_text}{step_text}{checkpoint_text}"


@dataclass(frozen=True)
class Fault:
    """One fault. `rank`: its worker, or one of its node. `randomness` in [0, 1) selects a duration, file or bit."""

    number: int
    kind: str
    rank: int
    trigger: FaultTrigger
    randomness: float


@dataclass(frozen=True)
class RunShape:
    """What a fault plan depends on. `checkpoint_every`: steps between checkpoints, None for one at the end only."""

    steps: int
    checkpoint_every: int | None
    keep: int
    max_restarts: int
    world_size: int
    num_nodes: int = 1
    uses_queue: bool = False

    @property
    def workers_per_node(self) -> int:
        return self.world_size // self.num_nodes

    @property
    def num_saves(self) -> int:
        """Number of saves before the last step."""
        return 0 if self.checkpoint_every is None else (self.steps - 1) // self.checkpoint_every


def list_possible_kinds(run_shape: RunShape) -> tuple[str, ...]:
    """Return the kinds that can be injected into such a run, except opt-in ones."""
    return tuple(
        name for name, kind in FAULT_KINDS.items() if not kind.is_opt_in and _why_impossible(name, run_shape) is None
    )


def parse_kinds(text: str | None, run_shape: RunShape) -> tuple[str, ...]:
    """Parse a list of kinds such as `kill,agent`; None means all possible ones. Raises UsageError for an unknown kind,
    or for one that cannot be injected into this run."""
    if text is None:
        return list_possible_kinds(run_shape)
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in FAULT_KINDS:
            raise UsageError(f"--kinds {text}: there is no kind {name!r}; there are {', '.join(FAULT_KINDS)}")
        if (obstacle := _why_impossible(name, run_shape)) is not None:
            raise UsageError(f"--kinds {text}: {name} {obstacle}")
    return names


def _why_impossible(name: str, run_shape: RunShape) -> str | None:
    """Return why a kind cannot be injected into this run, or None if it can."""
    kind = FAULT_KINDS[name]
    if kind.needs_peers and run_shape.world_size < 2:
        return "needs another worker, to distinguish a hang from a slow machine: --nproc-per-node 2"
    if kind.needs_nodes and run_shape.num_nodes < 2:
        return "needs several nodes: --nodes 2"
    if kind.needs_queue and not run_shape.uses_queue:
        return "needs a run in the queue: --queue"
    if name == "corrupt-checkpoint" and run_shape.keep < 2:
        return "needs an older checkpoint: checkpoint.keep=2"
    if name == "corrupt-checkpoint" and run_shape.num_saves < 2:
        return (
            f"needs two checkpoints, and in {run_shape.steps} steps the run saves {run_shape.num_saves} times on its "
            "way"
        )
    return None


def draw_faults(seed: int, count: int, kinds: Sequence[str], run_shape: RunShape) -> tuple[Fault, ...]:
    """Draw `count` faults. Raises UsageError when the run saves too rarely to survive them."""
    rng = random.Random(seed)
    names = _draw_kinds(rng, count, kinds)
    phases = _draw_phases(rng, names, run_shape.max_restarts)
    num_rounds = sum(phase is not FaultPhase.RESTART for phase in phases)
    needs_save_first = names[0] == "corrupt-checkpoint" or run_shape.max_restarts == 1
    if num_rounds > (run_shape.num_saves if needs_save_first else max(1, run_shape.num_saves)):
        raise UsageError(
            f"{count} faults are too many: with fault_tolerance.max_restarts={run_shape.max_restarts} they need "
            f"{num_rounds} checkpoints; in {run_shape.steps} steps the run saves {run_shape.num_saves} times before "
            "its end; increase steps, save more often (checkpoint.every), or inject fewer (--faults)"
        )
    faults: list[Fault] = []
    round_number = -1
    for name, phase in zip(names, phases, strict=True):
        trigger = FaultTrigger(phase, round(rng.random(), 2))
        if phase is not FaultPhase.RESTART:
            round_number += 1
            # some time is left at the end for the last to strike, and the second half of a round's share for it to come
            step = max(1, int(0.8 * run_shape.steps * (round_number + rng.random() / 2) / num_rounds))
            trigger = replace(trigger, min_step=step, after_new_checkpoint=round_number > 0 or needs_save_first)
        rank = rng.randrange(run_shape.workers_per_node if FAULT_KINDS[name].needs_nodes else 0, run_shape.world_size)
        faults.append(Fault(len(faults) + 1, name, rank, trigger, rng.random()))
    return tuple(faults)


def _draw_kinds(rng: random.Random, count: int, kinds: Sequence[str]) -> list[str]:
    """Draw the kind of each fault: each kind once if `count` allows it, then by weight."""
    names = rng.sample(list(kinds), min(count, len(kinds)))
    names += rng.choices(list(kinds), [FAULT_KINDS[name].weight for name in kinds], k=count - len(names))
    rng.shuffle(names)
    return names


def _draw_phases(rng: random.Random, names: Sequence[str], max_restarts: int) -> list[FaultPhase]:
    """Draw the phase in which each fault is injected: steps and saves in turn, and restarts after faults that end an
    attempt, the first one always.

    Two attempts in a row save nothing then, and one more before the first checkpoint: `max_restarts` must allow it. A
    corrupted checkpoint must be newer than the one corrupted before, so it never strikes a restart.
    """
    phases: list[FaultPhase] = []
    turns = itertools.cycle(rng.sample([FaultPhase.STEP, FaultPhase.SAVE], 2))
    for index, name in enumerate(names):
        can_strike_restart = (
            index > 0
            and phases[-1] is not FaultPhase.RESTART
            and FAULT_KINDS[names[index - 1]].ends_attempt
            and name != "corrupt-checkpoint"
            and max_restarts > (2 if index == 1 else 1)
        )
        strikes_restart = can_strike_restart and (FaultPhase.RESTART not in phases or rng.random() < 0.5)
        phases.append(FaultPhase.RESTART if strikes_restart else next(turns))
    return phases
