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

from phalanx.jobs.chaos.fault_plan import FAULT_KINDS, Fault, FaultPhase, FaultTrigger
from phalanx.jobs.chaos.run_monitor import RunMonitor, TypicalDurations
from phalanx.run.boot_clock import unix_now

CHAOS_TAG_VARIABLE = "PHALANX_CHAOS_TAG"
"""Variable that marks every process of a run under faults."""
POLL_INTERVAL_S, FINE_POLL_INTERVAL_S = 0.005, 0.0005
"""Seconds between two looks, and when it is a save that is waited for: small ones are over in milliseconds."""
MAX_PAUSE_S, MAX_GRACE_S = 2.0, 1.0
"""Seconds for which a worker is held still, well below what counts as a hang, and which a time limit leaves at most."""
DISK_FULL_MAX_FILE_BYTES = 1000
"""Bytes beyond which no file may grow where the disk is full."""
HIDDEN_CHECKPOINTS_DIR = "checkpoints.old"
"""Where checkpoints are that cannot be reached: a name of what a run must not leave behind."""
CHECKPOINT_NAME_PATTERN = re.compile(r"step-\d+")

FaultSteps = Generator[float, None, None]


@dataclass(frozen=True)
class InjectedFault:
    """A fault that struck: when (unix seconds), in which attempt and behind which of its steps, and what the run was
    really doing."""

    fault: Fault
    t: float
    attempt: int
    step: int | None
    phase: FaultPhase
    description: str


@dataclass
class FaultContext:
    """The run under faults, and what is remembered from one to the next. `find_daemons` finds those of the queue."""

    monitor: RunMonitor
    typical: TypicalDurations
    tag: str
    on_injected: Callable[[InjectedFault], None]
    find_daemons: Callable[[], Sequence[psutil.Process]] = tuple
    clock: Callable[[], float] = time.monotonic
    last_attempt: int = -1
    """The attempt that was struck last."""
    min_attempt: int = 0
    """The attempt that must have begun before the next fault."""
    saved_step: int = 0
    """Highest step of a checkpoint when it began."""
    damaged_checkpoints: set[tuple[str, int]] = field(default_factory=set)
    """Checkpoints in which a bit flipped, by name and inode: one that is written anew is good again."""

    def find_worker(self, rank: int) -> psutil.Process:
        """A worker of the newest attempt. NoSuchProcess when it is not there (any more)."""
        if rank not in self.monitor.worker_pids:
            raise psutil.NoSuchProcess(0)
        return self.find_process(self.monitor.worker_pids[rank])

    def find_fork_server(self, rank: int) -> psutil.Process:
        """What forked it."""
        return self.find_process(self.find_worker(rank).ppid())

    def find_agent(self, rank: int) -> psutil.Process:
        """Its node's agent."""
        return self.find_process(self.find_fork_server(rank).ppid())

    def agents(self) -> set[psutil.Process]:
        """Those of all nodes, as far as they are there."""
        found: set[psutil.Process] = set()
        for rank in self.monitor.worker_pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.add(self.find_agent(rank))
        return found

    def find_job_runner(self) -> psutil.Process:
        """What the queue has put above the job."""
        return self.find_process(self.find_agent(0).ppid())

    def find_process(self, pid: int) -> psutil.Process:
        """The process of the run with this number."""
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE or process.environ().get(CHAOS_TAG_VARIABLE) != self.tag:
            raise psutil.NoSuchProcess(pid)
        return process

    def wait(self, seconds: float) -> FaultSteps:
        """So many seconds."""
        deadline = self.clock() + seconds
        while (remaining_s := deadline - self.clock()) > 0:
            yield min(POLL_INTERVAL_S, remaining_s)


def inject_faults(faults: Sequence[Fault], context: FaultContext) -> FaultSteps:
    """All faults, one after the other."""
    for fault in faults:
        yield from wait_for_trigger(fault.trigger, context)
        while True:
            try:
                yield from inject(fault, context)
                break
            except (psutil.NoSuchProcess, psutil.AccessDenied):  # it is just ending: there will be another
                yield POLL_INTERVAL_S
        if FAULT_KINDS[fault.kind].ends_attempt:
            context.min_attempt = context.last_attempt + 1
        while context.monitor.attempt < context.min_attempt:
            yield POLL_INTERVAL_S
        context.saved_step = context.monitor.saved_step


def wait_for_trigger(trigger: FaultTrigger, context: FaultContext) -> FaultSteps:
    """Until it has come."""
    monitor, typical = context.monitor, context.typical
    if trigger.phase is FaultPhase.RESTART:
        while monitor.attempt < context.min_attempt or not monitor.worker_pids:
            yield POLL_INTERVAL_S
        yield from context.wait(trigger.fraction * typical.restart_s)
        return
    while (
        monitor.attempt < context.min_attempt
        or monitor.last_step is None
        or monitor.last_step < (trigger.min_step or 0)
        or (trigger.after_new_checkpoint and monitor.saved_step <= context.saved_step)
    ):
        yield POLL_INTERVAL_S
    if trigger.phase is FaultPhase.SAVE:
        while not (monitor.is_training and monitor.is_saving):
            yield FINE_POLL_INTERVAL_S
        yield from context.wait(trigger.fraction * typical.save_s)
    else:
        yield from context.wait(trigger.fraction * typical.step_s)


def inject(fault: Fault, context: FaultContext) -> FaultSteps:
    """Do it, and whatever belongs to it later. NoSuchProcess, and nothing is done, when the victim is not there."""
    kind, rank = fault.kind, fault.rank
    if kind in SIGNAL_BY_KIND:
        victim, number = context.find_worker(rank), SIGNAL_BY_KIND[kind]
        victim.send_signal(number)
        record_injection(fault, context, f"{number.name} to worker {rank}")
    elif kind == "fork-server":
        context.find_fork_server(rank).kill()
        record_injection(fault, context, f"SIGKILL to the fork server of worker {rank}")
    elif kind == "agent":
        context.find_agent(0).kill()
        record_injection(fault, context, "SIGKILL to the leader agent")
    elif kind == "job-runner":
        context.find_job_runner().kill()
        record_injection(fault, context, "SIGKILL to the process above the job")
    elif kind == "preempt":
        context.find_agent(0).terminate()
        record_injection(fault, context, "SIGTERM to the leader agent")
    elif kind == "interrupt":
        context.find_agent(0).send_signal(signal.SIGINT)
        record_injection(fault, context, "SIGINT to the leader agent")
    else:
        yield from INJECTOR_BY_FAULT[kind](fault, context)


def record_injection(fault: Fault, context: FaultContext, description: str, phase: FaultPhase | None = None) -> None:
    """Say that a fault has just struck, and what the run was doing: `phase`, or what it is doing still."""
    monitor = context.monitor
    context.last_attempt = monitor.attempt
    context.on_injected(
        InjectedFault(
            fault, unix_now(), monitor.attempt, monitor.last_step, phase or current_phase(monitor), description
        )
    )


def current_phase(monitor: RunMonitor) -> FaultPhase:
    """What the run is doing."""
    return FaultPhase.RESTART if not monitor.is_training else FaultPhase.SAVE if monitor.is_saving else FaultPhase.STEP


def inject_time_limit(fault: Fault, context: FaultContext) -> FaultSteps:
    """What an engine does when a job's time is up, with little patience."""
    agent, grace_s = context.find_agent(0), MAX_GRACE_S * fault.randomness
    agent.terminate()
    record_injection(fault, context, f"SIGTERM to the leader agent, SIGKILL {grace_s:.2f} s later")
    yield from context.wait(grace_s)
    with contextlib.suppress(psutil.NoSuchProcess):  # it was in time
        agent.kill()


def inject_freeze(fault: Fault, context: FaultContext) -> FaultSteps:
    """A worker that is held still for a while."""
    worker, seconds = context.find_worker(fault.rank), MAX_PAUSE_S * fault.randomness
    worker.suspend()
    try:
        record_injection(fault, context, f"SIGSTOP to worker {fault.rank} for {seconds:.2f} s")
        yield from context.wait(seconds)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.resume()


def inject_disk_full(fault: Fault, context: FaultContext) -> FaultSteps:
    """No file of a worker may grow, as on a full disk, until a save has failed of it or the attempt is over."""
    worker, monitor = context.find_worker(fault.rank), context.monitor
    previous_limit, failed_saves, attempt = worker.rlimit(psutil.RLIMIT_FSIZE), monitor.failed_saves, monitor.attempt
    worker.rlimit(psutil.RLIMIT_FSIZE, (DISK_FULL_MAX_FILE_BYTES, previous_limit[1]))
    try:
        record_injection(fault, context, f"no room for files of worker {fault.rank}")
        while monitor.failed_saves == failed_saves and monitor.attempt == attempt:
            yield POLL_INTERVAL_S
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.rlimit(psutil.RLIMIT_FSIZE, previous_limit)


def inject_storage_outage(fault: Fault, context: FaultContext) -> FaultSteps:
    """In the place of the checkpoints there is a link to itself, which nobody can follow (ELOOP, what autofs says of a
    lost mount), until a save has failed of it, or the attempt, or all agents are gone: one that starts then would not
    get as far as an attempt."""
    monitor, folder = context.monitor, context.monitor.run.checkpoints
    hidden, seen = folder.with_name(HIDDEN_CHECKPOINTS_DIR), (monitor.failed_saves, monitor.num_faults, monitor.attempt)
    agents = context.agents()
    phase = current_phase(monitor)

    def hide() -> None:
        os.rename(folder, hidden)
        folder.symlink_to(folder.name)

    def restore() -> None:
        folder.unlink()
        os.rename(hidden, folder)

    yield from run_while_paused(context, hide)
    try:
        record_injection(fault, context, f"{folder.name} cannot be reached", phase)
        while (monitor.failed_saves, monitor.num_faults, monitor.attempt) == seen and not (
            agents and all(map(gone, agents))
        ):
            yield POLL_INTERVAL_S
        yield from run_while_paused(context, restore)
    finally:
        if hidden.exists():  # the run is ended meanwhile
            restore()


def run_while_paused(context: FaultContext, action: Callable[[], None]) -> FaultSteps:
    """Do something between two moments of the run: all its agents, and all below them, are held still for it."""
    processes = [process for agent in context.agents() for process in (agent, *agent.children(recursive=True))]
    try:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        while any(is_running(process) for process in processes):
            yield FINE_POLL_INTERVAL_S
        action()
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def gone(process: psutil.Process) -> bool:
    """Whether a process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def is_running(process: psutil.Process) -> bool:
    """Whether a process that was told to stop has not yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    return False


def corrupt_checkpoint(fault: Fault, context: FaultContext) -> FaultSteps:
    """A bit of the newest checkpoint flips, and a worker is killed. All are held still for it, and stay so until their
    agent ends them: none can make a newer checkpoint."""
    while len(intact := list_intact_checkpoints(context)) < 2 or find_newest_checkpoint(context) != intact[0]:
        yield POLL_INTERVAL_S
    workers = [context.find_worker(rank) for rank in context.monitor.worker_pids]
    victim = context.find_worker(fault.rank)
    try:
        for worker in workers:
            worker.suspend()
        file = flip_bit(find_newest_checkpoint(context), random.Random(fault.randomness))
        victim.kill()
    except BaseException:
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.resume()
        raise
    context.damaged_checkpoints.add(checkpoint_identity(file.parent))
    record_injection(fault, context, f"a bit of {file.parent.name}/{file.name} flipped, SIGKILL to worker {fault.rank}")


def kill_node(fault: Fault, context: FaultContext) -> FaultSteps:
    """All processes of a node at once, its agent first, so that it can tell nobody."""
    agent = context.find_agent(fault.rank)
    for process in (agent, *agent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    record_injection(fault, context, f"SIGKILL to all of the node of worker {fault.rank}")
    yield POLL_INTERVAL_S


def partition_node(fault: Fault, context: FaultContext) -> FaultSteps:
    """A node that is held still altogether says nothing to anybody, as behind a network that drops everything, until
    it is given up; then it comes back."""
    agent, faults = context.find_agent(fault.rank), context.monitor.num_faults
    processes = [agent, *agent.children(recursive=True)]
    try:
        for process in processes:
            process.suspend()
        record_injection(fault, context, f"the node of worker {fault.rank} is cut off")
        while context.monitor.num_faults == faults:
            yield POLL_INTERVAL_S
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def kill_daemon(fault: Fault, context: FaultContext) -> FaultSteps:
    """Nobody looks after the queue until another supervisor comes."""
    found = context.find_daemons()
    if not found:
        raise psutil.NoSuchProcess(0)
    for process in found:
        process.kill()
    record_injection(fault, context, "SIGKILL to the queue's supervisor")
    yield POLL_INTERVAL_S


SIGNAL_BY_KIND = {"kill": signal.SIGKILL, "crash": signal.SIGSEGV, "abort": signal.SIGABRT, "hang": signal.SIGSTOP}
INJECTOR_BY_FAULT: dict[str, Callable[[Fault, FaultContext], FaultSteps]] = {
    "time-limit": inject_time_limit,
    "freeze": inject_freeze,
    "disk-full": inject_disk_full,
    "storage-outage": inject_storage_outage,
    "corrupt-checkpoint": corrupt_checkpoint,
    "node-loss": kill_node,
    "partition": partition_node,
    "queue-daemon": kill_daemon,
}


def list_checkpoints(context: FaultContext) -> list[Path]:
    """Those that stand, the newest first."""
    folder = context.monitor.run.checkpoints
    return sorted((path for path in folder.iterdir() if CHECKPOINT_NAME_PATTERN.fullmatch(path.name)), reverse=True)


def find_newest_checkpoint(context: FaultContext) -> Path | None:
    """The newest checkpoint."""
    return next(iter(list_checkpoints(context)), None)


def list_intact_checkpoints(context: FaultContext) -> list[Path]:
    """Checkpoints in which no bit has flipped."""
    found = []
    for path in list_checkpoints(context):
        with contextlib.suppress(FileNotFoundError):  # an old one that was just removed
            if checkpoint_identity(path) not in context.damaged_checkpoints:
                found.append(path)
    return found


def checkpoint_identity(checkpoint: Path) -> tuple[str, int]:
    """A checkpoint, and not another one that got its name later."""
    return checkpoint.name, checkpoint.stat().st_ino


def flip_bit(checkpoint: Path | None, rng: random.Random) -> Path:
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


def disable_core_dumps(pid: int) -> None:
    """Have a process, and all that it starts, leave no core file behind when it crashes."""
    resource.prlimit(pid, resource.RLIMIT_CORE, (0, resource.prlimit(pid, resource.RLIMIT_CORE)[1]))
