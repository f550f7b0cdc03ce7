"""Launch a program of any framework on one node: `python -m phalanx.jobs.frameworks.launcher FRAMEWORK PROCESSES --
COMMAND`.

The nodes exchange addresses and free ports on the control channel, and each starts its processes with the environment
variables of the framework. When a process fails, all processes on all nodes end with its exit code. The backend decides
by this code whether to restart the job.
"""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO

from phalanx.deadline import POLL_INTERVAL_S, Deadline, print_status
from phalanx.errors import ExitCode, PhalanxError, UsageError
from phalanx.jobs.agent.node_group import find_incompatibility, make_hello
from phalanx.jobs.frameworks.process_env import make_process_variables, select_visible_devices
from phalanx.jobs.signal_queue import SignalQueue, kill_descendants
from phalanx.logging_config import configure_logging
from phalanx.process_lifetime import become_subreaper, die_with_parent
from phalanx.run.authentication import load_token, open_listener
from phalanx.run.control_channel import AuthConnection, ControlServer, connect_to_leader
from phalanx.run.event_loop import EventLoop
from phalanx.run.messages import Message
from phalanx.run.node_env import NodeEnv
from phalanx.run.process_messages import LauncherHello, Leave, NodeFailed, NodeFinished, Topology

JOIN_TIMEOUT_S = 600.0
"""Seconds for all nodes to join."""
CONNECT_RETRY_INTERVAL_S = 0.2


class RendezvousError(PhalanxError):
    """The rendezvous of the nodes failed."""

    code = ExitCode.UNFINISHED


def join_nodes(
    node_env: NodeEnv, nproc_per_node: int, stack: contextlib.ExitStack, check_stop: Callable[[], None] = lambda: None
) -> tuple[Topology, list[AuthConnection]]:
    """All nodes of the job, and this node's connections: from the leader to all others, else to the leader.
    `check_stop` is called each second or so."""
    ports = find_free_ports(nproc_per_node + 1)
    if node_env.leader_address is None:
        return Topology(hosts=("127.0.0.1",), nproc_per_node=nproc_per_node, ports=(ports,)), []
    if node_env.node_rank == 0:
        return _accept_nodes(node_env, nproc_per_node, ports, stack, check_stop)
    host, port = node_env.leader_address
    deadline = Deadline(f"node 0 at {host}:{port}", JOIN_TIMEOUT_S)
    while True:
        check_stop()
        try:
            connection = connect_to_leader(node_env.leader_address, load_token())
            break
        except OSError as error:
            if deadline.check_expired():
                raise RendezvousError(f"node 0 cannot be reached at {host}:{port}: {error}") from None
            time.sleep(CONNECT_RETRY_INTERVAL_S)  # there is no notification when node 0 begins to listen
    stack.callback(connection.close)
    address = connection.sock.getsockname()[0]
    identity = asdict(make_hello(node_env.node_rank, node_env.num_nodes))
    connection.send(LauncherHello(**identity, address=address, ports=ports, nproc_per_node=nproc_per_node))
    deadline = Deadline("all nodes to come", JOIN_TIMEOUT_S)
    while not (messages := connection.wait(POLL_INTERVAL_S)):
        if messages is None:
            raise RendezvousError("node 0 is gone before all nodes had come")
        check_stop()
        if deadline.check_expired():
            raise RendezvousError(f"not all nodes came within {JOIN_TIMEOUT_S:.0f} s")
    first = messages[0]
    if isinstance(first, Leave):
        raise UsageError(first.message or "node 0 rejects this node")
    if not isinstance(first, Topology):
        raise UsageError("node 0 runs something else than this node")
    return first, [connection]


def _accept_nodes(
    node_env: NodeEnv,
    nproc_per_node: int,
    ports: tuple[int, ...],
    stack: contextlib.ExitStack,
    check_stop: Callable[[], None],
) -> tuple[Topology, list[AuthConnection]]:
    assert node_env.leader_address is not None
    server = stack.enter_context(ControlServer(node_env.leader_address, load_token()))
    expected_hello = make_hello(0, node_env.num_nodes)
    joined: dict[int, tuple[AuthConnection, LauncherHello]] = {}
    deadline = Deadline(_describe_missing(node_env, joined), JOIN_TIMEOUT_S)
    server.wake_socket.settimeout(POLL_INTERVAL_S)
    while len(joined) < node_env.num_nodes - 1:
        deadline.what = _describe_missing(node_env, joined)
        check_stop()
        try:
            server.wake_socket.recv(1)
        except TimeoutError:
            if deadline.check_expired():
                raise RendezvousError(f"{deadline.what} did not come within {JOIN_TIMEOUT_S:.0f} s") from None
            continue
        connection, hello = server.joins.get()
        stack.callback(connection.close)
        node, starts = hello.node_rank, hello.nproc_per_node if isinstance(hello, LauncherHello) else None
        mismatch = find_incompatibility(hello, expected_hello)
        if mismatch is None and starts != nproc_per_node:
            mismatch = f"it starts {starts} processes, and the leading node {nproc_per_node}"
        if mismatch is not None:
            print_status(f"node {node} ({hello.host}) was sent away: {mismatch}")
            with contextlib.suppress(ConnectionError):  # it is gone already
                connection.send(Leave(exit_code=int(ExitCode.USAGE), message=mismatch))
        elif isinstance(hello, LauncherHello) and 0 < node < node_env.num_nodes:
            joined[node] = connection, hello
    others = [joined[node][1] for node in sorted(joined)]
    # by the address at which the first of them reached this node: its name may lead elsewhere here
    own_address = joined[min(joined)][0].sock.getsockname()[0]
    topology = Topology(
        hosts=(own_address, *(hello.address for hello in others)),
        nproc_per_node=nproc_per_node,
        ports=(ports, *(hello.ports for hello in others)),
    )
    connections = [joined[node][0] for node in sorted(joined)]
    for node, connection in zip(sorted(joined), connections, strict=True):
        try:
            connection.send(topology)
        except ConnectionError:
            raise RendezvousError(f"node {node} is gone before all nodes had come") from None
    return topology, connections


def _describe_missing(node_env: NodeEnv, joined: Collection[int]) -> str:
    missing = [str(node) for node in range(1, node_env.num_nodes) if node not in joined]
    return f"{'node' if len(missing) == 1 else 'nodes'} {', '.join(missing)}"


def find_free_ports(count: int) -> tuple[int, ...]:
    """Ports that are free now. Frameworks open them later by their number, so another program may be quicker."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(open_listener("", 0)) for _ in range(count)]
        return tuple(sock.getsockname()[1] for sock in socks)


logger = logging.getLogger("phalanx.jobs.frameworks.launcher")  # its __name__ is __main__ under `python -m`

EXIT_GRACE_S = 30.0
"""Seconds for processes to end after SIGTERM."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this node's part of the job; returns its exit code."""
    framework, nproc_per_node, _, *command = sys.argv[1:] if arguments is None else arguments
    try:
        configure_logging()
        node_env = NodeEnv.from_environment(os.environ)
        with contextlib.ExitStack() as stack:
            with SignalQueue() as signals:

                def check_stop() -> None:
                    """A node that a signal kills takes the others with it."""
                    if signals.received:
                        raise RendezvousError("asked to stop before all nodes had come")

                topology, connections = join_nodes(node_env, int(nproc_per_node), stack, check_stop)
            what = f"{int(nproc_per_node)} {framework} processes on each of {topology.hosts}"
            logger.info("node %d: %s", node_env.node_rank, what)
            return NodeLauncher(framework, topology, node_env.node_rank, command, connections).run(stack)
    except PhalanxError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.code)


@dataclass
class ProcessOutput:
    """The output of a process, and the beginning of the line that it has not finished."""

    name: str
    pipe: IO[bytes]
    partial_line: bytes = b""


class NodeLauncher:
    """One node's processes of the job."""

    def __init__(
        self,
        framework: str,
        topology: Topology,
        node_rank: int,
        command: Sequence[str],
        connections: Sequence[AuthConnection],
    ):
        self.framework, self.topology, self.node_rank, self.command = framework, topology, node_rank, list(command)
        self.connections = list(connections)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.exit_code: int | None = None
        """Of the whole job, when it is known."""
        self.loop = EventLoop()
        self._outputs: list[ProcessOutput] = []
        self._is_killing = False
        self._is_finish_sent = False
        self._unfinished_nodes = {f"node {index + 1 if node_rank == 0 else 0}" for index, _ in enumerate(connections)}

    def run(self, stack: contextlib.ExitStack) -> int:
        """Start the processes, pass on what they print, and see them all to their end, also those of other nodes."""
        become_subreaper()
        signals = stack.enter_context(SignalQueue(wake_on_child_exit=True))
        stack.callback(kill_descendants)  # leave no process behind, whatever happened
        stack.enter_context(self.loop)
        self.loop.add_reader(signals.wake_socket, signals.clear_wake)
        for index, connection in enumerate(self.connections):
            node = f"node {index + 1 if self.node_rank == 0 else 0}"
            self.loop.add_reader(connection, partial(self.handle_node_messages, connection, node))
        for name, command, environment in self.plan_processes(stack):
            self.start_process(name, command, environment)
        self.check_finished()  # an external launcher may have started the processes of this node
        while not self.is_over():
            self.loop.run_once()
            while signals.received:
                self.signal_processes(signals.received.pop(0))
            self.reap_processes()
        for output in list(self._outputs):
            self.copy_output(output, is_last=True)
        return self.exit_code or 0

    def plan_processes(self, stack: contextlib.ExitStack) -> list[tuple[str, list[str], dict[str, str]]]:
        """Name, command and variables of each process of this node."""
        topology, found = self.topology, []
        if self.framework == "mpi":
            if self.node_rank != 0:
                return []
            if shutil.which("mpirun") is None:
                raise UsageError("--framework mpi needs mpirun (Open MPI) on the first node's PATH")
            hostfile = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-mpi-"))) / "hostfile"
            hostfile.write_text("".join(f"{host} slots={topology.nproc_per_node}\n" for host in topology.hosts))
            launch = ["mpirun", "-n", str(topology.world_size), "--hostfile", str(hostfile)]
            # Open MPI refuses to run as root without this option, and containers usually run as root
            launch += ["--allow-run-as-root"] if os.geteuid() == 0 else []
            return [("mpirun", [*launch, *self.command], {})]
        for local in range(topology.nproc_per_node):
            rank = self.node_rank * topology.nproc_per_node + local
            process_env = make_process_variables(self.framework, topology, rank)
            devices = select_visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), topology.nproc_per_node, local)
            if devices is not None and self.framework != "torch":  # torch's programs choose by LOCAL_RANK
                process_env["CUDA_VISIBLE_DEVICES"] = devices
            found.append((str(rank), self.command, process_env))
        return found

    def start_process(self, name: str, command: list[str], process_env: Mapping[str, str]) -> None:
        """Start one process. Raises UsageError when the program does not exist."""
        try:
            process = subprocess.Popen(
                command,
                env={**os.environ, **process_env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        except OSError as error:
            raise UsageError(f"{error.filename or command[0]}: {error.strerror}") from None
        self.processes[name] = process
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        output = ProcessOutput(name, process.stdout)
        self._outputs.append(output)
        self.loop.add_reader(process.stdout, partial(self.copy_output, output))

    def copy_output(self, output: "ProcessOutput", is_last: bool = False) -> None:
        """Print what a process has printed, each line behind its rank where there are several."""
        chunk = None  # nothing is available
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(output.pipe.fileno(), 1 << 16)
        *lines, last = (output.partial_line + (chunk or b"")).split(b"\n")
        if (not chunk or is_last) and last:
            lines, last = [*lines, last], b""
        output.partial_line = last
        prefix = f"{output.name}| ".encode() if self.topology.world_size > 1 and self.framework != "mpi" else b""
        sys.stdout.buffer.write(b"".join(prefix + line + b"\n" for line in lines))
        sys.stdout.flush()
        if chunk == b"":
            self.loop.remove_reader(output.pipe)
            self._outputs.remove(output)
            output.pipe.close()

    def reap_processes(self) -> None:
        for name, process in list(self.processes.items()):
            status = process.poll()
            if status is None:
                continue
            del self.processes[name]
            code = 128 - status if status < 0 else status
            if code and self.exit_code is None:
                self.fail_job(code)
        self.check_finished()

    def check_finished(self) -> None:
        """Report to the first node that the processes of this one have ended, and from it that those of all have."""
        if self.processes or self._is_finish_sent or self.exit_code is not None:
            return
        if self.node_rank != 0 or not self._unfinished_nodes:
            self._is_finish_sent = True
            self.broadcast(NodeFinished())

    def fail_job(self, code: int, source: AuthConnection | None = None) -> None:
        """End the job with this exit code on all nodes; that at `source` knows it."""
        self.exit_code = code
        self.broadcast(NodeFailed(exit_code=code), source)
        self.signal_processes(signal.SIGTERM)

    def handle_node_messages(self, connection: AuthConnection, node: str) -> None:
        messages = connection.receive()
        for message in messages or ():
            if isinstance(message, NodeFinished):
                self._unfinished_nodes.discard(node)
            elif isinstance(message, NodeFailed):
                self.lose(connection, node, message.exit_code)
        if messages is None:
            self.lose(connection, node, int(ExitCode.UNFINISHED))
            self.loop.remove_reader(connection)

    def lose(self, connection: AuthConnection, node: str, code: int) -> None:
        """Fail the job after a node failed with this code, or was lost before it finished."""
        if node not in self._unfinished_nodes:
            return
        self._unfinished_nodes.discard(node)
        if self.exit_code is None:
            self.fail_job(code, connection)

    def is_over(self) -> bool:
        """Whether this node and all nodes that determine the end of the job have finished."""
        return not self.processes and (self.exit_code is not None or not self._unfinished_nodes)

    def broadcast(self, message: Message, source: AuthConnection | None = None) -> None:
        """Send a message to all connected nodes but that at `source`."""
        for connection in self.connections:
            if connection is not source:
                with contextlib.suppress(ConnectionError):  # its end is noticed where it is read
                    connection.send(message)

    def signal_processes(self, number: int) -> None:
        """Send a signal to all local processes. After SIGTERM or SIGINT they get `EXIT_GRACE_S` to end."""
        for process in self.processes.values():
            process.send_signal(number)
        if number in (signal.SIGTERM, signal.SIGINT) and not self._is_killing:
            self._is_killing = True
            self.loop.set_timer(self._kill, time.monotonic() + EXIT_GRACE_S)

    def _kill(self) -> None:
        self._is_killing = False
        self.signal_processes(signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
