"""Find leaks, lost flow and lost margins in what racks, CDUs and nodes report. Pure: readings and times in, faults out.

One reading alone may be an error of a sensor, so a fault counts after two. A missing value is no
fault: it is reported as blindness, since to power nodes off for a lost network would be worse than what it guards
against; the hardware protects itself.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from phalanx.fleet.telemetry.sample import RackSample
from phalanx.fleet.thermal.flow_loss import DETECTION_S, CoolingFault

USUAL_FLOW_SAMPLES = 300
"""Readings of which the median is a rack's usual flow."""
MIN_USUAL_SAMPLES = 5
CONFIRM_S = 0.9 * DETECTION_S / 2
"""From the first to the second reading of a fault, at one a second; before the first up to a second passes."""


@dataclass(frozen=True)
class CooledNodes:
    """Which rack each node is in, and which racks each CDU supplies."""

    racks: Mapping[str, str]
    """By node."""
    cdu_racks: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def list_nodes(self, racks: Iterable[str]) -> tuple[str, ...]:
        """Return the nodes in some racks."""
        wanted = set(racks)
        return tuple(node for node, rack in self.racks.items() if rack in wanted)


@dataclass(frozen=True)
class ObservedFault:
    """A fault at `place`, a rack, a CDU or a node, with the nodes that it concerns. `flow_share`: of the usual flow,
    what remains. `needs_power_off`: whether their power has to go off, or they only get no more jobs."""

    fault: CoolingFault
    place: str
    nodes: tuple[str, ...]
    text: str
    flow_share: float = 1.0
    needs_power_off: bool = True

    @property
    def key(self) -> tuple[CoolingFault, str]:
        """What is the same fault."""
        return self.fault, self.place


class FaultDetector:
    """Keeps what is usual, and since when something is not. `min_flow_share`: of the usual flow, below which flow is
    lost."""

    def __init__(self, nodes: CooledNodes, min_flow_share: float):
        self._nodes, self._min_flow_share = nodes, min_flow_share
        self._flows: dict[str, deque[float]] = {}
        self._since: dict[tuple[CoolingFault, str], tuple[float, int]] = {}
        """When a fault was first seen, and how many times since."""

    def find_faults(
        self, racks: Sequence[RackSample], margins_k: Mapping[str, float | None], now: float
    ) -> list[ObservedFault]:
        """Return the confirmed faults.

        Args:
            racks: The newest reading of each rack and CDU.
            margins_k: Of each node's hottest device, up to the temperature from which it slows down.
            now: Seconds of a monotonic clock.
        """
        seen = [*self._find_in_racks(racks), *self._find_in_margins(margins_k)]
        self._since = {
            fault.key: (first, count + 1) for fault in seen for first, count in [self._since.get(fault.key, (now, 0))]
        }
        return [
            fault
            for fault in seen
            for first, count in [self._since[fault.key]]
            if count >= 2 and now - first >= CONFIRM_S
        ]

    def find_blind_racks(self, racks: Sequence[RackSample]) -> list[str]:
        """Return the racks with nodes of which neither a leak nor the flow is known now."""
        known = {rack.id for rack in racks if rack.has_leak is not None or rack.flow_l_per_min is not None}
        covered = known | {rack for cdu, supplied in self._nodes.cdu_racks.items() if cdu in known for rack in supplied}
        return sorted(set(self._nodes.racks.values()) - covered)

    def _find_in_racks(self, racks: Sequence[RackSample]) -> Iterator[ObservedFault]:
        for rack in racks:
            is_cdu = rack.equipment == "CDU"
            supplied = self._nodes.cdu_racks.get(rack.id, ()) if is_cdu else (rack.id,)
            nodes, place = self._nodes.list_nodes(supplied), f"{rack.equipment} {rack.id}"
            if rack.has_leak:
                # a tray below a CDU may be wet while its racks are not: their own sensors say so
                text = f"{place} reports a leak"
                yield ObservedFault(CoolingFault.LEAK, place, nodes, text, needs_power_off=not is_cdu)
            share = self._find_flow_share(place, rack.flow_l_per_min)
            if share is not None and share < self._min_flow_share:
                text = f"{place} has {rack.flow_l_per_min:.1f} l/min, {share:.0%} of its usual flow"
                yield ObservedFault(CoolingFault.NO_FLOW, place, nodes, text, share)

    def _find_flow_share(self, place: str, flow_l_per_min: float | None) -> float | None:
        """Flow over the usual one; None where one of them is not known."""
        if flow_l_per_min is None:
            return None
        usual = self._flows.setdefault(place, deque(maxlen=USUAL_FLOW_SAMPLES))
        share = flow_l_per_min / median(usual) if len(usual) >= MIN_USUAL_SAMPLES and median(usual) > 0 else None
        if flow_l_per_min > 0 and (share is None or share >= self._min_flow_share):
            usual.append(flow_l_per_min)
        return share

    def _find_in_margins(self, margins_k: Mapping[str, float | None]) -> Iterator[ObservedFault]:
        for node, margin_k in margins_k.items():
            if margin_k is not None and margin_k <= 0:
                # in air a device may throttle for months at its limit (docs/how-to/hot-node.md); in liquid it has
                # tens of kelvins, and has lost its coolant
                is_liquid = node in self._nodes.racks
                text = f"{node}: a device is at the temperature from which it slows down"
                yield ObservedFault(CoolingFault.NO_MARGIN, node, (node,), text, needs_power_off=is_liquid)
