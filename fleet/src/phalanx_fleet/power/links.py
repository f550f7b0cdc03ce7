"""How a guard reaches nodes. Requests and reports may be late, lost, or arrive twice: nothing waits for one.

A helper of this machine is reached by its socket, others by a command such as ssh, which connects its standard streams
to theirs: nothing listens on a network. A node that cannot be reached is silent, and tried again later. Nothing here
waits for a node, also not for the end of a process that carried a connection: a step of a guard takes the same time
with nodes that hang."""

import contextlib
import logging
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from phalanx.run.boot_clock import seconds_since_boot
from phalanx_fleet.power.messages import MAX_LINE_BYTES, NodeReport, NodeRequest, WireError, format_line, parse_report
from phalanx_fleet.power.node_keeper import NodeKeeper

ANSWER_POLL_S = 0.05
"""From one look at what has arrived to the next, where an answer is waited for."""
logger = logging.getLogger(__name__)
RETRY_AFTER_S = 10.0
MAX_WAITING_BYTES = 1 << 16
"""Requests that a peer has not taken; more are dropped, as on a network."""
RECEIVE_BYTES = 1 << 16
MAX_RECEIVES = 16
"""At a time: a node that floods its guard must not keep it from the others."""
ANSWER_TIMEOUT_S = 30.0
"""From a request to the end of a connection on which nothing arrives: a start of ssh and Python on a busy node."""
END_TIMEOUT_S = 5.0
"""For a process after the end of its connection: a keeper ends its leases first."""
MAX_ERROR_BYTES = 1 << 12
CLOSED_TEXT = "the helper has closed the connection"


class NodeLinks(Protocol):
    """Carries messages to and from nodes. `problems`: why nodes are not reached."""

    problems: dict[str, str]

    def send(self, node: str, request: NodeRequest) -> None:
        """Send a request, without waiting. A node that cannot be reached is silent."""

    def receive(self) -> list[NodeReport]:
        """Return the reports that have arrived since the last call."""

    def count_reachable(self) -> int:
        """Return how many nodes may answer what was sent to them."""

    def close(self) -> None:
        """End the connections; what nodes were lent ends by their leases."""


def ask_nodes(
    links: NodeLinks,
    requests: Mapping[str, NodeRequest],
    timeout_s: float,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = seconds_since_boot,
) -> dict[str, NodeReport]:
    """Send a request to each node, and return the answers that come in time. Other reports are dropped."""
    for node, request in requests.items():
        links.send(node, request)
    reports: dict[str, NodeReport] = {}
    until = now() + timeout_s
    while True:
        arrived = [each for each in links.receive() if each.node in requests]
        reports |= {each.node: each for each in arrived if each.seq == requests[each.node].seq}
        if len(reports) >= min(len(requests), links.count_reachable()) or now() >= until:
            return reports
        sleep(ANSWER_POLL_S)


class LocalLinks:
    """Nodes of which the keepers are in this process."""

    def __init__(self, keepers: Mapping[str, NodeKeeper]):
        self._keepers = keepers
        self._reports: list[NodeReport] = []
        self.problems: dict[str, str] = {}

    def send(self, node: str, request: NodeRequest) -> None:
        """Have the node answer at once."""
        if node in self._keepers:
            self._reports.append(self._keepers[node].answer(request))

    def receive(self) -> list[NodeReport]:
        """Return all answers; keepers end leases meanwhile."""
        for keeper in self._keepers.values():
            keeper.check_lease()
        reports, self._reports = self._reports, []
        return reports

    def count_reachable(self) -> int:
        return len(self._keepers)

    def close(self) -> None:
        """End all leases now: nothing else would, once this process is gone."""
        for keeper in self._keepers.values():
            keeper.end_lease()


@dataclass
class HelperConnection:
    """An open way to a helper. `process`: what carries it; its standard error does not block. `asked_at`: when the
    first request since the last report was sent."""

    socket: socket.socket
    process: subprocess.Popen[bytes] | None = None
    waiting: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)
    printed: bytes = b""
    has_reported: bool = False
    asked_at: float | None = None

    def exchange(self) -> tuple[list[bytes], bool]:
        """Send what waits, and return the lines that have arrived, and whether the connection is open."""
        self._read_errors()
        with contextlib.suppress(OSError):  # what a helper has said before it closed the connection is still to come
            if self.waiting:
                del self.waiting[: self.socket.send(self.waiting)]
        is_open = True
        try:
            for _ in range(MAX_RECEIVES):
                part = self.socket.recv(RECEIVE_BYTES)
                self.received += part
                is_open = bool(part)
                if not is_open:
                    break
        except BlockingIOError:
            pass
        except OSError:
            is_open = False
        *lines, rest = self.received.split(b"\n")
        self.received = bytearray(rest)
        return [bytes(line) for line in lines], is_open and len(rest) <= MAX_LINE_BYTES

    def find_end(self) -> str | None:
        """Return what the process has printed last; None while it still runs. Without a process, a fixed text."""
        if self.process is None:
            return CLOSED_TEXT
        if self.process.poll() is None:
            return None
        self._read_errors()
        assert self.process.stderr is not None
        self.process.stderr.close()
        lines = self.printed.decode(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("error: ") if lines else f"exit code {self.process.returncode}"

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the process and what it has started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def _read_errors(self) -> None:
        """Take what the process has printed: it stops when the pipe of its errors is full."""
        if self.process is not None and self.process.stderr is not None and not self.process.stderr.closed:
            with contextlib.suppress(OSError):
                part = os.read(self.process.stderr.fileno(), RECEIVE_BYTES)
                self.printed = (self.printed + part)[-MAX_ERROR_BYTES:]


Connect = Callable[[], HelperConnection]


def connect_to_socket(path: Path) -> HelperConnection:
    """Connect to the helper of this machine. Raises OSError."""
    found = socket.socket(socket.AF_UNIX)
    found.setblocking(False)  # before: a helper that accepts none would keep it waiting
    try:
        found.connect(str(path))
    except OSError:
        found.close()
        raise
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
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
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
        self._ending: list[tuple[str, HelperConnection, float]] = []
        """Nodes, connections that are closed, and until when their processes may end without a signal."""
        self._reports: list[NodeReport] = []
        self.problems: dict[str, str] = {}
        """Why a node is not reached."""

    def send(self, node: str, request: NodeRequest) -> None:
        """Send a request, without waiting; drop it where a node does not take it."""
        connection = self._open.get(node) or self._connect(node)
        if connection is not None and len(connection.waiting) < MAX_WAITING_BYTES:
            connection.waiting += format_line(request)
            connection.asked_at = self._now() if connection.asked_at is None else connection.asked_at
            self._exchange(node, connection)

    def receive(self) -> list[NodeReport]:
        for node, connection in list(self._open.items()):
            self._exchange(node, connection)
        self._reap()
        reports, self._reports = self._reports, []
        return reports

    def count_reachable(self) -> int:
        """Return the nodes that may still answer, or say why they do not."""
        return len(self._open) + len(self._ending)

    def close(self) -> None:
        """End the connections. Helpers end the leases when they run out. All processes together have END_TIMEOUT_S."""
        for node, connection in self._open.items():
            self._end(node, connection)
        self._open.clear()
        until = self._now() + END_TIMEOUT_S
        for _, connection, _ in self._ending:
            if connection.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    connection.process.wait(max(0.0, until - self._now()))
        for _, connection, _ in self._ending:
            if connection.find_end() is None and connection.process is not None:
                connection.send_signal(signal.SIGKILL)
                connection.process.wait()
                connection.find_end()
        self._ending.clear()

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
                if connection.has_reported:
                    is_open = False
                    break
                continue  # a login may print a greeting
            connection.has_reported, connection.asked_at = True, None
            if report.node != node:
                self._report_problem(node, f"the helper there is of node {report.node}; set `node` in its file")
            elif report.seq == 0:  # before any request: it takes none from this user
                self._report_problem(node, report.refusal)
            else:
                self._reports.append(report)
                self.problems.pop(node, None)
        if is_open and connection.asked_at is not None and self._now() - connection.asked_at > ANSWER_TIMEOUT_S:
            self._report_problem(node, f"no answer for {ANSWER_TIMEOUT_S:g} s")
            is_open = False
        if not is_open:
            del self._open[node]
            self._end(node, connection)
            self._reap()

    def _end(self, node: str, connection: HelperConnection) -> None:
        connection.socket.close()
        self._ending.append((node, connection, self._now() + END_TIMEOUT_S))

    def _reap(self) -> None:
        """Take leave of processes that have ended, and end those that take too long."""
        left = []
        for node, connection, until in self._ending:
            text = connection.find_end()
            if text is None:
                if self._now() >= until:
                    connection.send_signal(signal.SIGKILL if self._now() >= until + END_TIMEOUT_S else signal.SIGTERM)
                left.append((node, connection, until))
            elif node not in self.problems and node not in self._open:
                self._report_problem(node, text)
        self._ending = left

    def _report_problem(self, node: str, text: str) -> None:
        if self.problems.get(node) != text:
            logger.info("power: %s: %s", node, text)
        self.problems[node] = text


def is_listening(path: Path) -> bool:
    with contextlib.suppress(OSError):
        connect_to_socket(path).socket.close()
        return True
    return False
