"""What the agent says to a worker while it trains: who trains together from now on.

The agent speaks when a worker was lost whose work the others can do, and when another in its place is ready. The first
cannot wait: who is still in a collective with the lost one is torn out of it by closing its connections, since gloo
would let it wait for ten minutes. The second is only noted, and obeyed at the end of a step.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Mapping

from phalanx.run.message_socket import receive
from phalanx.run.messages import MembershipUpdate

CONTROL_FD_VARIABLE = "PHALANX_CONTROL_FD"
"""Names the descriptor over which a worker gets its orders."""


class MembershipUpdates:
    """A worker's end, read by a thread of its own. `cut` closes the connections of its process group."""

    def __init__(self, sock: socket.socket, shut_down_sockets: Callable[[], None]):
        self._sock, self._shut_down_sockets = sock, shut_down_sockets
        self._latest_update: MembershipUpdate | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    @property
    def has_update(self) -> bool:
        """Whether there is an order that nobody has obeyed yet."""
        return self._latest_update is not None

    @property
    def worker_lost(self) -> bool:
        """Whether that order says that somebody is gone, so that the step of now cannot end."""
        latest = self._latest_update
        return latest is not None and latest.worker_lost

    def wait_for_update(self, timeout_s: float) -> None:
        """Wait for an order, but no longer than that."""
        with self._changed:
            self._changed.wait_for(lambda: self._latest_update is not None, timeout_s)

    def take_update(self) -> MembershipUpdate:
        """The newest order, waiting for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._latest_update is not None)
            update, self._latest_update = self._latest_update, None
        assert update is not None
        return update

    def _listen(self) -> None:
        while (messages := receive(self._sock)) is not None:
            for update in messages:
                assert isinstance(update, MembershipUpdate)
                if update.worker_lost:  # before it can be obeyed, or it might be the connections of the next group
                    self._shut_down_sockets()
                with self._changed:
                    self._latest_update = update
                    self._changed.notify_all()


def open_membership_updates(
    shut_down_sockets: Callable[[], None], environment: Mapping[str, str] = os.environ
) -> MembershipUpdates | None:
    """A worker's orders; None where it has no agent that would give any."""
    fd = environment.get(CONTROL_FD_VARIABLE)
    return MembershipUpdates(socket.socket(fileno=int(fd)), shut_down_sockets) if fd else None


class SocketRegistry:
    """The TCP connections that process groups opened while this was entered, so that they can be closed under them.
    Only where the kernel lists a process's descriptors (Linux); elsewhere there are none, and who waits for a lost
    worker is killed."""

    def __init__(self) -> None:
        self._inodes_before: frozenset[int] = frozenset()
        self._own_inodes: frozenset[int] = frozenset()
        self._shutdown_lock = threading.Lock()

    def __enter__(self) -> "SocketRegistry":
        """Before a group is made."""
        self._inodes_before = frozenset(_list_own_sockets())
        return self

    def __exit__(self, *_: object) -> None:
        """After it was made."""
        self._own_inodes |= frozenset(_list_own_sockets()) - self._inodes_before

    def shut_down(self) -> None:
        """End them in both directions, and forget them; harmless when they are closed already."""
        with self._shutdown_lock:  # who comes second must find them cut, not about to be
            found = _list_own_sockets()
            for inode in self._own_inodes & found.keys():
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(found[inode])) as sock:
                    # A listener that is shut down ends the process in gloo's thread that accepts.
                    tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
                    if tcp and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        sock.shutdown(socket.SHUT_RDWR)
            self._own_inodes = frozenset()


def _list_own_sockets() -> dict[int, int]:
    """Descriptors of this process's sockets by inode: a descriptor alone may be another socket's by now."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:["):
                    found[int(target[8:-1])] = int(name)
    return found
