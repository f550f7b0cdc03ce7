"""Draw a fault plan: the kind, target and trigger of each fault, as a pure function of a seed.

A trigger names a phase of the run and a share of the usual duration of this phase, so that a plan means the same on a
slow and on a fast machine. The plan alone must not exhaust the restarts: faults come in rounds, no longer than the
attempts without progress that `fault_tolerance.max_restarts` allows, and each round after the first waits for a newer
checkpoint.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from phalanx.errors import UsageError


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault.

    `ends_attempt`: it ends the attempt. `needs_peers`: needs more than one worker. `needs_nodes`: needs several nodes.
    `needs_queue`: needs a run in the local queue.
    """

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
    observed.

    `min_step`: not before this step is done, if given. `after_new_checkpoint`: not before a checkpoint exists that is
    newer than all at the time of the previous fault.
    """

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
    """One fault. `rank`: the worker that it hits, or a worker of the node. `randomness` in [0, 1) selects a duration,
    file or bit."""

    number: int
    kind: str
    rank: int
    trigger: FaultTrigger
    randomness: float


@dataclass(frozen=True)
class RunShape:
    """The properties of a run that a fault plan depends on.

    `checkpoint_every`: steps between checkpoints, None for one at the end only.
    """

    steps: int
    checkpoint_every: int | None
    keep: int
    max_restarts: int
    world_size: int
    num_nodes: int = 1
    uses_queue: bool = False

    @property
    def workers_per_node(self) -> int:
        """Workers of a node."""
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
    """Parse a list of kinds such as `kill,agent`; None means all possible ones.

    Raises UsageError for an unknown kind, or for one that cannot be injected into this run.
    """
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
    sizes = _draw_rounds(rng, count, set(kinds), run_shape)
    round_starts = {sum(sizes[:index]): index for index in range(len(sizes))}
    names = _draw_kinds(rng, count, kinds, set(round_starts))
    phases = _draw_phases(rng, names, set(round_starts))
    faults = []
    round_, step = 0, 1
    for index, (name, phase) in enumerate(zip(names, phases, strict=True)):
        if index in round_starts:
            round_ = round_starts[index]
            # some time is left at the end for the last to strike, and the first half of a round's share for it to come
            step = max(1, int(0.8 * run_shape.steps * (round_ + rng.random() / 2) / len(sizes)))
        after_new_checkpoint = index in round_starts and (
            round_ > 0 or name == "corrupt-checkpoint" or run_shape.max_restarts == 1
        )
        trigger = FaultTrigger(
            phase, round(rng.random(), 2), None if phase is FaultPhase.RESTART else step, after_new_checkpoint
        )
        rank = rng.randrange(run_shape.workers_per_node if FAULT_KINDS[name].needs_nodes else 0, run_shape.world_size)
        faults.append(Fault(index + 1, name, rank, trigger, rng.random()))
    return tuple(faults)


def _draw_rounds(rng: random.Random, count: int, kinds: set[str], run_shape: RunShape) -> list[int]:
    """Draw the number of faults of each round."""
    max_size = 1 if kinds == {"corrupt-checkpoint"} else run_shape.max_restarts
    first_size = max(1, max_size - 1)  # nothing has been saved by then that would count as progress
    full = [first_size] + [max_size] * -(-max(0, count - first_size) // max_size)
    if len(full) > max(1, run_shape.num_saves) or (run_shape.max_restarts == 1 and not run_shape.num_saves):
        max_faults = (
            first_size + max_size * max(0, run_shape.num_saves - 1)
            if run_shape.max_restarts > 1
            else run_shape.num_saves
        )
        raise UsageError(
            f"{count} faults are too many: in {run_shape.steps} steps the run saves {run_shape.num_saves} times before "
            f"its end, and with fault_tolerance.max_restarts={run_shape.max_restarts} it survives {max_faults} faults; "
            "increase steps, save more often (checkpoint.every), or inject fewer (--faults)"
        )
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes.append(rng.randint(1, min(3, max_size if sizes else first_size)))
    if len(sizes) > max(1, run_shape.num_saves):
        sizes = full
    sizes[-1] -= sum(sizes) - count
    if max(sizes) == 1 and max_size > 1 and len(sizes) > (1 if first_size > 1 else 2):
        sizes = [*sizes[1:-1], 2]  # a restart should be struck, too
    return sizes


def _draw_kinds(rng: random.Random, count: int, kinds: Sequence[str], round_starts: set[int]) -> list[str]:
    """Draw the kind of each fault: each kind once if `count` allows it, then by weight.

    A corrupted checkpoint comes first in its round, so that a newer checkpoint exists than the one corrupted before.
    """
    names = rng.sample(list(kinds), min(count, len(kinds)))
    names += rng.choices(list(kinds), [FAULT_KINDS[name].weight for name in kinds], k=count - len(names))
    rng.shuffle(names)
    for index, name in enumerate(names):
        if name != "corrupt-checkpoint" or index in round_starts:
            continue
        free = sorted(first for first in round_starts if names[first] != "corrupt-checkpoint")
        if free:
            other = rng.choice(free)
            names[index], names[other] = names[other], name
        else:
            names[index] = rng.choice([each for each in kinds if each != "corrupt-checkpoint"])
    return names


def _draw_phases(rng: random.Random, names: Sequence[str], round_starts: set[int]) -> list[FaultPhase]:
    """Draw the phase of the run in which each fault is injected.

    The phase "restarting" is possible only after a fault that ends an attempt. Each phase occurs at least once if there
    are enough faults.
    """
    restarts = [i for i in range(1, len(names)) if i not in round_starts and FAULT_KINDS[names[i - 1]].ends_attempt]
    phases = []
    for index in range(len(names)):
        choices = [FaultPhase.STEP, FaultPhase.SAVE] + [FaultPhase.RESTART] * 2 * (index in restarts)
        phases.append(rng.choice(choices))
    if restarts and FaultPhase.RESTART not in phases:
        phases[rng.choice(restarts)] = FaultPhase.RESTART
    others = [index for index, phase in enumerate(phases) if phase is not FaultPhase.RESTART]
    for wanted in (FaultPhase.SAVE, FaultPhase.STEP):
        if len(others) > 1 and wanted not in phases:
            phases[rng.choice(others)] = wanted
    return phases
