"""Inject faults into the processes and files of a run.

A fault is a generator that waits for its trigger, acts, and waits for the effect. It yields the seconds until it wants
to continue; meanwhile the caller monitors the run. A process is hit only if it has the run's tag in its environment, in
case its pid was reused.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from phalanx.jobs.chaos.fault_plan import FAULT_KINDS, Fault, FaultPhase, FaultTrigger
from phalanx.jobs.chaos.launcher import CHAOS_TAG_VARIABLE, RunMonitor, TypicalDurations
from phalanx.run.boot_clock import unix_now
from phalanx.storage.run_objects import CHECKPOINT_NAME_PATTERN

POLL_INTERVAL_S, FINE_POLL_INTERVAL_S = 0.005, 0.0005
"""Seconds between polls; the finer one waits for a save, which may take only milliseconds."""
MAX_PAUSE_S, MAX_GRACE_S = 2.0, 1.0
"""Maximum seconds for which a worker is paused (well below a hang), and between the signals of a time limit."""
DISK_FULL_MAX_FILE_BYTES = 1000
"""Maximum size of files of a worker with a "full disk"."""
HIDDEN_CHECKPOINTS_DIR = "checkpoints.old"
"""Name of the checkpoint directory while it is unreachable. A finished run must not leave it behind."""

FaultSteps = Generator[float, None, None]


@dataclass(frozen=True)
class InjectedFault:
    """A fault that was injected: its time (unix seconds), attempt, last step, and the actual phase of the run."""

    fault: Fault
    t: float
    attempt: int
    step: int | None
    phase: FaultPhase
    description: str


@dataclass
class FaultContext:
    """The run, and state that is kept between faults. `find_daemons` finds the daemons of the local queue."""

    monitor: RunMonitor
    typical: TypicalDurations
    tag: str
    on_injected: Callable[[InjectedFault], None]
    find_daemons: Callable[[], Sequence[psutil.Process]] = tuple
    clock: Callable[[], float] = time.monotonic
    last_attempt: int = -1
    min_attempt: int = 0
    """The attempt that must have begun before the next fault."""
    saved_step: int = 0
    """Highest step of a checkpoint when it began."""
    damaged_checkpoints: set[tuple[str, int]] = field(default_factory=set)
    """Corrupted checkpoints by name and inode; a rewritten one is intact."""

    def find_worker(self, rank: int) -> psutil.Process:
        """Return a worker of the newest attempt. Raises NoSuchProcess when it has ended or not started."""
        if rank not in self.monitor.worker_pids:
            raise psutil.NoSuchProcess(0)
        return self.find_process(self.monitor.worker_pids[rank])

    def find_fork_server(self, rank: int) -> psutil.Process:
        return self.find_process(self.find_worker(rank).ppid())

    def find_agent(self, rank: int) -> psutil.Process:
        return self.find_process(self.find_fork_server(rank).ppid())

    def agents(self) -> set[psutil.Process]:
        """Return the live agents of all nodes."""
        found: set[psutil.Process] = set()
        for rank in self.monitor.worker_pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.add(self.find_agent(rank))
        return found

    def find_process(self, pid: int) -> psutil.Process:
        """Return the process of the run with this pid."""
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE or process.environ().get(CHAOS_TAG_VARIABLE) != self.tag:
            raise psutil.NoSuchProcess(pid)
        return process

    def wait(self, seconds: float) -> FaultSteps:
        deadline = self.clock() + seconds
        while (remaining_s := deadline - self.clock()) > 0:
            yield min(POLL_INTERVAL_S, remaining_s)


def inject_faults(faults: Sequence[Fault], context: FaultContext) -> FaultSteps:
    """Inject all faults, one after the other."""
    for fault in faults:
        yield from wait_for_trigger(fault.trigger, context)
        while True:
            try:
                yield from inject(fault, context)
                break
            except (psutil.NoSuchProcess, psutil.AccessDenied):  # it is just ending: retry with its successor
                yield POLL_INTERVAL_S
        if FAULT_KINDS[fault.kind].ends_attempt:
            context.min_attempt = context.last_attempt + 1
        while context.monitor.attempt < context.min_attempt:
            yield POLL_INTERVAL_S
        context.saved_step = context.monitor.saved_step


def wait_for_trigger(trigger: FaultTrigger, context: FaultContext) -> FaultSteps:
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
        context.find_worker(rank).send_signal(SIGNAL_BY_KIND[kind])
        record_injection(fault, context, f"{SIGNAL_BY_KIND[kind].name} to worker {rank}")
    elif kind in AGENT_SIGNAL_BY_KIND:
        context.find_agent(0).send_signal(AGENT_SIGNAL_BY_KIND[kind])
        record_injection(fault, context, f"{AGENT_SIGNAL_BY_KIND[kind].name} to the leader agent")
    elif kind == "fork-server":
        context.find_fork_server(rank).kill()
        record_injection(fault, context, f"SIGKILL to the fork server of worker {rank}")
    elif kind == "job-runner":
        context.find_process(context.find_agent(0).ppid()).kill()
        record_injection(fault, context, "SIGKILL to the process above the job")
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
    return FaultPhase.RESTART if not monitor.is_training else FaultPhase.SAVE if monitor.is_saving else FaultPhase.STEP


def inject_time_limit(fault: Fault, context: FaultContext) -> FaultSteps:
    """End the job like a backend at the time limit, with a short grace time."""
    agent, grace_s = context.find_agent(0), MAX_GRACE_S * fault.randomness
    agent.terminate()
    record_injection(fault, context, f"SIGTERM to the leader agent, SIGKILL {grace_s:.2f} s later")
    yield from context.wait(grace_s)
    with contextlib.suppress(psutil.NoSuchProcess):  # it was in time
        agent.kill()


def inject_freeze(fault: Fault, context: FaultContext) -> FaultSteps:
    """Pause a worker with SIGSTOP for a while."""
    worker, seconds = context.find_worker(fault.rank), MAX_PAUSE_S * fault.randomness
    worker.suspend()
    try:
        record_injection(fault, context, f"SIGSTOP to worker {fault.rank} for {seconds:.2f} s")
        yield from context.wait(seconds)
    finally:
        signal_all([worker], signal.SIGCONT)


def inject_disk_full(fault: Fault, context: FaultContext) -> FaultSteps:
    """Limit the file size of a worker, as on a full disk, until a save fails or the attempt ends."""
    worker, monitor = context.find_worker(fault.rank), context.monitor
    previous_limit, failed_saves, attempt = worker.rlimit(psutil.RLIMIT_FSIZE), monitor.failed_saves, monitor.attempt
    worker.rlimit(psutil.RLIMIT_FSIZE, (DISK_FULL_MAX_FILE_BYTES, previous_limit[1]))
    try:
        record_injection(fault, context, f"disk full for worker {fault.rank}")
        while monitor.failed_saves == failed_saves and monitor.attempt == attempt:
            yield POLL_INTERVAL_S
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.rlimit(psutil.RLIMIT_FSIZE, previous_limit)


def inject_storage_outage(fault: Fault, context: FaultContext) -> FaultSteps:
    """Replace the checkpoint directory by a link to itself (ELOOP, as autofs reports a lost mount). The directory comes
    back when a save or the attempt has failed, or when all agents are gone, because a new agent could not begin an
    attempt without it."""
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
            agents and all(map(has_ended, agents))
        ):
            yield POLL_INTERVAL_S
        yield from run_while_paused(context, restore)
    finally:
        if hidden.exists():  # the run ended meanwhile
            restore()


def run_while_paused(context: FaultContext, action: Callable[[], None]) -> FaultSteps:
    """Run `action` while all agents of the run and their descendants are paused with SIGSTOP."""
    processes = [process for agent in context.agents() for process in (agent, *agent.children(recursive=True))]
    try:
        signal_all(processes, signal.SIGSTOP)
        while any(is_running(process) for process in processes):
            yield FINE_POLL_INTERVAL_S
        action()
    finally:
        signal_all(processes, signal.SIGCONT)


def signal_all(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to those of the processes that have not ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def has_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def is_running(process: psutil.Process) -> bool:
    """Whether a process that was sent SIGSTOP still runs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    return False


def corrupt_checkpoint(fault: Fault, context: FaultContext) -> FaultSteps:
    """Flip a bit of the newest checkpoint and kill a worker. All workers stay paused until their agent ends them, so
    that none can write a newer checkpoint."""
    folder = context.monitor.run.checkpoints
    while (
        len(intact := list_intact_checkpoints(folder, context.damaged_checkpoints)) < 2
        or list_checkpoints(folder)[0] != intact[0]
    ):
        yield POLL_INTERVAL_S
    workers = [context.find_worker(rank) for rank in context.monitor.worker_pids]
    victim = context.find_worker(fault.rank)
    try:
        for worker in workers:
            worker.suspend()
        file = flip_bit(list_checkpoints(folder)[0], random.Random(fault.randomness))
        victim.kill()
    except BaseException:
        signal_all(workers, signal.SIGCONT)
        raise
    context.damaged_checkpoints.add(checkpoint_identity(file.parent))
    record_injection(fault, context, f"a bit of {file.parent.name}/{file.name} flipped, SIGKILL to worker {fault.rank}")


def kill_node(fault: Fault, context: FaultContext) -> FaultSteps:
    """Kill all processes of a node at once, the agent first, so that it cannot report anything."""
    agent = context.find_agent(fault.rank)
    signal_all((agent, *agent.children(recursive=True)), signal.SIGKILL)
    record_injection(fault, context, f"SIGKILL to all of the node of worker {fault.rank}")
    yield POLL_INTERVAL_S


def partition_node(fault: Fault, context: FaultContext) -> FaultSteps:
    """Pause all processes of a node, as if the network dropped its packets, until the leader drops the node."""
    agent, faults = context.find_agent(fault.rank), context.monitor.num_faults
    processes = [agent, *agent.children(recursive=True)]
    try:
        for process in processes:
            process.suspend()
        record_injection(fault, context, f"the node of worker {fault.rank} is cut off")
        while context.monitor.num_faults == faults:
            yield POLL_INTERVAL_S
    finally:
        signal_all(processes, signal.SIGCONT)


def kill_daemon(fault: Fault, context: FaultContext) -> FaultSteps:
    """Kill the queue's daemon; the queue stops until another one starts."""
    found = context.find_daemons()
    if not found:
        raise psutil.NoSuchProcess(0)
    for process in found:
        process.kill()
    record_injection(fault, context, "SIGKILL to the queue's daemon")
    yield POLL_INTERVAL_S


SIGNAL_BY_KIND = {"kill": signal.SIGKILL, "crash": signal.SIGSEGV, "abort": signal.SIGABRT, "hang": signal.SIGSTOP}
AGENT_SIGNAL_BY_KIND = {"agent": signal.SIGKILL, "preempt": signal.SIGTERM, "interrupt": signal.SIGINT}
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


def list_checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoints, newest first."""
    return sorted((path for path in folder.iterdir() if CHECKPOINT_NAME_PATTERN.fullmatch(path.name)), reverse=True)


def list_intact_checkpoints(folder: Path, damaged: Collection[tuple[str, int]]) -> list[Path]:
    """Return the checkpoints, newest first, that are not among the `damaged` identities."""
    found = []
    for path in list_checkpoints(folder):
        with contextlib.suppress(FileNotFoundError):  # an old one that was just removed
            if checkpoint_identity(path) not in damaged:
                found.append(path)
    return found


def checkpoint_identity(checkpoint: Path) -> tuple[str, int]:
    """A checkpoint, and not another one that got its name later."""
    return checkpoint.name, checkpoint.stat().st_ino


def flip_bit(checkpoint: Path, rng: random.Random) -> Path:
    """Flip a bit somewhere in a checkpoint; returns the file."""
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
