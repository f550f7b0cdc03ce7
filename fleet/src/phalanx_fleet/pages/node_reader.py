"""The nodes of a fleet, read now and then by one thread."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx_fleet.fleet_node import FleetNode
    from phalanx_fleet.telemetry.service_reading import RackSample

logger = logging.getLogger(__name__)
READ_INTERVAL_S = 5.0
STOP_TIMEOUT_S = 5.0

ReadFleet = Callable[[], "tuple[Sequence[FleetNode], Sequence[str], Sequence[RackSample]]"]
"""Returns all nodes, what could not be read, in words, and the racks. PhalanxError where nothing could be read."""


@dataclass(frozen=True)
class NodeList:
    """The nodes when they were last read, and what could not be read, in words."""

    nodes: "Sequence[FleetNode]" = ()
    problems: Sequence[str] = ()
    racks: "Sequence[RackSample]" = ()
    is_read: bool = False
    is_current: bool = False
    """Whether the last reading succeeded; otherwise these nodes are of an earlier one."""


class NodeReader:
    """Reads the nodes. `update` reads once; `start` and `stop` have a thread do so, which opens what it reads by
    `open_fleet`, and calls `on_end` at its end."""

    def __init__(self, open_fleet: Callable[[], ReadFleet], on_end: Callable[[], None] = lambda: None):
        self._open_fleet, self._on_end = open_fleet, on_end
        self._read: ReadFleet | None = None
        self.nodes = NodeList()
        self._stop_requested = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)

    def start(self) -> None:
        """Keep the nodes up to date in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop_requested.set()
        self._thread.join(STOP_TIMEOUT_S)

    def update(self) -> None:
        """Read the nodes once. Nodes that cannot be read stay as they were, with a problem."""
        try:
            self._read = self._read or self._open_fleet()
            nodes, problems, racks = self._read()
            self.nodes = NodeList(nodes, problems, racks, is_read=True, is_current=True)
        except PhalanxError as error:
            self.nodes = NodeList(self.nodes.nodes, [str(error)], is_read=True)
        except Exception as error:  # the thread must not end: the next reading may succeed
            logger.exception("serve: the nodes cannot be read")
            self.nodes = NodeList(self.nodes.nodes, [f"the nodes cannot be read: {error}"], is_read=True)

    def _run(self) -> None:
        while not self._stop_requested.is_set():
            self.update()
            self._stop_requested.wait(READ_INTERVAL_S)
        self._on_end()
