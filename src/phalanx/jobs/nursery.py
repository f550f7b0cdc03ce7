"""The nursery: a process that has imported torch and forks workers, trials and the store; it never computes itself.

Forking a process that has torch loaded takes milliseconds instead of the seconds of a fresh import. It is only safe
while no thread runs, so this process starts none: not OpenMP's (no tensor is ever touched here) and not the store's
(hosted in a child of its own). It lives by the agent's socket: when that closes, everything below it is killed.

It obeys the messages `ToForkServer` of `run/messages.py`, and answers with those of `FromForkServer`. Workers write
their events and the messages `FromWorker` to a second socket, which they inherit and whose number stands in
PHALANX_EVENTS_FD; they give signs of life in memory that the agent made (`run/pulse.py`).
"""

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from phalanx.compat import adopt_orphans, die_with_parent, load_torch
from phalanx.errors import ExitCode, PhalanxError, storage_failed
from phalanx.jobs.below import end_below
from phalanx.recipe import told
from phalanx.recipe.travelled import code_of
from phalanx.run import pulse
from phalanx.run.channel import pair, receive, send
from phalanx.run.membership import KEY_VARIABLE, STORE_VARIABLE
from phalanx.run.messages import (
    CallRaised,
    CallReturned,
    ForkServerReady,
    Message,
    Preload,
    ProtocolError,
    RunCall,
    SendSignal,
    StartStore,
    StartWorkers,
    StoreDied,
    StoreStarted,
    UpdateMembership,
    WorkerCrashed,
    WorkerExited,
    WorkersStarted,
)
from phalanx.streams import Lasting

HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Blocked in the nursery and in its children until they unblock them."""
LOST_PEER = 76
"""Exit status of a worker that ended only because another was gone. It may end, and be reaped, before that one: a dying
process closes its sockets first."""
STORAGE = 74
"""Exit status of a worker that ended because storage failed: a file of the run, its data or its code could not be read
or written. EX_IOERR of sysexits.h."""
GPU = 71
"""Exit status of a worker whose GPU failed. EX_OSERR of sysexits.h."""
STORE = -1
CALL = -2
"""Ranks of the children that are not workers; that of the Nth call is CALL - N."""
STORES = 3
"""Processes that may die, one after another, before they host a store."""
ANSWERED = 101
"""Exit status of a call that has sent its answer: with 0 it may leave before."""


class Nursery:
    """The loop of the nursery process. `children` maps pid to rank."""

    def __init__(self, agent: socket.socket, events: socket.socket, pulse: int):
        self.agent = agent
        self.events = events
        self.pulse = pulse
        self.children: dict[int, int] = {}
        self.orders: dict[int, socket.socket] = {}
        self.port = 0
        self.store = 0  # the process that hosts it
        self.hosts = False  # for workers of several nodes
        self.attempt = 0
        self.meeting = -1
        self.starts = 0

    def run(self) -> None:
        """Serve the agent until it is gone; then kill whatever is left."""
        wake_read, wake_write = socket.socketpair()
        wake_write.setblocking(False)
        wake_read.setblocking(False)
        # A handler is needed for the wake-up byte to be written; reaping happens in the loop.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        with contextlib.suppress(ConnectionError):  # the agent is gone while we had something to tell it
            self.serve(wake_read)
        self.end()

    def serve(self, wake: socket.socket) -> None:
        """Obey the agent, and reap children whenever a byte lies in `wake`."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.agent, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            send(self.agent, ForkServerReady())
            while True:
                for key, _ in selector.select():
                    if key.fileobj is wake:
                        wake.recv(4096)
                        self.reap()
                        continue
                    messages = receive(self.agent)
                    if messages is None:
                        return
                    for message in messages:
                        self.obey(message)

    def obey(self, message: Message) -> None:
        """Do what the agent asks. ProtocolError for what is not for this process."""
        match message:
            case StartWorkers():
                self.start(message)
            case StartStore():
                self.reap()  # one that has just died is none
                self.hosts, self.port = True, self.port or self.start_store(message.address)
                send(self.agent, StoreStarted(port=self.port, pid=self.store))
            case SendSignal():
                self.kill(message.signal, message.ranks)
            case UpdateMembership():
                for rank in self.orders.keys() & set(message.recipients):
                    with contextlib.suppress(OSError):  # it has just ended, which its agent hears next
                        send(self.orders[rank], message.update)
            case RunCall():
                self.fork(CALL - message.call_id, partial(self.call, message), {}, None)
            case Preload():
                _run(message.function, message.payload)
                share_memory()
            case _:
                raise ProtocolError(f"the nursery knows no message {message}")

    def start(self, message: StartWorkers) -> None:
        """Fork this node's workers of one attempt, and where they meet unless that is elsewhere."""
        self.reap()  # a store that has just died is none
        self.attempt, first, local = message.attempt, message.first_rank, message.local_world_size
        later = message.rejoining_ranks is not None
        self.starts += not later
        if self.hosts and not self.port and message.store_address is not None:
            send(self.agent, StoreDied(attempt=self.attempt))
        address, port = message.store_address or ("127.0.0.1", 0)
        if not later and message.store_address is None:
            self.open_meeting()
        ranks = range(first, first + local) if message.rejoining_ranks is None else message.rejoining_ranks
        for rank in ranks:
            near, far = pair()
            orders = str(far.fileno()) if message.is_elastic else ""
            environment = {
                **message.environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank - first),
                "WORLD_SIZE": str(message.world_size),
                "LOCAL_WORLD_SIZE": str(local),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                STORE_VARIABLE: "" if message.store_address is not None else f"/proc/self/fd/{self.meeting}",
                KEY_VARIABLE: message.store_key or "",
                "PHALANX_ATTEMPT": str(message.attempt),
                "PHALANX_RENDEZVOUS_ID": str(self.starts if message.rendezvous_id is None else message.rendezvous_id),
                "PHALANX_EVENTS_FD": str(self.events.fileno()),
                pulse.VARIABLE: str(self.pulse),
                "PHALANX_CONTROL_FD": orders,
                "PHALANX_STANDBY": "1" if later else "",
            }
            log = Path(message.logs_dir) / f"attempt-{message.attempt}-rank-{rank}.log"
            function, arguments = message.command.function, message.command.payload
            self.fork(rank, partial(_run, function, arguments), environment, log, _code_of(arguments))
            far.close()
            self.orders[rank] = near
        send(self.agent, WorkersStarted(attempt=self.attempt))

    def open_meeting(self) -> None:
        """A file without a name where workers of this machine meet: only they, and others of this user, can open it."""
        if self.meeting >= 0:
            os.close(self.meeting)
        self.meeting = os.memfd_create("phalanx-meeting")

    def start_store(self, address: str) -> int:
        """Fork the process that hosts the store where workers of several nodes meet; return its port. It listens on one
        address only: torch would listen on all. One that dies at once is followed by another."""
        for _ in range(STORES):
            if port := self._start_store(address):
                return port
        raise RuntimeError("the process that hosts the rendezvous store died before it told its port")

    def _start_store(self, address: str) -> int:
        read, write = os.pipe()

        def host() -> None:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, 0), family=family)
            port, fd = listener.getsockname()[1], listener.detach()
            store = TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=fd)
            os.write(write, str(store.port).encode())
            os.close(write)
            signal.pause()

        self.store = self.fork(STORE, host, {}, None)
        os.close(write)
        with os.fdopen(read) as pipe:
            return int(pipe.read() or 0)

    def call(self, asked: RunCall) -> NoReturn:
        """Run `module:function(payload)` in this (forked) process, send what it returns or raises, and leave."""
        send(self.agent, _reply_to(asked))
        raise SystemExit(ANSWERED)

    def fork(
        self,
        rank: int,
        body: Callable[[], None],
        environment: dict[str, str],
        log: Path | None,
        code: Path | None = None,
    ) -> int:
        """Fork a child that runs `body` and exits with its code; it dies with us. Its process id. A worker, which has a
        log, reports the exception that ends it; `code`: the folder of the user's code, whose line is named."""
        sys.stdout.flush()
        sys.stderr.flush()

        def report(error: BaseException) -> None:
            if log is not None:
                send(self.events, WorkerCrashed(rank=rank, message=told(error, code)))

        parent = os.getpid()
        pid = os.fork()
        if not pid:
            _become(parent, body, environment, log, report)
        self.children[pid] = rank
        return pid

    def reap(self) -> None:
        """Report children that ended. Adopted grandchildren are reaped and not reported."""
        while self.children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            rank = self.children.pop(pid, None)
            if rank is not None and (orders := self.orders.pop(rank, None)) is not None:
                orders.close()
            if rank == STORE:
                if pid == self.store and self.port:
                    self.port = 0  # the next attempt gets another; workers that have met need it no more
                    send(self.agent, StoreDied(attempt=self.attempt))
                continue
            if rank is None:
                continue
            if rank <= CALL:
                # A trial that was killed (out of memory, say) sent no reply: its end is the reply.
                if os.waitstatus_to_exitcode(status) != ANSWERED:
                    text = f"the trial process ended with {describe(status)}"
                    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
                    send(self.agent, CallRaised(call_id=CALL - rank, message=text, was_killed=killed))
                continue
            send(self.agent, WorkerExited(rank=rank, exit_status=os.waitstatus_to_exitcode(status)))

    def kill(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to the workers of these ranks; without, to all (to trials only one that ends them for good)."""
        for pid, rank in self.children.items():
            if rank in ranks if ranks is not None else rank >= 0 or (number == signal.SIGKILL and rank <= CALL):
                os.kill(pid, number)

    def end(self) -> None:
        """Kill and reap everything below this process, adopted grandchildren too."""
        end_below()


def share_memory() -> None:
    """Have collections in the children leave alone all that exists now, so that its memory stays shared."""
    gc.collect()
    gc.freeze()


def describe(status: int) -> str:
    """A wait status in words."""
    code = os.waitstatus_to_exitcode(status)
    return signal_name(-code) if code < 0 else f"exit code {code}"


def signal_name(number: int) -> str:
    """SIGKILL, say; real-time signals have no names, so they are `signal 40`."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _reply_to(asked: RunCall) -> CallReturned | CallRaised:
    """Call, and put what came of it into a message."""
    call_id = asked.call_id
    try:
        return CallReturned(call_id=call_id, value=_target(asked.function)(asked.payload))
    except PhalanxError as error:
        return CallRaised(call_id=call_id, message=str(error), exit_code=int(error.code))
    except SystemExit as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"SystemExit: {error.code} ({frame.filename}:{frame.lineno}, in {frame.name}): a trial was left by it"
        return CallRaised(call_id=call_id, message=text)
    except Exception as error:  # noqa: BLE001 - it crosses a process boundary and is raised again there
        text, code, trace = f"{type(error).__name__}: {error}", None, traceback.format_exc()[-8000:]
        if _broken_gpu(error):
            text, code = f"a GPU of this machine failed: {told(error)}", int(ExitCode.UNFIT_NODE)
        return CallRaised(call_id=call_id, message=text, exit_code=code, traceback=trace)


def _target(path: str) -> Callable[[Any], Any]:
    module, _, name = path.partition(":")
    function: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    return function


def _run(path: str, payload: Any) -> None:
    """Import and call in the child: what a worker loads is none of the nursery's."""
    _target(path)(payload)


def _code_of(arguments: Any) -> Path | None:
    """The folder of the user's code that a worker with these arguments runs."""
    given = arguments if isinstance(arguments, Mapping) else {}
    if "script" in given:
        return Path(given["script"]).parent
    return code_of(Path(given["folder"])) if "folder" in given else None


def _become(
    parent: int,
    body: Callable[[], None],
    environment: dict[str, str],
    log: Path | None,
    report: Callable[[BaseException], None],
) -> NoReturn:
    """In a fresh child: clean signal state, own log, run, leave without the parent's exit handlers."""
    code = 1
    sys.stdout, sys.stderr = (cast(TextIO, Lasting(stream)) for stream in (sys.stdout, sys.stderr))
    try:
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.update(environment)
        if log is not None:
            _print_to(log)
        body()
        code = 0
    except SystemExit as leave:
        if isinstance(leave.code, str):
            print(leave.code, file=sys.stderr)
        code = 0 if leave.code is None else leave.code if isinstance(leave.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - the last frame of a process: report and leave
        code = _status(error)
        traceback.print_exc()
        with contextlib.suppress(OSError):  # the agent is gone
            report(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _print_to(log: Path) -> None:
    """Have what this process prints go to a file; what the file does not take is lost, and nothing is raised."""
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        fd = os.open(os.devnull, os.O_WRONLY)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _status(error: BaseException) -> int:
    """The exit status of a worker that an exception ends."""
    from phalanx.train.place import lost_peer

    if _broken_gpu(error):  # NCCL tells of it as it does of lost peers
        return GPU
    return LOST_PEER if lost_peer(error) else STORAGE if storage_failed(error) else 1


def _broken_gpu(error: BaseException) -> bool:
    from phalanx.train.place import broken_gpu

    return broken_gpu(error)


def main() -> None:
    """Entry of the nursery process: `python -m phalanx.jobs.nursery AGENT_FD EVENTS_FD PULSE_FD PARENT_PID`."""
    agent_fd, events_fd, pulse_fd, parent = (int(argument) for argument in sys.argv[1:5])
    die_with_parent(parent)
    adopt_orphans()
    # Signals are the agent's to interpret. Blocked rather than ignored: workers inherit the mask, so a signal that
    # comes before a worker has its handler waits for it instead of being lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
    gc.disable()  # nearly all that is imported stays, and to look for garbage in it takes a sixth of the time
    load_torch()
    import phalanx.train.worker  # noqa: F401 - what every worker needs, loaded once

    share_memory()
    gc.enable()
    Nursery(socket.socket(fileno=agent_fd), socket.socket(fileno=events_fd), pulse_fd).run()


if __name__ == "__main__":
    main()
