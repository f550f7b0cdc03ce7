"""Compare the health reports of nodes: speed, storage, software versions. Pure: reports in, findings by node out.

A median identifies an outlier only among 3 or more nodes; of 2 nodes, the slower is compared with the faster.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from phalanx.cluster.health.checks.matmul import MIN_PEERS, format_relative_speed, slowdown_share
from phalanx.cluster.health.finding import FindingValue, HealthFinding, HealthVerdict, evaluate_threshold, worst_verdict
from phalanx.cluster.health.runner import NodeHealthReport

REQUIRED_EQUAL = ("torch", "phalanx", "python")
"""Versions that must be equal on all nodes: different releases compute different bits or cannot communicate."""
EXPECTED_EQUAL = ("numpy", "kernel", "driver")
"""Versions that should be equal."""
SLOW_STORAGE = 0.5
"""Share of the other nodes' bandwidth below which a node's storage is slow."""


def compare_nodes(reports: Sequence[NodeHealthReport]) -> dict[str, list[HealthFinding]]:
    """Return findings by node: one for each comparison, for every node."""
    found: dict[str, list[HealthFinding]] = {each.node: [] for each in reports}
    for findings in (compare_matmul(reports), compare_storage(reports), compare_versions(reports)):
        for node, one in findings.items():
            found[node].append(one)
    return found


def values_of_check(report: NodeHealthReport, check: str) -> list[Mapping[str, FindingValue]]:
    """Return the figures of all findings of a check, including those of its parts ("matmul/gpu3")."""
    return [each.values for each in report.findings if each.check.partition("/")[0] == check]


def compare_matmul(reports: Sequence[NodeHealthReport]) -> dict[str, HealthFinding]:
    """Compare the reference product of each node's slowest device among the nodes with the same device."""
    times_by_device: dict[str, dict[str, float]] = {}
    for report in reports:
        device_values = [each for each in values_of_check(report, "matmul") if isinstance(each.get("time_s"), float)]
        if device_values:
            slowest = max(float(each["time_s"] or 0.0) for each in device_values)
            times_by_device.setdefault(str(device_values[0].get("device")), {})[report.node] = slowest
    found = {}
    for nodes in times_by_device.values():
        times_s = list(nodes.values())
        baseline = statistics.median(times_s) if len(times_s) >= MIN_PEERS else min(times_s)
        for node, seconds in nodes.items():
            found[node] = _matmul_finding(seconds, baseline, len(nodes))
    for report in reports:
        if times_by_device and report.node not in found:
            text = "its report has no rate of matrix products"
            found[report.node] = HealthFinding("fleet/matmul", HealthVerdict.UNKNOWN, text)
    return found


def _matmul_finding(seconds: float, baseline: float, nodes: int) -> HealthFinding:
    slowdown = slowdown_share(seconds, baseline)
    reference = f"the median of {nodes} nodes" if nodes >= MIN_PEERS else "the other node"
    figures: dict[str, FindingValue] = {"time_s": seconds, "baseline_s": baseline, "nodes": nodes}
    if nodes == 1:
        text = "no other node has this device: nothing to compare with"
        return HealthFinding("fleet/matmul", HealthVerdict.UNKNOWN, text, figures)
    verdict = evaluate_threshold("matmul slowdown", slowdown)
    return HealthFinding("fleet/matmul", verdict, f"{format_relative_speed(slowdown)} {reference}", figures)


def compare_storage(reports: Sequence[NodeHealthReport]) -> dict[str, HealthFinding]:
    """Compare the bandwidth of each location of a recipe among the nodes that measured it."""
    rates_by_location: dict[str, dict[str, float]] = {}
    for report in reports:
        for finding in report.findings:
            check, _, location = finding.check.partition("/")
            for direction in ("read", "write") if check == "storage" else ():
                rate = finding.values.get(f"{direction}_gbps")
                if isinstance(rate, float):
                    rates_by_location.setdefault(f"{location} {direction}", {})[report.node] = rate
    slow: dict[str, list[str]] = {}
    for what, rates in rates_by_location.items():
        baseline = statistics.median(rates.values()) if len(rates) >= MIN_PEERS else max(rates.values())
        for node, rate in rates.items() if len(rates) > 1 else ():
            share = rate / baseline
            slow.setdefault(node, []).extend([f"{what} {share:.0%}"] if share < SLOW_STORAGE else [])
    found = {}
    for node, parts in slow.items():
        verdict = HealthVerdict.WARN if parts else HealthVerdict.PASS
        slow_text = f"of the bandwidth of the other nodes: {', '.join(parts)}"
        found[node] = HealthFinding("fleet/storage", verdict, slow_text if parts else "as fast as on the other nodes")
    return found


def compare_versions(reports: Sequence[NodeHealthReport]) -> dict[str, HealthFinding]:
    """Report software versions that differ from those of most nodes."""
    versions_by_node = {report.node: each for report in reports for each in values_of_check(report, "versions")}
    counts_by_name = {
        name: Counter(str(each.get(name)) for each in versions_by_node.values()).most_common()
        for name in (*REQUIRED_EQUAL, *EXPECTED_EQUAL)
    }
    found = {}
    for node, each in versions_by_node.items():
        differences, verdicts = [], [HealthVerdict.PASS]
        for name in (*REQUIRED_EQUAL, *EXPECTED_EQUAL):
            own, (most, *others) = str(each.get(name)), counts_by_name[name]
            if not others or (own == most[0] and most[1] > others[0][1]):
                continue
            other, count = most if own != most[0] else others[0]
            differences.append(f"{name} {own}, where {count} of {len(versions_by_node)} nodes have {other}")
            verdicts.append(HealthVerdict.FAIL if name in REQUIRED_EQUAL else HealthVerdict.WARN)
        reason = "; ".join(differences) or "as on the other nodes"
        found[node] = HealthFinding("fleet/versions", worst_verdict(verdicts), reason)
    return found
