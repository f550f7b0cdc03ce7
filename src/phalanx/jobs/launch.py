"""Starts a program of any framework on one node: `python -m phalanx.jobs.launch FRAMEWORK PROCESSES -- COMMAND`.

The nodes meet on the control channel, tell each other addresses and free ports, and each starts its processes with
their framework's variables. When one fails, all end, on every node, with its code. Nothing is started again here: that
is the engine's, by the code.
"""

import contextlib
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.compat import adopt_orphans, die_with_parent
from phalanx.errors import ExitCode, PhalanxError, UsageError
from phalanx.jobs.below import end_below
from phalanx.jobs.frameworks import World, devices_of, helpers, hostfile, mpirun, variables
from phalanx.jobs.nodes import introduction, misfit
from phalanx.run.membership import Membership
from phalanx.run.messages import LauncherHello, Leave, Message, NodeFailed, NodeFinished, Rejected, Topology
from phalanx.run.wire import Door, Wire, dial, token_from
from phalanx.waits import LOOK, Wait, say

COMING = 600.0
"""Seconds in which all nodes must have come."""
GRACE = 30.0
"""Seconds that processes have to end after they were asked."""
RETRY = 0.2


class Unmet(PhalanxError):
    """The nodes did not come together."""

    code = ExitCode.UNFINISHED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this node's part of the job; returns its exit code."""
    framework, each, _, *command = sys.argv[1:] if arguments is None else arguments
    try:
        membership = Membership.from_environment(os.environ)
        with contextlib.ExitStack() as stack:
            world, wires = meet(membership, int(each), stack)
            return Part(framework, world, membership.node, command, wires).run(stack)
    except PhalanxError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.code)


def meet(membership: Membership, each: int, stack: contextlib.ExitStack) -> tuple[World, list[Wire]]:
    """All nodes of the job, and this one's connections: to every other node where it leads, else to the leader."""
    ports = free_ports(each + 1)
    if membership.leader is None:
        return World(("127.0.0.1",), each, (ports,)), []
    if membership.node == 0:
        return _gather(membership, each, ports, stack)
    host, port = membership.leader
    wait = Wait(f"node 0 at {host}:{port}", COMING)
    while True:
        try:
            wire = dial(membership.leader, token_from())
            break
        except OSError as error:
            if wait.over():
                raise Unmet(f"node 0 cannot be reached at {host}:{port}: {error}") from None
            time.sleep(RETRY)  # nothing tells when somebody begins to listen
    stack.callback(wire.close)
    address = wire.sock.getsockname()[0]
    identity = asdict(introduction(membership.node, membership.nodes))
    wire.send(LauncherHello(**identity, address=address, ports=ports, nproc_per_node=each))
    told: list[Message] = []
    wait = Wait("all nodes to come", COMING)
    while not told:
        if not select.select([wire], [], [], LOOK)[0]:
            if wait.over():
                raise Unmet(f"not all nodes came within {COMING:.0f} s")
            continue
        found = wire.receive()
        if found is None:
            raise Unmet("node 0 is gone before all nodes had come")
        told = found
    first = told[0]
    if isinstance(first, Rejected | Leave):
        raise UsageError(first.message or "node 0 rejects this node")
    if not isinstance(first, Topology):
        raise UsageError("node 0 runs something else than this node")
    return _world(first), [wire]


def _gather(
    membership: Membership, each: int, ports: tuple[int, ...], stack: contextlib.ExitStack
) -> tuple[World, list[Wire]]:
    assert membership.leader is not None
    door = stack.enter_context(Door(membership.leader, token_from()))
    own = introduction(0, membership.nodes)
    come: dict[int, tuple[Wire, LauncherHello]] = {}
    wait = Wait(_absent(membership, come), COMING)
    door.near.settimeout(LOOK)
    while len(come) < membership.nodes - 1:
        wait.what = _absent(membership, come)
        try:
            door.near.recv(1)
        except TimeoutError:
            if wait.over():
                raise Unmet(f"{wait.what} did not come within {COMING:.0f} s") from None
            continue
        wire, hello = door.arrived.get()
        stack.callback(wire.close)
        node, starts = hello.node_rank, hello.nproc_per_node if isinstance(hello, LauncherHello) else None
        wrong = misfit(hello, own)
        if wrong is None and starts != each:
            wrong = f"it starts {starts} processes, and the leading node {each}"
        if wrong is not None:
            say(f"node {node} ({hello.host}) was sent away: {wrong}")
            with contextlib.suppress(ConnectionError):  # it is gone already
                wire.send(Rejected(message=wrong))
        elif isinstance(hello, LauncherHello) and 0 < node < membership.nodes:
            come[node] = wire, hello
    others = [come[node][1] for node in sorted(come)]
    # by the address at which the first of them reached this node: its name may lead elsewhere here
    own_address = come[min(come)][0].sock.getsockname()[0]
    told = Topology(
        hosts=(own_address, *(hello.address for hello in others)),
        nproc_per_node=each,
        ports=(ports, *(hello.ports for hello in others)),
    )
    wires = [come[node][0] for node in sorted(come)]
    for node, wire in zip(sorted(come), wires, strict=True):
        try:
            wire.send(told)
        except ConnectionError:
            raise Unmet(f"node {node} is gone before all nodes had come") from None
    return _world(told), wires


def _absent(membership: Membership, come: Collection[int]) -> str:
    absent = [str(node) for node in range(1, membership.nodes) if node not in come]
    return f"{'node' if len(absent) == 1 else 'nodes'} {', '.join(absent)}"


def _world(told: Topology) -> World:
    return World(told.hosts, told.nproc_per_node, told.ports)


def free_ports(count: int) -> tuple[int, ...]:
    """Ports that are free now. Frameworks open them later by their number, so another program may be quicker."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return tuple(sock.getsockname()[1] for sock in socks)


class Part:
    """One node's processes of the job."""

    def __init__(self, framework: str, world: World, node: int, command: Sequence[str], wires: Sequence[Wire]):
        self.framework, self.world, self.node, self.command = framework, world, node, list(command)
        self.wires = list(wires)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.workers: set[str] = set()
        self.code: int | None = None
        """Of the whole job, when it is known."""
        self.finished = False
        """Whether all workers have ended as they should: what helpers end with has no say any more."""
        self.until: float | None = None
        self._received: list[int] = []
        self._said = False
        self._waiting = {f"node {index + 1 if node == 0 else 0}" for index, _ in enumerate(wires)}

    def run(self, stack: contextlib.ExitStack) -> int:
        """Start the processes, pass on what they print, and see them all to their end, also those of other nodes."""
        adopt_orphans()
        wake, far = (stack.enter_context(sock) for sock in socket.socketpair())
        far.setblocking(False)
        signal.set_wakeup_fd(far.fileno(), warn_on_full_buffer=False)
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(each, lambda number, _: self._received.append(number))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        stack.callback(self.end)
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(wake, selectors.EVENT_READ)
        for index, wire in enumerate(self.wires):
            selector.register(wire, selectors.EVENT_READ, f"node {index + 1 if self.node == 0 else 0}")
        for name, command, environment in self.plan(stack):
            self.start(name, command, environment, selector)
        self.finish()  # where somebody else starts what runs here
        while not self.over():
            patience = None if self.until is None else max(0.0, self.until - time.monotonic())
            for key, _ in selector.select(patience):
                if key.fileobj is wake:
                    wake.recv(4096)
                elif isinstance(key.fileobj, Wire):
                    self.listen(key.fileobj, key.data, selector)
                else:
                    self.copy(key.fileobj, key.data, selector)
            while self._received:
                self.tell_all(self._received.pop(0))
            self.reap()
            if self.until is not None and time.monotonic() >= self.until:
                self.until = None
                self.tell_all(signal.SIGKILL)
        for key in [key for key in selector.get_map().values() if isinstance(key.data, tuple)]:
            self.copy(key.fileobj, key.data, selector, whole=True)
        return self.code or 0

    def plan(self, stack: contextlib.ExitStack) -> list[tuple[str, list[str], dict[str, str]]]:
        """Name, command and variables of each process of this node."""
        world, found = self.world, []
        if self.framework == "mpi":
            if self.node != 0:
                return []
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-mpi-")))
            (folder / "hostfile").write_text(hostfile(world))
            if shutil.which("mpirun") is None:
                raise UsageError("--framework mpi needs mpirun (Open MPI) on the first node's PATH")
            return [("mpirun", mpirun(world, str(folder / "hostfile"), self.command, os.geteuid() == 0), {})]
        for index, told in enumerate(helpers(self.framework, world, self.node)):
            found.append((f"{told['DMLC_ROLE']}{index}", self.command, told))
        for local in range(world.each):
            rank = self.node * world.each + local
            told = variables(self.framework, world, rank)
            devices = devices_of(os.environ.get("CUDA_VISIBLE_DEVICES"), world.each, local)
            if devices is not None and self.framework != "torch":  # torch's programs choose by LOCAL_RANK
                told["CUDA_VISIBLE_DEVICES"] = devices
            found.append((str(rank), self.command, told))
        return found

    def start(self, name: str, command: list[str], told: Mapping[str, str], selector: selectors.BaseSelector) -> None:
        """Start one process; UsageError when there is no such program."""
        try:
            process = subprocess.Popen(
                command,
                env={**os.environ, **told},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        except OSError as error:
            raise UsageError(f"{error.filename or command[0]}: {error.strerror}") from None
        self.processes[name] = process
        if told.get("DMLC_ROLE", "worker") == "worker":
            self.workers.add(name)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        selector.register(process.stdout, selectors.EVENT_READ, (name, bytearray()))

    def copy(
        self, pipe: Any, data: tuple[str, bytearray], selector: selectors.BaseSelector, whole: bool = False
    ) -> None:
        """Print what a process has printed, each line behind its rank where there are several."""
        name, rest = data
        chunk = self._read(pipe)
        rest += chunk or b""
        *lines, last = rest.split(b"\n")
        if (not chunk or whole) and last:
            lines, last = [*lines, last], bytearray()
        rest[:] = last
        prefix = f"{name}| ".encode() if self.world.size > 1 and self.framework != "mpi" else b""
        sys.stdout.buffer.write(b"".join(prefix + line + b"\n" for line in lines))
        sys.stdout.flush()
        if chunk == b"":
            selector.unregister(pipe)
            pipe.close()

    @staticmethod
    def _read(pipe: BinaryIO) -> bytes | None:
        """What lies in a pipe; empty at its end, None when there is nothing yet."""
        try:
            return os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return None

    def reap(self) -> None:
        """Take note of processes that ended."""
        for name, process in list(self.processes.items()):
            status = process.poll()
            if status is None:
                continue
            del self.processes[name]
            self.workers.discard(name)
            code = 128 - status if status < 0 else status
            if code and self.code is None and not self.finished:
                self.fail(code)
        self.finish()

    def finish(self) -> None:
        """Helpers end with the workers: the first node says so when those of all nodes have ended, since a server here
        still serves workers elsewhere."""
        if self.workers or self.finished or self.code is not None:
            return
        if self.node != 0 and not self._said:
            self._said = True
            self.tell(NodeFinished())
        if not self._waiting:
            self.finished = True
            if self.node == 0:
                self.tell(NodeFinished())
            if self.processes:
                self.tell_all(signal.SIGTERM)

    def fail(self, code: int) -> None:
        """The job ends with this code: everywhere."""
        self.code = code
        self.tell(NodeFailed(exit_code=code))
        self.tell_all(signal.SIGTERM)

    def listen(self, wire: Wire, node: str, selector: selectors.BaseSelector) -> None:
        """What another node says."""
        messages = wire.receive()
        for message in messages or ():
            if isinstance(message, NodeFinished):
                self._waiting.discard(node)
            elif isinstance(message, NodeFailed):
                self.lose(wire, node, message.exit_code)
        if messages is None:
            self.lose(wire, node, int(ExitCode.UNFINISHED))
            selector.unregister(wire)

    def lose(self, wire: Wire, node: str, code: int) -> None:
        """A node failed with this code, or is gone before it has finished: so does the job."""
        if node not in self._waiting:
            return
        self._waiting.discard(node)
        if self.code is None:
            self.code = code
            for other in self.wires:  # where this node leads, the others must know
                if other is not wire:
                    self._send(other, NodeFailed(exit_code=code))
            self.tell_all(signal.SIGTERM)

    def over(self) -> bool:
        """Whether nothing is left to wait for: here, and on nodes whose end decides about the job's."""
        return not self.processes and (self.code is not None or not self._waiting)

    def tell(self, message: Message) -> None:
        """Say something to the nodes that this one is connected to."""
        for wire in self.wires:
            self._send(wire, message)

    @staticmethod
    def _send(wire: Wire, message: Message) -> None:
        with contextlib.suppress(ConnectionError):  # its end is noticed where it is read
            wire.send(message)

    def tell_all(self, number: int) -> None:
        """Send a signal to all processes here; after one that asks them to end they have some time for it."""
        for process in self.processes.values():
            process.send_signal(number)
        if number in (signal.SIGTERM, signal.SIGINT) and self.until is None:
            self.until = time.monotonic() + GRACE

    def end(self) -> None:
        """Leave no process behind, whatever happened."""
        end_below()


if __name__ == "__main__":
    sys.exit(main())
