"""What is known of nodes besides their list: minutes that runs have recorded, and samples of their agents."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from phalanx.errors import DataError
from phalanx.fleet.fleet_node import FleetNode
from phalanx.fleet.latest_reading import reading_from_sample
from phalanx.fleet.run_readings import MAX_MINUTES_BYTES
from phalanx.fleet.telemetry.sample import SAMPLE_INTERVAL_S, NodeSample
from phalanx.run import Run
from phalanx.run.telemetry_minutes import NodeMinute, NodeMinuteTail


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
