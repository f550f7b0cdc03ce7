"""The nodes of a fleet, read now and then by one thread."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.errors import DataError, PhalanxError
from phalanx.fleet.fleet_node import FleetNode
from phalanx.fleet.latest_reading import reading_from_sample
from phalanx.fleet.run_readings import MAX_MINUTES_BYTES
from phalanx.fleet.telemetry.sample import SAMPLE_INTERVAL_S, NodeSample, RackSample
from phalanx.run import Run
from phalanx.run.telemetry_minutes import NodeMinute, NodeMinuteTail

READ_INTERVAL_S = 5.0
STOP_TIMEOUT_S = 5.0

ReadFleet = Callable[[], tuple[Sequence[FleetNode], Sequence[str], Sequence[RackSample]]]
"""Returns all nodes, what could not be read, in words, and the racks. PhalanxError where nothing could be read."""


@dataclass(frozen=True)
class NodeList:
    """The nodes when they were last read, and what could not be read, in words."""

    nodes: Sequence[FleetNode] = ()
    problems: Sequence[str] = ()
    racks: Sequence[RackSample] = ()
    is_read: bool = False
    is_current: bool = False
    """Whether the last reading succeeded; otherwise these nodes are of an earlier one."""


class NodeReader:
    """Reads the nodes. `update` reads once; `start` and `stop` have a thread do so, which opens what it reads by
    `open_fleet`."""

    def __init__(self, open_fleet: Callable[[], ReadFleet]):
        self._open_fleet = open_fleet
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

    def _run(self) -> None:
        while not self._stop_requested.is_set():
            self.update()
            self._stop_requested.wait(READ_INTERVAL_S)


def read_node_minutes(runs: Iterable[Run], node: FleetNode) -> list[NodeMinute]:
    """The minutes of a node that these runs have recorded; the last MAX_MINUTES_BYTES of each."""
    hosts = () if node.backend is None else node.backend.host_names
    found: dict[float, NodeMinute] = {}
    for run in runs:
        for host in dict.fromkeys((node.name, *hosts)):
            if "/" in host or host.startswith("."):
                continue
            try:
                for minute in NodeMinuteTail(run.telemetry / f"{host}.jsonl", MAX_MINUTES_BYTES).read():
                    found[minute.time] = minute
            except (OSError, DataError):  # no file, or none that can be read: another run may have it
                continue
    return list(found.values())


def add_samples(nodes: Sequence[FleetNode], samples: Mapping[str, NodeSample]) -> list[FleetNode]:
    """The nodes with the newer of both readings: their own, and that of the sample that their agent has sent."""
    found = []
    for node in nodes:
        sample = samples.get(node.name)
        if sample is not None and (node.reading is None or sample.time >= node.reading.time):
            found.append(replace(node, reading=reading_from_sample(sample, SAMPLE_INTERVAL_S)))
        else:
            found.append(node)
    return found
