"""What each fault does to the run's processes and files. A fault is a generator: it waits, strikes, waits for what must
follow, and yields the seconds until it wants to go on; between two of them its caller looks after the run.

Whoever is struck must carry the run's mark in its environment: a number that another process has got since is let be.
"""

import contextlib
import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from phalanx.jobs.chaos.plan import KINDS, Fault, Moment, Phase
from phalanx.jobs.chaos.story import Story, Usual
from phalanx.run.steady import unix_now

MARK = "PHALANX_CHAOS_TAG"
"""Variable that marks every process of a run under faults."""
LOOK, CLOSELY = 0.005, 0.0005
"""Seconds between two looks, and when it is a save that is waited for: small ones are over in milliseconds."""
LONGEST_PAUSE, LONGEST_GRACE = 2.0, 1.0
"""Seconds for which a worker is held still, well below what counts as a hang, and which a time limit leaves at most."""
SMALL = 1000
"""Bytes beyond which no file may grow where the disk is full."""
ASIDE = "checkpoints.old"
"""Where checkpoints are that cannot be reached: a name of what a run must not leave behind."""
CHECKPOINT = re.compile(r"step-\d+")

Waiting = Generator[float, None, None]


@dataclass(frozen=True)
class Struck:
    """A fault that struck: when (unix seconds), in which attempt and behind which of its steps, and what the run was
    really doing."""

    fault: Fault
    t: float
    attempt: int
    step: int | None
    phase: Phase
    what: str


@dataclass
class Scene:
    """The run under faults, and what is remembered from one to the next. `supervisors` finds those of the queue."""

    story: Story
    usual: Usual
    mark: str
    told: Callable[[Struck], None]
    supervisors: Callable[[], Sequence[psutil.Process]] = tuple
    clock: Callable[[], float] = time.monotonic
    struck: int = -1
    """The attempt that was struck last."""
    since: int = 0
    """The attempt that must have begun before the next fault."""
    floor: int = 0
    """Highest step of a checkpoint when it began."""
    damaged: set[tuple[str, int]] = field(default_factory=set)
    """Checkpoints in which a bit flipped, by name and inode: one that is written anew is good again."""

    def worker(self, rank: int) -> psutil.Process:
        """A worker of the newest attempt. NoSuchProcess when it is not there (any more)."""
        if rank not in self.story.workers:
            raise psutil.NoSuchProcess(0)
        return self.marked(self.story.workers[rank])

    def nursery(self, rank: int) -> psutil.Process:
        """What forked it."""
        return self.marked(self.worker(rank).ppid())

    def agent(self, rank: int) -> psutil.Process:
        """Its node's agent."""
        return self.marked(self.nursery(rank).ppid())

    def agents(self) -> set[psutil.Process]:
        """Those of all nodes, as far as they are there."""
        found: set[psutil.Process] = set()
        for rank in self.story.workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.add(self.agent(rank))
        return found

    def runner(self) -> psutil.Process:
        """What the queue has put above the job."""
        return self.marked(self.agent(0).ppid())

    def marked(self, pid: int) -> psutil.Process:
        """The process of the run with this number."""
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE or process.environ().get(MARK) != self.mark:
            raise psutil.NoSuchProcess(pid)
        return process

    def rest(self, seconds: float) -> Waiting:
        """So many seconds."""
        until = self.clock() + seconds
        while (left := until - self.clock()) > 0:
            yield min(LOOK, left)


def play(faults: Sequence[Fault], scene: Scene) -> Waiting:
    """All faults, one after the other."""
    for fault in faults:
        yield from wait(fault.moment, scene)
        while True:
            try:
                yield from strike(fault, scene)
                break
            except (psutil.NoSuchProcess, psutil.AccessDenied):  # it is just ending: there will be another
                yield LOOK
        if KINDS[fault.kind].ends:
            scene.since = scene.struck + 1
        while scene.story.attempt < scene.since:
            yield LOOK
        scene.floor = scene.story.saved


def wait(moment: Moment, scene: Scene) -> Waiting:
    """Until it has come."""
    story, usual = scene.story, scene.usual
    if moment.phase is Phase.RESTART:
        while story.attempt < scene.since or not story.workers:
            yield LOOK
        yield from scene.rest(moment.share * usual.restart)
        return
    while (
        story.attempt < scene.since
        or story.step is None
        or story.step < (moment.step or 0)
        or (moment.fresh and story.saved <= scene.floor)
    ):
        yield LOOK
    if moment.phase is Phase.SAVE:
        while not (story.started and story.saving):
            yield CLOSELY
        yield from scene.rest(moment.share * usual.save)
    else:
        yield from scene.rest(moment.share * usual.step)


def strike(fault: Fault, scene: Scene) -> Waiting:
    """Do it, and whatever belongs to it later. NoSuchProcess, and nothing is done, when the victim is not there."""
    kind, rank = fault.kind, fault.rank
    if kind in SIGNALS:
        victim, number = scene.worker(rank), SIGNALS[kind]
        victim.send_signal(number)
        tell(fault, scene, f"{number.name} to worker {rank}")
    elif kind == "fork-server":
        scene.nursery(rank).kill()
        tell(fault, scene, f"SIGKILL to the fork server of worker {rank}")
    elif kind == "agent":
        scene.agent(0).kill()
        tell(fault, scene, "SIGKILL to the leader agent")
    elif kind == "job-runner":
        scene.runner().kill()
        tell(fault, scene, "SIGKILL to the process above the job")
    elif kind == "preempt":
        scene.agent(0).terminate()
        tell(fault, scene, "SIGTERM to the leader agent")
    elif kind == "interrupt":
        scene.agent(0).send_signal(signal.SIGINT)
        tell(fault, scene, "SIGINT to the leader agent")
    else:
        yield from LONGER[kind](fault, scene)


def tell(fault: Fault, scene: Scene, what: str, phase: Phase | None = None) -> None:
    """Say that a fault has just struck, and what the run was doing: `phase`, or what it is doing still."""
    story = scene.story
    scene.struck = story.attempt
    scene.told(Struck(fault, unix_now(), story.attempt, story.step, phase or doing(story), what))


def doing(story: Story) -> Phase:
    """What the run is doing."""
    return Phase.RESTART if not story.started else Phase.SAVE if story.saving else Phase.STEP


def limit(fault: Fault, scene: Scene) -> Waiting:
    """What an engine does when a job's time is up, with little patience."""
    agent, grace = scene.agent(0), LONGEST_GRACE * fault.luck
    agent.terminate()
    tell(fault, scene, f"SIGTERM to the leader agent, SIGKILL {grace:.2f} s later")
    yield from scene.rest(grace)
    with contextlib.suppress(psutil.NoSuchProcess):  # it was in time
        agent.kill()


def pause(fault: Fault, scene: Scene) -> Waiting:
    """A worker that is held still for a while."""
    worker, seconds = scene.worker(fault.rank), LONGEST_PAUSE * fault.luck
    worker.suspend()
    try:
        tell(fault, scene, f"SIGSTOP to worker {fault.rank} for {seconds:.2f} s")
        yield from scene.rest(seconds)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.resume()


def full(fault: Fault, scene: Scene) -> Waiting:
    """No file of a worker may grow, as on a full disk, until a save has failed of it or the attempt is over."""
    worker, story = scene.worker(fault.rank), scene.story
    before, failed, attempt = worker.rlimit(psutil.RLIMIT_FSIZE), story.failed, story.attempt
    worker.rlimit(psutil.RLIMIT_FSIZE, (SMALL, before[1]))
    try:
        tell(fault, scene, f"no room for files of worker {fault.rank}")
        while story.failed == failed and story.attempt == attempt:
            yield LOOK
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.rlimit(psutil.RLIMIT_FSIZE, before)


def storage(fault: Fault, scene: Scene) -> Waiting:
    """In the place of the checkpoints there is a link to itself, which nobody can follow (ELOOP, what autofs says of a
    lost mount), until a save has failed of it, or the attempt, or all agents are gone: one that starts then would not
    get as far as an attempt."""
    story, folder = scene.story, scene.story.run.checkpoints
    aside, seen = folder.with_name(ASIDE), (story.failed, story.faults, story.attempt)
    agents = scene.agents()
    phase = doing(story)

    def take_away() -> None:
        os.rename(folder, aside)
        folder.symlink_to(folder.name)

    def bring_back() -> None:
        folder.unlink()
        os.rename(aside, folder)

    yield from while_held(scene, take_away)
    try:
        tell(fault, scene, f"{folder.name} cannot be reached", phase)
        while (story.failed, story.faults, story.attempt) == seen and not (agents and all(map(gone, agents))):
            yield LOOK
        yield from while_held(scene, bring_back)
    finally:
        if aside.exists():  # the run is ended meanwhile
            bring_back()


def while_held(scene: Scene, act: Callable[[], None]) -> Waiting:
    """Do something between two moments of the run: all its agents, and all below them, are held still for it."""
    held = [process for agent in scene.agents() for process in (agent, *agent.children(recursive=True))]
    try:
        for process in held:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        while any(runs(process) for process in held):
            yield CLOSELY
        act()
    finally:
        for process in held:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def gone(process: psutil.Process) -> bool:
    """Whether a process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def runs(process: psutil.Process) -> bool:
    """Whether a process that was told to stop has not yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    return False


def damage(fault: Fault, scene: Scene) -> Waiting:
    """A bit of the newest checkpoint flips, and a worker is killed. All are held still for it, and stay so until their
    agent ends them: none can make a newer checkpoint."""
    while len(good := healthy(scene)) < 2 or newest(scene) != good[0]:
        yield LOOK
    workers = [scene.worker(rank) for rank in scene.story.workers]
    victim = scene.worker(fault.rank)
    try:
        for worker in workers:
            worker.suspend()
        file = flip(newest(scene), random.Random(fault.luck))
        victim.kill()
    except BaseException:
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.resume()
        raise
    scene.damaged.add(identity(file.parent))
    tell(fault, scene, f"a bit of {file.parent.name}/{file.name} flipped, SIGKILL to worker {fault.rank}")


def node(fault: Fault, scene: Scene) -> Waiting:
    """All processes of a node at once, its agent first, so that it can tell nobody."""
    agent = scene.agent(fault.rank)
    for process in (agent, *agent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    tell(fault, scene, f"SIGKILL to all of the node of worker {fault.rank}")
    yield LOOK


def split(fault: Fault, scene: Scene) -> Waiting:
    """A node that is held still altogether says nothing to anybody, as behind a network that drops everything, until
    it is given up; then it comes back."""
    agent, faults = scene.agent(fault.rank), scene.story.faults
    cut = [agent, *agent.children(recursive=True)]
    try:
        for process in cut:
            process.suspend()
        tell(fault, scene, f"the node of worker {fault.rank} is cut off")
        while scene.story.faults == faults:
            yield LOOK
    finally:
        for process in cut:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def supervisor(fault: Fault, scene: Scene) -> Waiting:
    """Nobody looks after the queue until another supervisor comes."""
    found = scene.supervisors()
    if not found:
        raise psutil.NoSuchProcess(0)
    for process in found:
        process.kill()
    tell(fault, scene, "SIGKILL to the queue's supervisor")
    yield LOOK


SIGNALS = {"kill": signal.SIGKILL, "crash": signal.SIGSEGV, "abort": signal.SIGABRT, "hang": signal.SIGSTOP}
LONGER: dict[str, Callable[[Fault, Scene], Waiting]] = {
    "time-limit": limit,
    "freeze": pause,
    "disk-full": full,
    "storage-outage": storage,
    "corrupt-checkpoint": damage,
    "node-loss": node,
    "partition": split,
    "queue-daemon": supervisor,
}


def checkpoints(scene: Scene) -> list[Path]:
    """Those that stand, the newest first."""
    folder = scene.story.run.checkpoints
    return sorted((path for path in folder.iterdir() if CHECKPOINT.fullmatch(path.name)), reverse=True)


def newest(scene: Scene) -> Path | None:
    """The newest checkpoint."""
    return next(iter(checkpoints(scene)), None)


def healthy(scene: Scene) -> list[Path]:
    """Checkpoints in which no bit has flipped."""
    found = []
    for path in checkpoints(scene):
        with contextlib.suppress(FileNotFoundError):  # an old one that was just removed
            if identity(path) not in scene.damaged:
                found.append(path)
    return found


def identity(checkpoint: Path) -> tuple[str, int]:
    """A checkpoint, and not another one that got its name later."""
    return checkpoint.name, checkpoint.stat().st_ino


def flip(checkpoint: Path | None, rng: random.Random) -> Path:
    """Flip a bit somewhere in a checkpoint; returns the file."""
    assert checkpoint is not None
    file = rng.choice(sorted(checkpoint.iterdir()))
    at = rng.randrange(file.stat().st_size)
    fd = os.open(file, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, at)[0]
        os.pwrite(fd, bytes([byte ^ (1 << rng.randrange(8))]), at)
        os.fsync(fd)
    finally:
        os.close(fd)
    return file


def no_core(pid: int) -> None:
    """Have a process, and all that it starts, leave no core file behind when it crashes."""
    resource.prlimit(pid, resource.RLIMIT_CORE, (0, resource.prlimit(pid, resource.RLIMIT_CORE)[1]))
