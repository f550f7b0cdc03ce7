"""The process that holds the devices of a node: it answers guards on a Unix socket, and ends leases without them.

It runs as root and is the only part of power control that has to. What it takes is bounded: lines of one kind, from
users of its allow list, for devices of its allow list, within their range; and every raise is a lease.
"""

import contextlib
import fcntl
import grp
import os
import pwd
import selectors
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Literal

from pydantic import Field

from phalanx.cluster.spec import StrictModel
from phalanx.errors import UsageError
from phalanx.recipe.validation_errors import read_user_mapping, validate_value
from phalanx.run.private_files import check_owner
from phalanx_fleet.audit_log import write_audit
from phalanx_fleet.power.control import load_power_fleet, power_state_dir, record_path
from phalanx_fleet.power.devices import CapError, open_cap_devices
from phalanx_fleet.power.messages import MAX_LINE_BYTES, NodeReport, NodeRequest, WireError, format_line, parse_request
from phalanx_fleet.power.node_keeper import NodeKeeper, RecordStore
from phalanx_fleet.power_settings import DEFAULT_SOCKET, CapDeviceSettings

CHECK_INTERVAL_S = 1.0
"""Seconds between two looks at leases and devices."""
MAX_CONNECTIONS = 16
"""More than the guards that may be at work. A further one takes the place of the longest idle one of the user with most
connections."""
RECEIVE_BYTES = 1 << 16
PEER_FORMAT = "iII"
"""SO_PEERCRED: process, user and group as unsigned numbers."""
COPY_BYTES = 1 << 16


class AllowedPeers(StrictModel):
    """Users and groups of this machine that may order caps. root always may."""

    users: list[str] = Field(default_factory=list)
    groups: list[str] = Field(default_factory=list)


class HelperFile(StrictModel):
    """Settings of a helper."""

    allow: AllowedPeers
    devices: CapDeviceSettings = CapDeviceSettings()
    node: str = Field(default_factory=lambda: os.uname().nodename)
    """Name of this node in the fleet file; without it the name of this machine."""
    socket: Path = DEFAULT_SOCKET
    state: Path = Path("/var/lib/phalanx/power")
    """Folder of the record and the audit log."""
    without_record: Literal["lowest", "keep"] = "lowest"
    """Caps of the devices when there is no record: the lowest, since it may be lost; or as they are, for the first
    start on a node with jobs."""


def load_helper_file(path: Path) -> HelperFile:
    """Load a helper's file. Raises RecipeError for what is wrong in it, UsageError where other users may change it."""
    check_owner(path, "the file of the power helper")
    value, locations = read_user_mapping(path, "`allow:`")
    file = validate_value(value, locations, HelperFile)
    PeerList(file.allow)
    return file


def _find_id(kind: str, name: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid if kind == "user" else grp.getgrnam(name).gr_gid
    except (KeyError, ValueError):  # ValueError: a name with a zero byte
        raise UsageError(f"allow: this machine has no {kind} {name!r}") from None


class PeerList:
    """Which processes may order: by the user and groups that the kernel reports for the other end of a socket.

    Raises UsageError for a user or group that this machine does not have.
    """

    def __init__(self, allow: AllowedPeers):
        self._uids = {0, *(_find_id("user", name) for name in allow.users)}
        self._gids = {_find_id("group", name) for name in allow.groups}

    def find_refusal(self, uid: int, gid: int) -> str:
        """Return why a process may not order; empty if it may. A user directory on the network is asked only
        about users that are allowed neither by their number nor by their main group."""
        if uid in self._uids or gid in self._gids:
            return ""
        try:
            name = pwd.getpwuid(uid).pw_name
            groups = set(os.getgrouplist(name, gid)) if self._gids else set()
        except KeyError:
            name, groups = str(uid), set()
        if groups & self._gids:
            return ""
        return f"user {name} may not use this helper; add the user or a group to `allow` in its file"


@dataclass(eq=False)
class Connection:
    """A process that may ask. `heard_at`: when it was opened, or has asked last."""

    socket: socket.socket
    uid: int
    heard_at: float
    received: bytearray = field(default_factory=bytearray)


class NodeHelper:
    """Serves requests for one node.

    Args:
        keeper: Holds the devices.
        audit: File for orders.
        peers: Users that may order.
    """

    def __init__(self, node: str, keeper: NodeKeeper, audit: Path, peers: PeerList):
        self._node, self._keeper, self._audit, self._peers = node, keeper, audit, peers
        self._selector = selectors.DefaultSelector()
        self._connections: set[Connection] = set()
        self._listener: socket.socket | None = None
        self._last_order: dict[str, object] = {}

    def listen(self, path: Path) -> None:
        """Accept connections at `path`; anyone may connect, and the kernel names the user."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen()
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)

    def add_connection(self, peer: socket.socket) -> None:
        """Serve a socket that is connected. A user that may not ask gets the reason, and holds no connection."""
        size = struct.calcsize(PEER_FORMAT)
        _, uid, gid = struct.unpack(PEER_FORMAT, peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        peer.setblocking(False)
        if refusal := self._peers.find_refusal(uid, gid):
            with contextlib.suppress(OSError), peer:
                peer.send(format_line(NodeReport(self._node, "", 0, 0, 0, "", refusal=refusal)))
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            counts = Counter(each.uid for each in self._connections)
            self._close(max(self._connections, key=lambda each: (counts[each.uid], -each.heard_at)))
        connection = Connection(peer, uid, time.monotonic())
        self._connections.add(connection)
        self._selector.register(peer, selectors.EVENT_READ, connection)

    def _close(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def serve(self, tick: Callable[[], None] = lambda: None) -> None:
        """Answer until there is neither a listener nor a connection. `tick` is called once a second. At the end leases
        end, also by an exception."""
        next_check = 0.0
        try:
            while self._listener is not None or self._connections:
                for key, _ in self._selector.select(CHECK_INTERVAL_S / 2):
                    if key.data is None:
                        self._accept()
                    elif key.data in self._connections:  # another one of this turn may have taken its place
                        self._receive(key.data)
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + CHECK_INTERVAL_S
                    self._keeper.check_lease()
                    tick()
        finally:
            self._keeper.end_lease()

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError, ConnectionError):
            peer, _ = self._listener.accept()
            self.add_connection(peer)

    def _receive(self, connection: Connection) -> None:
        try:
            part = connection.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        connection.received += part
        connection.heard_at = time.monotonic()
        is_open = bool(part) and len(connection.received) <= MAX_LINE_BYTES
        while is_open and b"\n" in connection.received:
            line, _, connection.received = connection.received.partition(b"\n")
            is_open = self._answer(connection, bytes(line))
        if not is_open:
            self._close(connection)

    def _answer(self, connection: Connection, line: bytes) -> bool:
        """Return whether the connection stays."""
        try:
            request = parse_request(line)
        except WireError:
            return False
        report = self._carry_out(connection, request)
        try:  # a report is smaller than the buffer of a socket: a peer that does not read has several waiting
            return connection.socket.send(line := format_line(report)) == len(line)
        except OSError:
            return False

    def _carry_out(self, connection: Connection, request: NodeRequest) -> NodeReport:
        report = self._keeper.answer(request)
        if not (request.is_order or request.takes_over):
            return report
        order: dict[str, object] = {
            "caps_w": request.caps_w,
            "releases": request.releases,
            "takes_over": request.takes_over,
        }
        order |= {"writer": request.writer, "epoch": request.epoch, "refusal": report.refusal}
        if order == self._last_order:  # renews a lease
            return report
        self._last_order = order
        try:
            write_audit(self._audit, [{"node": self._node, **order}], _user_name(connection.uid))
        except OSError as error:  # a full disk must not keep caps from being lowered
            return replace(report, problems=(*report.problems, f"the audit log: {error.strerror}"))
        return report


def notify_service_manager(text: str) -> None:
    """Send systemd the state of this service, such as READY=1; nothing without systemd, or while it restarts."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(text.encode(), "\0" + address[1:] if address.startswith("@") else address)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def describe_helper(file: HelperFile) -> list[str]:
    """Return what a helper would hold, and each write of its start. Raises UsageError without devices."""
    keeper = _make_keeper(file, is_read_only=True)
    allowed = [*file.allow.users, *(f"group {name}" for name in file.allow.groups), "root"]
    lines = [f"node {file.node}: {file.socket}, for {', '.join(allowed)}"]
    for device in keeper.describe_devices():
        cap = "does not answer" if device.cap_w is None else f"{device.cap_w:.0f} W"
        lines.append(f"{device.id}: {cap}; takes {device.min_w:.0f} to {device.max_w:.0f} W")
    lines += [f"lower {id}: {now or 0:.0f} W to {then:.0f} W" for id, now, then in keeper.start_writes]
    return lines


def run_helper(file: HelperFile) -> None:
    """Hold the devices of this node until an exception; then leases end."""
    with _lock_devices(file.state / "helper.lock"):
        helper = NodeHelper(file.node, _make_keeper(file), file.state / "audit.jsonl", PeerList(file.allow))
        helper.listen(file.socket)
        notify_service_manager("READY=1")
        helper.serve(tick=lambda: notify_service_manager("WATCHDOG=1"))


def keep_own_node(fleet: Path) -> None:
    """Hold the devices of this machine for the guard at the other end of standard input, until it ends."""
    found = load_power_fleet(fleet)
    node, record = os.uname().nodename, record_path(found)
    file = HelperFile(allow=AllowedPeers(users=[pwd.getpwuid(os.getuid()).pw_name]), devices=found.settings.devices)
    with _lock_devices(record.with_suffix(".lock")):
        try:
            keeper = NodeKeeper(node, open_cap_devices(file.devices), RecordStore(record))
        except CapError as error:
            raise UsageError(str(error)) from None
        helper = NodeHelper(node, keeper, power_state_dir(found) / "node-audit.jsonl", PeerList(file.allow))
        helper.add_connection(socket.socket(fileno=os.dup(sys.stdin.fileno())))
        helper.serve()


def connect_streams(path: Path) -> None:
    """Copy between the standard streams and the helper's socket, until one of them ends.

    Raises UsageError where no helper listens.
    """
    helper = socket.socket(socket.AF_UNIX)
    try:
        helper.connect(str(path))
    except OSError as error:
        raise UsageError(
            f"{path}: no helper listens ({error.strerror}); start `phalanx power node FILE --yes`"
        ) from None
    outputs = {sys.stdin.fileno(): helper.fileno(), helper.fileno(): sys.stdout.fileno()}
    with helper, selectors.DefaultSelector() as selector:
        for source in outputs:
            selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                part = os.read(key.fd, COPY_BYTES)
                if not part and key.fd == helper.fileno():
                    return
                if not part:  # its last answers are still to come
                    helper.shutdown(socket.SHUT_WR)
                    selector.unregister(key.fd)
                try:
                    while part:
                        part = part[os.write(outputs[key.fd], part) :]
                except BrokenPipeError:
                    if key.fd == helper.fileno():
                        return
                    selector.unregister(key.fd)  # the helper takes no more; why is still to come


def _make_keeper(file: HelperFile, is_read_only: bool = False) -> NodeKeeper:
    record = file.state / "record.json"
    starts_lowest = file.without_record == "lowest" and not record.exists()
    try:
        devices = open_cap_devices(file.devices)
        return NodeKeeper(
            file.node, devices, RecordStore(record), starts_lowest=starts_lowest, is_read_only=is_read_only
        )
    except CapError as error:
        raise UsageError(f"{file.node}: {error}") from None


def _lock_devices(path: Path) -> IO[str]:
    """Return the lock of this machine's caps, which its process holds until it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - held as long as the process runs
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UsageError(
            f"{path}: another guard writes the caps of this machine. End it first; its leases end with it"
        ) from None
    return file
