"""Which fault strikes whom, and when: a pure function of a seed. Nothing here looks at a clock or a process.

A moment is told in what the run does, and in shares of what it usually takes for it, so that one list means the same on
a slow machine and on a fast one. The run must not give up because of the list itself: faults come in rounds, none
longer than the attempts in a row that `fault_tolerance.max_restarts` allows without progress, and each round but the
first waits for a checkpoint that is newer than all before it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from phalanx.errors import UsageError


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `ends`: the attempt that it strikes ends of it. `shared`: needs workers besides the one that is
    struck; `nodes`: needs several nodes; `queue`: needs a run in the queue."""

    what: str
    ends: bool = True
    shared: bool = False
    nodes: bool = False
    queue: bool = False
    weight: int = 1
    """How often it comes, beside the others."""
    asked: bool = False
    """Whether it comes only where it is asked for: it takes long, or another one is much like it."""


KINDS = {
    "kill": Kind("a worker is killed (SIGKILL)", weight=4),
    "crash": Kind("a worker crashes (SIGSEGV)"),
    "abort": Kind("a worker aborts (SIGABRT)"),
    "fork-server": Kind("the fork server of a node is killed"),
    "agent": Kind("the leader agent is killed, with all processes below it"),
    "preempt": Kind("the run is asked to stop (SIGTERM), and started again"),
    "interrupt": Kind("Ctrl-C in the run (SIGINT), and it is started again", asked=True),
    "time-limit": Kind("a time limit: SIGTERM, and SIGKILL up to a second later"),
    "corrupt-checkpoint": Kind("a bit of the newest checkpoint flips, and a worker is killed"),
    "disk-full": Kind("a worker can write no file until a save has failed of it", ends=False),
    "storage-outage": Kind("checkpoints cannot be reached until a save or an attempt has failed of it", ends=False),
    "freeze": Kind("a worker is stopped for up to 2 s (SIGSTOP, SIGCONT)", ends=False),
    "hang": Kind("a worker is stopped for good (SIGSTOP)", shared=True),
    "node-loss": Kind("a node that does not lead dies with all its processes", nodes=True),
    "partition": Kind("a node is cut off until it is given up, and comes back", nodes=True, asked=True),
    "job-runner": Kind("the process above the job is killed, and everything with it", queue=True),
    "queue-daemon": Kind("the queue's daemon is killed", ends=False, queue=True),
}


class Phase(StrEnum):
    """What a run is doing when a fault strikes."""

    STEP = "step"
    SAVE = "save"
    RESTART = "restart"


@dataclass(frozen=True)
class Moment:
    """When a fault strikes: `share` of what a step, a save or a restart usually takes, after one was seen to begin.
    `step`: not before this one was done, where there is one. `fresh`: not before there is a checkpoint that is newer
    than all that were there when the fault before struck."""

    phase: Phase
    share: float
    step: int | None = None
    fresh: bool = False

    def __str__(self) -> str:
        share = f"{100 * self.share:.0f}%"
        if self.phase is Phase.RESTART:
            return f"{share} into the restart"
        behind = "" if self.step is None else f" after step {self.step}"
        new = " and a new checkpoint" if self.fresh else ""
        where = "of a step" if self.phase is Phase.STEP else "into a save"
        return f"{share} {where}{behind}{new}"


@dataclass(frozen=True)
class Fault:
    """One fault. `rank`: the worker that it strikes, or whose node. `luck` in [0, 1): how long, which file, which
    bit."""

    number: int
    kind: str
    rank: int
    moment: Moment
    luck: float


@dataclass(frozen=True)
class Course:
    """What a run will be, as far as a list of faults depends on it. `every`: steps from one save to the next, None for
    one at the end only; `each`: workers of a node."""

    steps: int
    every: int | None
    keep: int
    attempts: int
    world: int
    nodes: int = 1
    queue: bool = False

    @property
    def each(self) -> int:
        """Workers of a node."""
        return self.world // self.nodes

    @property
    def saves(self) -> int:
        """Saves on the way."""
        return 0 if self.every is None else (self.steps - 1) // self.every


def possible(course: Course) -> tuple[str, ...]:
    """The kinds that can strike such a run, but for those that must be asked for."""
    return tuple(name for name, kind in KINDS.items() if not kind.asked and _obstacle(name, course) is None)


def kinds_of(text: str | None, course: Course) -> tuple[str, ...]:
    """The kinds that a list such as `kill,agent` names; all that are possible without one. UsageError for one that
    does not exist, or that cannot strike this run."""
    if text is None:
        return possible(course)
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in KINDS:
            raise UsageError(f"--kinds {text}: there is no kind {name!r}; there are {', '.join(KINDS)}")
        if (obstacle := _obstacle(name, course)) is not None:
            raise UsageError(f"--kinds {text}: {name} {obstacle}")
    return names


def _obstacle(name: str, course: Course) -> str | None:
    """Why a kind cannot strike this run."""
    kind = KINDS[name]
    if kind.shared and course.world < 2:
        return "needs another worker, to distinguish a hang from a slow machine: --nproc-per-node 2"
    if kind.nodes and course.nodes < 2:
        return "needs several nodes: --nodes 2"
    if kind.queue and not course.queue:
        return "needs a run in the queue: --queue"
    if name == "corrupt-checkpoint" and course.keep < 2:
        return "needs an older checkpoint: checkpoint.keep=2"
    if name == "corrupt-checkpoint" and course.saves < 2:
        return f"needs two checkpoints, and in {course.steps} steps the run saves {course.saves} times on its way"
    return None


def draw(seed: int, count: int, kinds: Sequence[str], course: Course) -> tuple[Fault, ...]:
    """The list of faults. UsageError when the run saves too seldom to go on after so many."""
    rng = random.Random(seed)
    sizes = _rounds(rng, count, set(kinds), course)
    firsts = {sum(sizes[:index]): index for index in range(len(sizes))}
    names = _names(rng, count, kinds, set(firsts))
    phases = _phases(rng, names, set(firsts))
    faults = []
    round_, step = 0, 1
    for index, (name, phase) in enumerate(zip(names, phases, strict=True)):
        if index in firsts:
            round_ = firsts[index]
            # some time is left at the end for the last to strike, and the first half of a round's share for it to come
            step = max(1, int(0.8 * course.steps * (round_ + rng.random() / 2) / len(sizes)))
        fresh = index in firsts and (round_ > 0 or name == "corrupt-checkpoint" or course.attempts == 1)
        moment = Moment(phase, round(rng.random(), 2), None if phase is Phase.RESTART else step, fresh)
        rank = rng.randrange(course.each if KINDS[name].nodes else 0, course.world)
        faults.append(Fault(index + 1, name, rank, moment, rng.random()))
    return tuple(faults)


def _rounds(rng: random.Random, count: int, kinds: set[str], course: Course) -> list[int]:
    """How many faults strike between two new checkpoints, round by round."""
    most = 1 if kinds == {"corrupt-checkpoint"} else course.attempts
    first = max(1, most - 1)  # nothing has been saved by then that would count as progress
    full = [first] + [most] * -(-max(0, count - first) // most)
    if len(full) > max(1, course.saves) or (course.attempts == 1 and not course.saves):
        fits = first + most * max(0, course.saves - 1) if course.attempts > 1 else course.saves
        raise UsageError(
            f"{count} faults are too many: in {course.steps} steps the run saves {course.saves} times on its way, and "
            f"fault_tolerance.max_restarts={course.attempts} lets it go on after {fits} faults; give it more steps, "
            "save more often (checkpoint.every) or ask for fewer (--faults)"
        )
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes.append(rng.randint(1, min(3, most if sizes else first)))
    if len(sizes) > max(1, course.saves):
        sizes = full
    sizes[-1] -= sum(sizes) - count
    if max(sizes) == 1 and most > 1 and len(sizes) > (1 if first > 1 else 2):
        sizes = [*sizes[1:-1], 2]  # a restart should be struck, too
    return sizes


def _names(rng: random.Random, count: int, kinds: Sequence[str], firsts: set[int]) -> list[str]:
    """The kind of each fault: each kind once if there is room, then by weight. Damage comes first in its round: there
    must be a checkpoint newer than what was damaged before."""
    names = rng.sample(list(kinds), min(count, len(kinds)))
    names += rng.choices(list(kinds), [KINDS[name].weight for name in kinds], k=count - len(names))
    rng.shuffle(names)
    for index, name in enumerate(names):
        if name != "corrupt-checkpoint" or index in firsts:
            continue
        free = sorted(first for first in firsts if names[first] != "corrupt-checkpoint")
        if free:
            other = rng.choice(free)
            names[index], names[other] = names[other], name
        else:
            names[index] = rng.choice([each for each in kinds if each != "corrupt-checkpoint"])
    return names


def _phases(rng: random.Random, names: Sequence[str], firsts: set[int]) -> list[Phase]:
    """What the run is doing when each strikes. A restart is only there after a fault that ends an attempt. One of each
    phase is among them where there is room."""
    restarts = [i for i in range(1, len(names)) if i not in firsts and KINDS[names[i - 1]].ends]
    phases = []
    for index in range(len(names)):
        choices = [Phase.STEP, Phase.SAVE] + [Phase.RESTART] * 2 * (index in restarts)
        phases.append(rng.choice(choices))
    if restarts and Phase.RESTART not in phases:
        phases[rng.choice(restarts)] = Phase.RESTART
    others = [index for index, phase in enumerate(phases) if phase is not Phase.RESTART]
    for wanted in (Phase.SAVE, Phase.STEP):
        if len(others) > 1 and wanted not in phases:
            phases[rng.choice(others)] = wanted
    return phases
