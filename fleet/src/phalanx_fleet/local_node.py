"""Ask nodes how they are."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.run.node_env import find_node_name
from phalanx.telemetry.record import NodeSampler, open_local_sources
from phalanx.telemetry.sample import SAMPLE_INTERVAL_S, NodeSample, TelemetrySource


@dataclass(frozen=True)
class NodeReading:
    """A node now, and what cannot be read there, in words."""

    node: str
    sample: NodeSample
    problems: tuple[str, ...]


def read_local_node(
    open_sources: Callable[[], tuple[Sequence[TelemetrySource], Sequence[str]]] = open_local_sources,
    sleep: Callable[[float], None] = time.sleep,
) -> NodeReading:
    """Read this machine. Takes a second: some values are differences of two readings."""
    sources, problems = open_sources()
    node = find_node_name()
    with contextlib.closing(NodeSampler(sources, node)) as sampler:
        sampler.read()
        sleep(SAMPLE_INTERVAL_S)
        return NodeReading(node, sampler.read(), tuple(problems))
