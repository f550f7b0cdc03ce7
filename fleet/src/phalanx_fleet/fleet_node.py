"""A node of the fleet: what its backend says, what Phalanx decided, and its newest reading. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from phalanx.jobs.backends.base import BackendNode, NodeService
from phalanx.telemetry.sample import SAMPLE_INTERVAL_S, NodeSample
from phalanx_fleet.latest_reading import LatestReading, reading_from_sample
from phalanx_fleet.node_states import OUT_OF_SERVICE, NodeChange, NodeState

DOWN_STATE = "down"
"""Shown for a healthy node on which its backend starts no jobs for another reason than a drain."""
NO_READING_STATE, STALE_STATE = "no reading", "stale"
"""Shown for a healthy node that was never read, or not of late: it may be anything."""
SHOWN_STATES = (*NodeState, DOWN_STATE, NO_READING_STATE, STALE_STATE)


@dataclass(frozen=True)
class FleetNode:
    """A node as `phalanx nodes ls` shows it."""

    name: str
    state: str
    """A NodeState, or `down`."""
    reason: str | None
    """Why it is in this state."""
    backend: BackendNode | None
    """None for a node that only a file or a run names."""
    reading: LatestReading | None
    rack: str | None = None
    """Location id of its rack, where the nodes file has it."""
    cooling: str | None = None
    """What is wrong with its cooling now."""

    def find_shown_state(self, now: float) -> str:
        """Return the state to show, one of SHOWN_STATES: of a healthy node without news that there are none."""
        if self.state != NodeState.HEALTHY or (self.reading is not None and not self.reading.is_late(now)):
            return self.state
        return NO_READING_STATE if self.reading is None else STALE_STATE


def make_fleet_node(
    name: str,
    backend: BackendNode | None,
    change: NodeChange | None,
    reading: LatestReading | None,
    rack: str | None = None,
    cooling: str | None = None,
) -> FleetNode:
    """Return a node of what is known about it. `change`: its newest one in the table of nodes."""
    state, reason = merge_state(backend, change)
    return FleetNode(name, state, reason, backend, reading, rack, cooling)


def merge_state(backend: BackendNode | None, change: NodeChange | None) -> tuple[str, str | None]:
    """Return the state of a node, and why. What the backend does counts: a node that was drained or undrained there is
    in that state, and the reason names a contradiction."""
    state = NodeState.HEALTHY if change is None else change.state
    decided = None if change is None or state is NodeState.HEALTHY else f"{change.reason} ({change.actor})"
    if backend is None:
        return state, decided
    is_out = state in OUT_OF_SERVICE
    if backend.service is NodeService.DRAINED:
        return (state, decided) if is_out else (NodeState.DRAINED, backend.reason)
    if is_out and backend.service is NodeService.OPEN:
        return state, f"{decided}; but the backend starts jobs there: it was undrained without Phalanx"
    if backend.service is NodeService.DOWN and not is_out:
        return DOWN_STATE, backend.reason or decided
    return state, decided


def merge_readings(readings: Iterable[LatestReading | None], now: float) -> LatestReading | None:
    """The newest reading, with the power at the node's supplies of another where that is not late either, and with the
    cap and margin of accelerators, and failed fans, that only another has."""
    known = sorted((each for each in readings if each is not None), key=lambda each: -each.time)
    if not known:
        return None
    newest, *others = known
    for other in others:
        if other.is_late(now) or newest.is_late(now):
            continue
        if other.parts == "node" and newest.parts != "node":
            newest = replace(newest, draw_w=other.draw_w, parts="node", is_estimate=False)
        if newest.failed_fans is None:
            newest = replace(newest, failed_fans=other.failed_fans)
        if newest.device_cap_w is None and newest.margin_k is None:
            newest = replace(
                newest,
                device_draw_w=other.device_draw_w,
                device_cap_w=other.device_cap_w,
                num_devices=other.num_devices,
                margin_k=other.margin_k,
                slow_because=other.slow_because,
            )
    return newest


def find_newest_reading(readings: Iterable[LatestReading | None]) -> LatestReading | None:
    """The newest reading; None without any."""
    return max((each for each in readings if each is not None), key=lambda reading: reading.time, default=None)


def add_samples(nodes: Iterable[FleetNode], samples: Mapping[str, NodeSample]) -> list[FleetNode]:
    """Return the nodes with the newer of both readings: their own, and that of the sample that their agent has sent."""
    return [
        node
        if (sample := samples.get(node.name)) is None or (node.reading is not None and sample.time < node.reading.time)
        else replace(node, reading=reading_from_sample(sample, SAMPLE_INTERVAL_S))
        for node in nodes
    ]
