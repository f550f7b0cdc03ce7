"""Membership updates: the agent's messages to a worker during training that say which workers form the world.

The agent sends an update when a worker is lost and the others can continue without it, and when a replacement is ready.
A loss takes effect at once: the connections of the process group are shut down, because a collective with a lost peer
would otherwise block in gloo for 10 minutes. A replacement takes effect at the end of a step.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Mapping

from phalanx.run.message_socket import receive
from phalanx.run.process_messages import MembershipUpdate

CONTROL_FD_VARIABLE = "PHALANX_CONTROL_FD"
"""Environment variable with the file descriptor on which a worker receives updates."""


class MembershipUpdates:
    """The worker's end of the connection, read by a thread. `shut_down_sockets` closes those of the process group."""

    def __init__(self, sock: socket.socket, shut_down_sockets: Callable[[], None]):
        self._sock, self._shut_down_sockets = sock, shut_down_sockets
        self._latest_update: MembershipUpdate | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    @property
    def has_update(self) -> bool:
        """Whether there is an update that was not taken yet."""
        return self._latest_update is not None

    @property
    def worker_lost(self) -> bool:
        """Whether that update says that a worker was lost, so that the current step cannot finish."""
        latest = self._latest_update
        return latest is not None and latest.worker_lost

    def wait_for_update(self, timeout_s: float) -> None:
        """Wait for an update, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._latest_update is not None, timeout_s)

    def take_update(self) -> MembershipUpdate:
        """Wait for an update; return the newest."""
        with self._changed:
            self._changed.wait_for(lambda: self._latest_update is not None)
            update, self._latest_update = self._latest_update, None
        assert update is not None
        return update

    def _listen(self) -> None:
        while (messages := receive(self._sock)) is not None:
            for update in messages:
                assert isinstance(update, MembershipUpdate)
                if update.worker_lost:  # now, before the update can be taken: later sockets may be the next group's
                    self._shut_down_sockets()
                with self._changed:
                    self._latest_update = update
                    self._changed.notify_all()


def open_membership_updates(
    shut_down_sockets: Callable[[], None], environment: Mapping[str, str] = os.environ
) -> MembershipUpdates | None:
    """Open this worker's membership updates; None if it has no agent that sends any."""
    fd = environment.get(CONTROL_FD_VARIABLE)
    return MembershipUpdates(socket.socket(fileno=int(fd)), shut_down_sockets) if fd else None


class SocketRegistry:
    """The TCP connections that process groups open while this context is entered, so that they can be shut down later.
    It needs a kernel that lists a process's descriptors (Linux). Elsewhere it finds none, and the agent kills a worker
    that waits for a lost peer."""

    def __init__(self) -> None:
        self._inodes_before: frozenset[int] = frozenset()
        self._own_inodes: frozenset[int] = frozenset()
        self._shutdown_lock = threading.Lock()

    def __enter__(self) -> "SocketRegistry":
        """Remember the sockets that exist before a group is created."""
        self._inodes_before = frozenset(_list_own_sockets())
        return self

    def __exit__(self, *_: object) -> None:
        """Register the sockets that the group has opened."""
        self._own_inodes |= frozenset(_list_own_sockets()) - self._inodes_before

    def shut_down(self) -> None:
        """Shut the connections down in both directions and forget them; harmless if they are closed already."""
        with self._shutdown_lock:  # a concurrent second call must return only after the shutdown
            found = _list_own_sockets()
            for inode in self._own_inodes & found.keys():
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(found[inode])) as sock:
                    # Shutting down a listener would end the process, in gloo's accept thread.
                    tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
                    if tcp and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        sock.shutdown(socket.SHUT_RDWR)
            self._own_inodes = frozenset()


def _list_own_sockets() -> dict[int, int]:
    """Return descriptors of this process's sockets by inode. A descriptor alone may since belong to another socket."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # it was closed since
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:["):
                    found[int(target[8:-1])] = int(name)
    return found
