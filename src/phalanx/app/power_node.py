"""Run the helper of a node, the keeper of a guard without a helper, and the way from ssh to the helper's socket."""

import fcntl
import os
import pwd
import selectors
import socket
import sys
from pathlib import Path
from typing import IO

from phalanx.app.power import load_power_fleet, power_state_dir
from phalanx.app.power_links import record_path
from phalanx.errors import UsageError
from phalanx.fleet.power.cap_record import RecordStore
from phalanx.fleet.power.devices import CapError
from phalanx.fleet.power.helper_file import AllowedPeers, HelperFile, PeerList
from phalanx.fleet.power.node_helper import NodeHelper, notify_service_manager
from phalanx.fleet.power.node_keeper import NodeKeeper
from phalanx.fleet.power.open_devices import open_cap_devices

COPY_BYTES = 1 << 16


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
            keeper = NodeKeeper(node, open_cap_devices(file.devices, node), RecordStore(record))
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
        devices = open_cap_devices(file.devices, file.node)
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
