"""The fork server: a process that has imported torch and forks workers, trials and the store. It never computes itself.

Forking a process with torch imported takes milliseconds; importing torch takes seconds. Forking is only safe while no
other thread runs, so this process starts none: none of OpenMP (it never touches a tensor), and none of the store (which
a child hosts). When the agent's socket closes, it kills all its descendants.

It receives the messages `ToForkServer` of `run/messages.py`, and sends those of `FromForkServer`. Workers inherit a
second socket, given in PHALANX_EVENTS_FD, to which they write events and the messages `FromWorker`. They write
heartbeats to shared memory that the agent created (`run/heartbeat.py`).
"""

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from phalanx.compat import import_torch
from phalanx.errors import UnfitNodeError
from phalanx.formatting import format_exit_status
from phalanx.jobs.agent.forked_child import call_and_exit, find_user_code_dir, run_child
from phalanx.jobs.signal_queue import SignalQueue, kill_descendants
from phalanx.logging_config import configure_logging
from phalanx.process_lifetime import become_subreaper, die_with_parent
from phalanx.recipe import describe_exception
from phalanx.run import heartbeat
from phalanx.run.authentication import open_listener
from phalanx.run.call_process import answer_call, import_function
from phalanx.run.event_loop import EventLoop
from phalanx.run.messages import Message, ProtocolError, receive, send
from phalanx.run.node_env import STORE_KEY_VARIABLE, STORE_VARIABLE
from phalanx.run.process_messages import (
    CallRaised,
    Preload,
    ProcessReady,
    RunCall,
    SendSignal,
    StartStore,
    StartWorkers,
    StoreDied,
    StoreStarted,
    WorkerCrashed,
    WorkerExited,
    WorkersStarted,
)

logger = logging.getLogger("phalanx.jobs.agent.fork_server")  # its __name__ is __main__ under `python -m`

BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that are blocked in the fork server, and in its children until they unblock them."""
PF_EXITING = 0x4
"""Flag of the kernel for a process that is ending."""
STORE_RANK = -1
FIRST_CALL_RANK = -2
"""Ranks of children that are not workers; call N has the rank FIRST_CALL_RANK - N."""
MAX_STORE_STARTS = 3
"""Store processes that may die in a row before they listen."""
CALL_ANSWERED_STATUS = 101
"""Exit status of a call that has sent its answer; with 0 it may have exited before."""


class ForkServer:
    """The main loop of the fork server. `children` maps pid to rank."""

    def __init__(self, agent_socket: socket.socket, events_socket: socket.socket, heartbeat_fd: int):
        self.agent_socket = agent_socket
        self.events_socket = events_socket
        self.heartbeat_fd = heartbeat_fd
        self.children: dict[int, int] = {}
        self.store_port = 0
        self.store_pid = 0  # of the process that hosts the store
        self.hosts_store = False  # for workers of several nodes
        self.attempt = 0
        self.rendezvous_fd = -1
        self.num_starts = 0
        self.is_agent_gone = False
        self.killed_pids: set[int] = set()  # workers that lived until this process killed them

    def run(self) -> None:
        """Serve the agent until it is gone; then kill all remaining children."""
        with SignalQueue((), wake_on_child_exit=True) as signals:

            def reap() -> None:
                signals.clear_wake()
                self.reap_children()

            with contextlib.suppress(ConnectionError), EventLoop() as loop:  # the agent is gone when a message is sent
                loop.add_reader(self.agent_socket, self.receive_messages)
                loop.add_reader(signals.wake_socket, reap)
                send(self.agent_socket, ProcessReady())
                while not self.is_agent_gone:
                    loop.run_once()
            kill_descendants()  # adopted grandchildren, too

    def receive_messages(self) -> None:
        """Handle the messages that the agent has sent."""
        messages = receive(self.agent_socket)
        self.is_agent_gone = messages is None
        for message in messages or ():
            self.handle_message(message)

    def handle_message(self, message: Message) -> None:
        """Handle a message of the agent. Raises ProtocolError for one that is not for this process."""
        match message:
            case StartWorkers():
                self.start_workers(message)
            case StartStore():
                self.reap_children()  # one that has just died is none
                self.hosts_store, self.store_port = True, self.store_port or self.start_store(message.address)
                send(self.agent_socket, StoreStarted(port=self.store_port))
            case SendSignal():
                self.send_signal(message.signal)
            case RunCall():
                self.fork_child(FIRST_CALL_RANK - message.call_id, partial(self.run_call, message), {}, None)
            case Preload():
                import_function(message.function)(message.payload)
                freeze_gc()
            case _:
                raise ProtocolError(f"the fork server received an unexpected message: {message}")

    def start_workers(self, message: StartWorkers) -> None:
        """Fork this node's workers of one attempt, and where they meet unless that is elsewhere."""
        self.reap_children()  # a store that has just died is none
        self.attempt, first_rank, local_world_size = message.attempt, message.first_rank, message.local_world_size
        self.num_starts += 1
        if self.hosts_store and not self.store_port and message.store_address is not None:
            send(self.agent_socket, StoreDied(attempt=self.attempt))
        address, port = message.store_address or ("127.0.0.1", 0)
        if message.store_address is None:
            if self.rendezvous_fd >= 0:
                os.close(self.rendezvous_fd)
            self.rendezvous_fd = os.memfd_create("phalanx-rendezvous")  # only processes of this user can open it
        for rank in range(first_rank, first_rank + local_world_size):
            environment = {
                **message.environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank - first_rank),
                "WORLD_SIZE": str(message.world_size),
                "LOCAL_WORLD_SIZE": str(local_world_size),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                STORE_VARIABLE: "" if message.store_address is not None else f"/proc/self/fd/{self.rendezvous_fd}",
                STORE_KEY_VARIABLE: message.store_key or "",
                "PHALANX_ATTEMPT": str(message.attempt),
                "PHALANX_RENDEZVOUS_ID": str(
                    self.num_starts if message.rendezvous_id is None else message.rendezvous_id
                ),
                "PHALANX_EVENTS_FD": str(self.events_socket.fileno()),
                heartbeat.HEARTBEAT_FD_VARIABLE: str(self.heartbeat_fd),
            }
            log = Path(message.logs_dir) / f"attempt-{message.attempt}-rank-{rank}.log"
            function, arguments = message.command.function, message.command.payload
            self.fork_child(
                rank, partial(call_and_exit, function, arguments), environment, log, find_user_code_dir(arguments)
            )
        send(self.agent_socket, WorkersStarted(attempt=self.attempt))

    def start_store(self, address: str) -> int:
        """Fork the process that hosts the rendezvous store of several nodes; return its port. It listens on one address
        only, where torch would listen on all. If it dies at once, it is started again."""
        for _ in range(MAX_STORE_STARTS):
            if store_port := self._fork_store(address):
                return store_port
        raise RuntimeError("the process that hosts the rendezvous store died before it reported its port")

    def _fork_store(self, address: str) -> int:
        read, write = os.pipe()

        def host() -> None:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            listener = open_listener(address, 0)
            port, fd = listener.getsockname()[1], listener.detach()
            store = TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=fd)
            os.write(write, str(store.port).encode())
            os.close(write)
            signal.pause()

        self.store_pid = self.fork_child(STORE_RANK, host, {}, None)
        os.close(write)
        with os.fdopen(read) as pipe:
            return int(pipe.read() or 0)

    def run_call(self, asked: RunCall) -> NoReturn:
        """Run `module:function(payload)` in this forked process, send its result or exception, and exit."""
        send(self.agent_socket, answer_call(asked, _find_gpu_failure))
        raise SystemExit(CALL_ANSWERED_STATUS)

    def fork_child(
        self,
        rank: int,
        body: Callable[[], None],
        environment: dict[str, str],
        log: Path | None,
        user_code_dir: Path | None = None,
    ) -> int:
        """Fork a child that runs `body`, exits with its code, and dies with this process. Returns its pid. A child with
        a log is a worker: it reports the exception that ends it. `user_code_dir`: the report names the line in this
        directory."""
        sys.stdout.flush()
        sys.stderr.flush()

        def report(error: BaseException) -> None:
            if log is not None:
                send(self.events_socket, WorkerCrashed(rank=rank, message=describe_exception(error, user_code_dir)))

        parent = os.getpid()
        pid = os.fork()
        if not pid:
            run_child(parent, body, environment, log, report)
        self.children[pid] = rank
        logger.debug("forked process %d%s", pid, f", worker {rank}" if rank >= 0 else "")
        return pid

    def reap_children(self) -> None:
        """Report children that ended. Adopted grandchildren are reaped and not reported."""
        while self.children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            rank, exit_status = self.children.pop(pid, None), os.waitstatus_to_exitcode(status)
            if rank == STORE_RANK:
                if pid == self.store_pid and self.store_port:
                    self.store_port = 0  # the next attempt gets another; workers that have met need it no more
                    send(self.agent_socket, StoreDied(attempt=self.attempt))
                continue
            if rank is None:
                continue
            if rank <= FIRST_CALL_RANK:
                # A trial that was killed, for example when out of memory, sends no reply: reply for it.
                if exit_status != CALL_ANSWERED_STATUS:
                    text = f"the trial process ended with {format_exit_status(exit_status)}"
                    killed = exit_status == -signal.SIGKILL
                    send(self.agent_socket, CallRaised(call_id=FIRST_CALL_RANK - rank, message=text, was_killed=killed))
                continue
            logger.debug("worker %d (process %d) ended with %s", rank, pid, format_exit_status(exit_status))
            by_agent = pid in self.killed_pids and exit_status == -signal.SIGKILL
            self.killed_pids.discard(pid)
            send(self.agent_socket, WorkerExited(rank=rank, exit_status=exit_status, killed_by_agent=by_agent))

    def send_signal(self, number: int) -> None:
        """Send a signal to all workers, and to trials if it ends them for good."""
        for pid, rank in self.children.items():
            if rank >= 0 or (number == signal.SIGKILL and rank <= FIRST_CALL_RANK):
                if number == signal.SIGKILL and not is_exiting(pid):
                    self.killed_pids.add(pid)
                os.kill(pid, number)


def is_exiting(pid: int) -> bool:
    """Return whether a child is ending already, such as one that the kernel killed: its exit is reported only after its
    memory is freed, and other workers may lose it before that."""
    try:
        flags = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6])
    except OSError:
        return True
    return bool(flags & PF_EXITING)


def freeze_gc() -> None:
    """Exclude all current objects from garbage collection in the children, so that their memory stays shared."""
    gc.freeze()


def _find_gpu_failure(error: Exception) -> UnfitNodeError | None:
    from phalanx.train.distributed.failures import is_gpu_failure

    if not is_gpu_failure(error):
        return None
    return UnfitNodeError(f"a GPU of this machine failed: {describe_exception(error)}")


def main() -> None:
    """`python -m phalanx.jobs.agent.fork_server AGENT_FD EVENTS_FD HEARTBEAT_FD PARENT_PID`."""
    configure_logging()
    agent_fd, events_fd, heartbeat_fd, parent = (int(argument) for argument in sys.argv[1:5])
    die_with_parent(parent)
    become_subreaper()
    # The agent handles signals. They are blocked, not ignored: workers inherit the mask, so a signal that arrives
    # before a worker has installed its handler stays pending.
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    gc.disable()  # imports create almost no garbage, and collecting it would take a sixth of the time
    import_torch()
    import phalanx.train.worker  # noqa: F401 - what every worker needs, loaded once

    freeze_gc()
    gc.enable()
    ForkServer(socket.socket(fileno=agent_fd), socket.socket(fileno=events_fd), heartbeat_fd).run()


if __name__ == "__main__":
    main()
