"""Nodes beside each other: who stands out is named, with why."""

from typing import Any

import pytest

from phalanx.cluster.health import HealthFinding, HealthVerdict
from phalanx.cluster.health.compare_nodes import compare_nodes
from phalanx.cluster.health.runner import NodeHealthReport

SOFTWARE = {"torch": "2.13.0", "phalanx": "0.1.0", "python": "3.12.1", "numpy": "2", "kernel": "6.1", "driver": None}


def node(name: str, seconds: float | None = 0.010, time: float = 1000.0, **given: Any) -> NodeHealthReport:
    findings = [
        HealthFinding("versions", HealthVerdict.PASS, "", {**SOFTWARE, **given.get("software", {})}),
    ]
    if seconds is not None:
        figures = {"device": given.get("device", "H100"), "time_s": seconds}
        findings.append(HealthFinding("matmul", HealthVerdict.PASS, "", figures))
    return NodeHealthReport(name, time, 5.0, tuple(findings))


def verdicts(check: str, *reports: NodeHealthReport) -> list[HealthVerdict | None]:
    """Of one comparison, node by node; None where nothing is said."""
    found = compare_nodes(reports)
    return [next((each.verdict for each in found[report.node] if each.check == check), None) for report in reports]


OK, WARN, BAD, UNKNOWN = HealthVerdict.PASS, HealthVerdict.WARN, HealthVerdict.FAIL, HealthVerdict.UNKNOWN


def test_of_three_nodes_the_slow_one_is_named() -> None:
    found = compare_nodes([node("n1"), node("n2", 0.0135), node("n3", 0.0101)])
    (pace,) = [each for each in found["n2"] if each.check == "fleet/matmul"]
    assert pace.verdict is BAD
    assert pace.reason == "25% below the median of 3 nodes"
    assert all(each.verdict is OK for name in ("n1", "n3") for each in found[name])


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([node("n1"), node("n2"), node("n3", 0.01065)], [OK, OK, WARN]),  # 6% below the median
        ([node("n1"), node("n2", 0.013)], [OK, BAD]),  # of two, the slower against the faster
        ([node("n1"), node("n2", 0.05, device="T4")], [UNKNOWN, UNKNOWN]),  # different devices are not compared
        ([node("n1"), node("n2"), node("n3", None)], [OK, OK, UNKNOWN]),  # one did not measure
        ([node("n1")], [UNKNOWN]),
    ],
)
def test_nodes_are_compared_with_the_median(nodes: list[NodeHealthReport], expected: list[HealthVerdict]) -> None:
    assert verdicts("fleet/matmul", *nodes) == expected


def storage(name: str, write_gbps: float) -> NodeHealthReport:
    figures = {"location": "/scratch", "read_gbps": 2.0, "write_gbps": write_gbps}
    return NodeHealthReport(name, 1000.0, 5.0, (HealthFinding("storage/run", OK, "", figures),))


def test_a_node_with_less_than_half_the_bandwidth_of_the_others_is_a_warning() -> None:
    found = compare_nodes([storage("n1", 1.0), storage("n2", 0.4), storage("n3", 1.1)])
    assert [(each.check, each.verdict) for each in found["n1"]] == [("fleet/storage", OK)]
    assert [(each.verdict, each.reason) for each in found["n2"]] == [
        (WARN, "of the bandwidth of the other nodes: run write 40%")
    ]


def test_the_slowest_gpu_of_a_node_counts() -> None:
    one = node("n3")
    slow = HealthFinding("matmul/gpu1", OK, "", {"device": "H100", "time_s": 0.02})
    both = NodeHealthReport("n3", one.written_at, 5.0, (*one.findings, slow))
    assert verdicts("fleet/matmul", node("n1"), node("n2"), both) == [OK, OK, BAD]


@pytest.mark.parametrize(("name", "verdict"), [("torch", BAD), ("phalanx", BAD), ("kernel", WARN), ("driver", WARN)])
def test_software_that_differs_from_the_others_is_told(name: str, verdict: HealthVerdict) -> None:
    odd = node("n3", software={name: "9"})
    assert verdicts("fleet/versions", node("n1"), node("n2"), odd) == [OK, OK, verdict]
    assert f"{name} 9, where 2 of 3 nodes have {SOFTWARE[name]}" in str(
        compare_nodes([node("n1"), node("n2"), odd])["n3"]
    )


def test_of_two_nodes_with_different_software_neither_is_right() -> None:
    assert verdicts("fleet/versions", node("n1"), node("n2", software={"torch": "2.12.0"})) == [BAD, BAD]
