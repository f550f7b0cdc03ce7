"""Find leaks, lost flow and lost margins in what racks, CDUs and nodes report. Pure: readings and times in, faults out.

One measurement alone may be an error of a sensor, so a fault counts after two: a value that is read twice, as from a
bus or a cache, is one measurement. A missing value is no fault: it is reported as blindness.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from phalanx_fleet.telemetry.service_reading import RackSample

USUAL_FLOW_SAMPLES = 300
"""Readings of which the median is a rack's usual flow."""
MIN_USUAL_SAMPLES = 5
MIN_GAP_S = 0.5
"""Between two measurements; what is less is rounding of their ages."""
LEAK_CONFIRM_S = 10.0
"""For which a leak has to be reported that is measured once: a building's bus sends a state when it changes."""


class CoolingFault(StrEnum):
    """What sensors report."""

    LEAK = "leak"
    NO_FLOW = "no flow"
    NO_MARGIN = "no margin"


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
    """A fault at `place`, a rack, a CDU or a node, with the nodes that it concerns. `measured_at`: seconds of a
    monotonic clock. `needs_save`: whether jobs have to save and leave, or the nodes only get no more jobs."""

    fault: CoolingFault
    place: str
    nodes: tuple[str, ...]
    text: str
    measured_at: float
    needs_save: bool = True
    period_s: float = 0.0
    """Of a source that renews its values so often: what it has before that may be the same measurement."""

    @property
    def key(self) -> tuple[CoolingFault, str]:
        """What is the same fault."""
        return self.fault, self.place


@dataclass(frozen=True)
class NodeMargin:
    """Kelvins of a node's hottest device up to the temperature from which it slows down, and how old they are."""

    margin_k: float
    age_s: float = 0.0
    period_s: float = 0.0


@dataclass(frozen=True)
class _Sighting:
    """When a fault was first seen, when it was measured last, and how often."""

    since: float
    measured_at: float
    num_measurements: int


class FaultDetector:
    """Keeps what is usual, and since when something is not. `min_flow_share`: of the usual flow, below which flow is
    lost."""

    def __init__(self, nodes: CooledNodes, min_flow_share: float):
        self._nodes, self._min_flow_share = nodes, min_flow_share
        self._flows: dict[str, deque[float]] = {}
        self._seen: dict[tuple[CoolingFault, str], _Sighting] = {}

    def find_faults(
        self, racks: Sequence[RackSample], margins: Mapping[str, NodeMargin], now: float
    ) -> list[ObservedFault]:
        """Return the confirmed faults.

        Args:
            racks: The newest reading of each rack and CDU.
            margins: Of nodes that have one.
            now: Seconds of a monotonic clock.
        """
        seen = [*self._find_in_racks(racks, now), *self._find_in_margins(margins, now)]
        self._seen = {fault.key: _see_again(self._seen.get(fault.key), fault, now) for fault in seen}
        return [fault for fault in seen if self._is_confirmed(fault, now)]

    def _is_confirmed(self, fault: ObservedFault, now: float) -> bool:
        sighting = self._seen[fault.key]
        lasts = fault.fault is CoolingFault.LEAK and now - sighting.since >= LEAK_CONFIRM_S
        return sighting.num_measurements >= 2 or lasts

    def find_blind_racks(self, racks: Sequence[RackSample]) -> list[str]:
        """Return the racks with nodes of which neither a leak nor the flow is known now."""
        known = {rack.id for rack in racks if rack.has_leak is not None or rack.flow_l_per_min is not None}
        covered = known | {rack for cdu, supplied in self._nodes.cdu_racks.items() if cdu in known for rack in supplied}
        return sorted(set(self._nodes.racks.values()) - covered)

    def _find_in_racks(self, racks: Sequence[RackSample], now: float) -> Iterator[ObservedFault]:
        for rack in racks:
            is_cdu = rack.equipment == "CDU"
            supplied = self._nodes.cdu_racks.get(rack.id, ()) if is_cdu else (rack.id,)
            nodes, place = self._nodes.list_nodes(supplied), f"{rack.equipment} {rack.id}"
            if rack.has_leak:
                # a tray below a CDU may be wet while its racks are not: their own sensors say so
                text = f"{place} reports a leak"
                measured_at = now - _find_age(rack, "has_leak")
                yield ObservedFault(CoolingFault.LEAK, place, nodes, text, measured_at, needs_save=not is_cdu)
            share = self._find_flow_share(place, rack.flow_l_per_min)
            if share is not None and share < self._min_flow_share:
                text = f"{place} has {rack.flow_l_per_min:.1f} l/min, {share:.0%} of its usual flow"
                measured_at = now - _find_age(rack, "flow_l_per_min")
                yield ObservedFault(CoolingFault.NO_FLOW, place, nodes, text, measured_at)

    def _find_flow_share(self, place: str, flow_l_per_min: float | None) -> float | None:
        """Flow over the usual one; None where one of them is not known."""
        if flow_l_per_min is None:
            return None
        usual = self._flows.setdefault(place, deque(maxlen=USUAL_FLOW_SAMPLES))
        share = flow_l_per_min / median(usual) if len(usual) >= MIN_USUAL_SAMPLES and median(usual) > 0 else None
        if flow_l_per_min > 0 and (share is None or share >= self._min_flow_share):
            usual.append(flow_l_per_min)
        return share

    def _find_in_margins(self, margins: Mapping[str, NodeMargin], now: float) -> Iterator[ObservedFault]:
        for node, margin in margins.items():
            if margin.margin_k <= 0:
                # a device slows down there, and protects itself: it may do so for months
                text = f"{node}: a device is at the temperature from which it slows down"
                measured_at = now - margin.age_s
                yield ObservedFault(
                    CoolingFault.NO_MARGIN, node, (node,), text, measured_at, needs_save=False, period_s=margin.period_s
                )


def _find_age(rack: RackSample, column: str) -> float:
    return rack.ages_s.get(column, rack.age_s or 0.0)


def _see_again(last: _Sighting | None, fault: ObservedFault, now: float) -> _Sighting:
    if last is None:
        return _Sighting(now, fault.measured_at, 1)
    if fault.measured_at - last.measured_at < max(MIN_GAP_S, fault.period_s):
        return last
    return _Sighting(last.since, fault.measured_at, last.num_measurements + 1)
