"""What the building and a node's margin say of its cooling now: a text for tables, and evidence against the node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.fleet.evidence import EvidenceTable, NodeEvidence, is_suspicious
from phalanx.fleet.latest_reading import LatestReading
from phalanx.fleet.telemetry.sample import RackSample


@dataclass(frozen=True)
class CoolingFinding:
    """Something is wrong with the cooling of a node. `kind`: of the table of evidence."""

    kind: str
    text: str


def find_cooling_findings(
    rack: str | None,
    samples: Sequence[RackSample],
    cdu_racks: Mapping[str, Sequence[str]],
    reading: LatestReading | None,
    now: float,
) -> list[CoolingFinding]:
    """Return what is wrong with a node's cooling; nothing where values are missing.

    Args:
        rack: The node's rack, if it is known.
        samples: The newest readings of racks and CDUs.
        cdu_racks: The racks that each CDU supplies.
        reading: The newest reading of the node.
        now: Seconds since the epoch.
    """
    found = []
    for sample in samples:
        is_cdu = sample.equipment == "CDU"
        if rack is None or (rack not in cdu_racks.get(sample.id, ()) if is_cdu else sample.id != rack):
            continue
        place = f"{sample.equipment} {sample.id}"
        if sample.has_leak:
            found.append(CoolingFinding("leak", f"{place} reports a leak"))
        if sample.flow_l_per_min == 0 and reading is not None and not reading.is_late(now):
            found.append(CoolingFinding("no-flow", f"{place} has no flow"))
    if reading is not None and not reading.is_late(now) and reading.margin_k is not None and reading.margin_k <= 0:
        found.append(CoolingFinding("throttling", "an accelerator is at the temperature from which it slows down"))
    return found


def make_cooling_evidence(
    node: str, findings: Sequence[CoolingFinding], table: EvidenceTable, now: float
) -> list[NodeEvidence]:
    """Return the evidence in the findings of a node."""
    return [
        NodeEvidence(node, each.kind, now, f"{each.text}: {table[each.kind].advice}")
        for each in findings
        if is_suspicious(table, each.kind, 1.0)
    ]
