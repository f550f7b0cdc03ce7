"""Reach the helpers of nodes: the one of this machine by its socket, others by a command such as ssh, which connects
its standard streams to theirs. Nothing listens on a network.

A node that cannot be reached is silent, and tried again later.
"""

import contextlib
import logging
import os
import shlex
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.fleet.power.messages import MAX_LINE_BYTES, NodeReport, NodeRequest, WireError, format_line, parse_report
from phalanx.run.boot_clock import seconds_since_boot

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 10.0
MAX_WAITING_BYTES = 1 << 16
"""Requests that a peer has not taken; more are dropped, as on a network."""
RECEIVE_BYTES = 1 << 16
END_TIMEOUT_S = 5.0


@dataclass
class HelperConnection:
    """An open way to a helper. `process`: what carries it."""

    socket: socket.socket
    process: subprocess.Popen[bytes] | None = None
    waiting: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)

    def exchange(self) -> tuple[list[bytes], bool]:
        """Send what waits, and return the lines that have arrived, and whether the connection is open."""
        is_open = True
        try:
            if self.waiting:
                del self.waiting[: self.socket.send(self.waiting)]
            while part := self.socket.recv(RECEIVE_BYTES):
                self.received += part
            is_open = False
        except BlockingIOError:
            pass
        except OSError:
            is_open = False
        *lines, rest = self.received.split(b"\n")
        self.received = bytearray(rest)
        return [bytes(line) for line in lines], is_open and len(rest) <= MAX_LINE_BYTES

    def close(self) -> str:
        """End it; return what the process has printed last."""
        self.socket.close()
        if self.process is None:
            return "the helper has closed the connection"
        try:  # a keeper ends leases when its connection ends, and then itself
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)
        lines = (self.process.stderr.read() or b"").decode(errors="replace").strip().splitlines()
        self.process.stderr.close()
        return lines[-1].removeprefix("error: ") if lines else f"exit code {self.process.returncode}"


Connect = Callable[[], HelperConnection]


def connect_to_socket(path: Path) -> HelperConnection:
    """Connect to the helper of this machine. Raises OSError."""
    found = socket.socket(socket.AF_UNIX)
    try:
        found.connect(str(path))
    except OSError:
        found.close()
        raise
    found.setblocking(False)
    return HelperConnection(found)


def connect_by_command(words: Sequence[str]) -> HelperConnection:
    """Start a command and speak to it by its standard streams. Raises OSError."""
    own, other = socket.socketpair()
    with other:
        try:  # in a session of its own: Ctrl-C is for the guard, which then ends leases in order
            process = subprocess.Popen(
                list(words), stdin=other.fileno(), stdout=other.fileno(), stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError:
            own.close()
            raise
    own.setblocking(False)
    return HelperConnection(own, process)


def expand_command(command: str, node: str) -> list[str]:
    """Return the words of a command for a node."""
    return [word.replace("{node}", node) for word in shlex.split(command)]


class HelperLinks:
    """Nodes with helpers. `connect_by_node`: how each is reached."""

    def __init__(self, connect_by_node: Mapping[str, Connect], now: Callable[[], float] = seconds_since_boot):
        self._connect_by_node, self._now = connect_by_node, now
        self._open: dict[str, HelperConnection] = {}
        self._retry_at: dict[str, float] = {}
        self._reports: list[NodeReport] = []
        self.problems: dict[str, str] = {}
        """Why a node is not reached."""

    def send(self, node: str, request: NodeRequest) -> None:
        """Send a request, without waiting; drop it where a node does not take it."""
        connection = self._open.get(node) or self._connect(node)
        if connection is not None and len(connection.waiting) < MAX_WAITING_BYTES:
            connection.waiting += format_line(request)
            self._exchange(node, connection)

    def receive(self) -> list[NodeReport]:
        """Return the reports that have arrived."""
        for node, connection in list(self._open.items()):
            self._exchange(node, connection)
        reports, self._reports = self._reports, []
        return reports

    def count_reachable(self) -> int:
        """Return the nodes that may still answer."""
        return len(self._open)

    def close(self) -> None:
        """End the connections. Helpers end the leases when they run out."""
        for connection in self._open.values():
            connection.socket.close()
        for connection in self._open.values():
            connection.close()
        self._open.clear()

    def _connect(self, node: str) -> HelperConnection | None:
        connect = self._connect_by_node.get(node)
        if connect is None or self._now() < self._retry_at.get(node, 0.0):
            return None
        self._retry_at[node] = self._now() + RETRY_AFTER_S
        try:
            connection = self._open[node] = connect()
        except OSError as error:
            self._report_problem(node, error.strerror or str(error))
            return None
        return connection

    def _exchange(self, node: str, connection: HelperConnection) -> None:
        lines, is_open = connection.exchange()
        for line in lines:
            try:
                report = parse_report(line)
            except WireError as error:
                self._report_problem(node, str(error))
                is_open = False
                break
            if report.node != node:
                self._report_problem(node, f"the helper there is of node {report.node}; set `node` in its file")
            else:
                self._reports.append(report)
                self.problems.pop(node, None)
        if not is_open:
            del self._open[node]
            text = connection.close()
            if node not in self.problems:
                self._report_problem(node, text)

    def _report_problem(self, node: str, text: str) -> None:
        if self.problems.get(node) != text:
            logger.info("power: %s: %s", node, text)
        self.problems[node] = text


def is_listening(path: Path) -> bool:
    """Return whether a helper listens at `path`."""
    with contextlib.suppress(OSError):
        connect_to_socket(path).socket.close()
        return True
    return False
