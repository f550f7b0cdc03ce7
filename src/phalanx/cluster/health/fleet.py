"""Nodes beside each other, from the reports that each made of itself: who is slower than the rest, has other software,
another time. Pure: reports in, findings by node out.

A median says who is off only among three or more; of two nodes the slower one is held against the faster.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from phalanx.cluster.health.examine import Report
from phalanx.cluster.health.finding import Figure, Finding, Verdict, worst
from phalanx.cluster.health.product import PEERS, beside, lost
from phalanx.cluster.health.thresholds import judge

SAME = ("torch", "phalanx", "python")
"""What must be the same everywhere: other releases compute other bits, or do not understand each other."""
ALIKE = ("numpy", "kernel", "driver")
"""What should be."""


def compare(reports: Sequence[Report]) -> dict[str, list[Finding]]:
    """What stands out, by node; each node has an entry, with a finding for each thing that was compared."""
    found: dict[str, list[Finding]] = {each.node: [] for each in reports}
    for part in (paces(reports), disks(reports), versions(reports), clocks(reports)):
        for node, one in part.items():
            found[node].append(one)
    return found


def figures_of(report: Report, check: str) -> list[Mapping[str, Figure]]:
    """The figures of all findings of a check, "matmul/gpu3" and the like included."""
    return [each.figures for each in report.findings if each.check.partition("/")[0] == check]


def paces(reports: Sequence[Report]) -> dict[str, Finding]:
    """The reference product: each node's slowest device against those of the nodes with the same device."""
    kinds: dict[str, dict[str, float]] = {}
    for report in reports:
        here = [each for each in figures_of(report, "matmul") if isinstance(each.get("seconds"), float)]
        if here:
            slowest = max(float(each["seconds"] or 0.0) for each in here)
            kinds.setdefault(str(here[0].get("device")), {})[report.node] = slowest
    found = {}
    for nodes in kinds.values():
        baseline = _baseline(nodes.values(), min)
        for node, seconds in nodes.items():
            found[node] = _pace(seconds, baseline, len(nodes))
    for report in reports:
        if report.node not in found:
            found[report.node] = Finding("fleet/matmul", Verdict.UNKNOWN, "its report has no rate of matrix products")
    return found


def _pace(seconds: float, baseline: float, nodes: int) -> Finding:
    share = lost(seconds, baseline)
    whom = _whom(nodes)
    figures: dict[str, Figure] = {"seconds": seconds, "baseline_seconds": baseline, "nodes": nodes}
    if nodes == 1:
        text = "no other node has this device: nothing to compare with"
        return Finding("fleet/matmul", Verdict.UNKNOWN, text, figures)
    return Finding("fleet/matmul", judge("matmul slowdown", share), f"{beside(share)} {whom}", figures)


def disks(reports: Sequence[Report]) -> dict[str, Finding]:
    """The rate at which a file was written."""
    rates = {}
    for report in reports:
        for each in figures_of(report, "disk-throughput"):
            if isinstance(rate := each.get("written"), float):
                rates[report.node] = rate
    if len(rates) < 2:
        return {}
    baseline = _baseline(rates.values(), max)
    return {
        node: Finding(
            "fleet/disk",
            judge("disk slowdown", 1 - rate / baseline),
            f"writes {rate / 1e6:.3g} MB/s, {rate / baseline:.0%} of {_whom(len(rates))}",
            {"written": rate, "baseline": baseline},
        )
        for node, rate in rates.items()
    }


def versions(reports: Sequence[Report]) -> dict[str, Finding]:
    """Software that differs from what most nodes have."""
    here = {report.node: each for report in reports for each in figures_of(report, "versions")}
    usual = {name: Counter(str(each.get(name)) for each in here.values()).most_common() for name in (*SAME, *ALIKE)}
    found = {}
    for node, each in here.items():
        told, verdicts = [], [Verdict.OK]
        for name in (*SAME, *ALIKE):
            mine, (most, *others) = str(each.get(name)), usual[name]
            if not others or (mine == most[0] and most[1] > others[0][1]):
                continue
            other, count = most if mine != most[0] else others[0]
            told.append(f"{name} {mine}, where {count} of {len(here)} nodes have {other}")
            verdicts.append(Verdict.BAD if name in SAME else Verdict.WARN)
        found[node] = Finding("fleet/versions", worst(verdicts), "; ".join(told) or "as on the other nodes")
    return found


def clocks(reports: Sequence[Report]) -> dict[str, Finding]:
    """How far clocks are apart: by a file server's, where all nodes saw one; else by the moments of the reports, which
    lie as far apart as the nodes started, so that they give no more than a warning."""
    offsets = {}
    for report in reports:
        for each in figures_of(report, "clock"):
            if isinstance(offset := each.get("server_offset"), float):
                offsets[report.node] = offset
    served = len(offsets) == len(reports)
    values = offsets if served else {report.node: report.time for report in reports}
    if len(values) < 2:
        return {}
    middle, found = statistics.median(values.values()), {}
    for node, value in values.items():
        skew = value - middle
        way = "ahead of" if skew > 0 else "behind"
        figures: dict[str, Figure] = {"skew": skew, "by": "file server" if served else "reports"}
        if served:
            text = f"{abs(skew):.2f} s {way} the others, by the file server's clock"
            found[node] = Finding("fleet/clock", judge("clock skew", abs(skew)), text, figures)
        elif judge("clock skew (report times)", abs(skew)) is Verdict.OK:
            text = f"less than {abs(skew) + 1:.0f} s {way} the others, by the times of the reports"
            found[node] = Finding("fleet/clock", Verdict.OK, text, figures)
        else:
            text = (
                f"its report is {abs(skew):.0f} s {way} the others': its clock is wrong, or it was made at another time"
            )
            found[node] = Finding("fleet/clock", Verdict.WARN, text, figures)
    return found


def _baseline(values: Iterable[float], best: Callable[[list[float]], float]) -> float:
    """The median, or of fewer than three the best."""
    known = list(values)
    return statistics.median(known) if len(known) >= PEERS else best(known)


def _whom(nodes: int) -> str:
    return f"the median of {nodes} nodes" if nodes >= PEERS else "the other node"
