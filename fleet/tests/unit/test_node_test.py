"""A drained node under test: fit, it is taken back; unfit, it stays drained."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_nodes import FakeNodeBackend
from phalanx.cluster.health import HealthFinding, HealthVerdict
from phalanx.cluster.health.runner import NodeHealthReport
from phalanx.errors import UsageError
from phalanx.jobs.backends.base import NodeService
from phalanx_fleet.node_list import drain_node, open_node_test, record_node_test
from phalanx_fleet.node_states import NodeState, NodeStates

DRAINED_AT = 100.0
PASS = HealthFinding("memory/errors", HealthVerdict.PASS, "none")
FAIL = HealthFinding("gpu/xid", HealthVerdict.FAIL, "Xid 79 on GPU-a")


@pytest.fixture
def states(tmp_path: Path) -> Iterator[NodeStates]:
    with NodeStates(tmp_path / "nodes.db", lambda: DRAINED_AT) as states:
        yield states


@pytest.fixture
def backend(states: NodeStates) -> FakeNodeBackend:
    backend = FakeNodeBackend()
    drain_node(backend, states, "n1", "hot", "ada")  # type: ignore[arg-type]
    return backend


def report_of(*findings: HealthFinding, node: str = "n1", written_at: float = 200.0) -> NodeHealthReport:
    return NodeHealthReport(node, written_at, 1.0, findings)


def run_test(backend: FakeNodeBackend, states: NodeStates, report: NodeHealthReport) -> NodeState:
    with open_node_test(backend, states, "n1", "ada") as node:  # type: ignore[arg-type]
        assert states.newest()["n1"].state is NodeState.TESTING
        return record_node_test(backend, states, node, report, "ada")  # type: ignore[arg-type]


def list_changes(states: NodeStates) -> list[tuple[str, str]]:
    return [(each.state, each.reason) for each in states.history("n1")]


def test_a_fit_node_is_taken_back(backend: FakeNodeBackend, states: NodeStates) -> None:
    assert run_test(backend, states, report_of(PASS)) is NodeState.HEALTHY
    assert backend.nodes["n1"].service is NodeService.OPEN
    assert list_changes(states)[1:] == [
        ("testing", "phalanx doctor"),
        ("healthy", "phalanx doctor: no check failed"),
    ]


def test_an_unfit_node_stays_drained_with_what_was_found(backend: FakeNodeBackend, states: NodeStates) -> None:
    assert run_test(backend, states, report_of(PASS, FAIL)) is NodeState.DRAINED
    assert backend.nodes["n1"].service is NodeService.DRAINED
    assert list_changes(states)[-1] == ("drained", "phalanx doctor: gpu/xid: Xid 79 on GPU-a")


def test_a_test_that_is_interrupted_leaves_the_node_drained(backend: FakeNodeBackend, states: NodeStates) -> None:
    with pytest.raises(KeyboardInterrupt), open_node_test(backend, states, "n1", "ada"):  # type: ignore[arg-type]
        raise KeyboardInterrupt
    assert list_changes(states)[-1] == ("drained", "the test was interrupted")
    assert backend.nodes["n1"].service is NodeService.DRAINED


def test_a_node_whose_test_was_killed_can_be_tested_again(backend: FakeNodeBackend, states: NodeStates) -> None:
    states.change("n1", NodeState.TESTING, "phalanx doctor", "ada")
    assert run_test(backend, states, report_of(PASS)) is NodeState.HEALTHY


def test_a_node_that_was_drained_without_phalanx_gets_a_history(backend: FakeNodeBackend, states: NodeStates) -> None:
    backend.drain_node("n2", "by hand (root)", "root")
    with open_node_test(backend, states, "n2", "ada") as node:  # type: ignore[arg-type]
        record_node_test(backend, states, node, report_of(PASS, node="n2"), "ada")  # type: ignore[arg-type]
    assert next((each.state, each.reason) for each in states.history("n2")) == ("drained", "by hand (root)")


def test_a_node_that_is_not_drained_is_not_tested(backend: FakeNodeBackend, states: NodeStates) -> None:
    with (
        pytest.raises(UsageError, match=r"n3: is not drained; slurm calls it idle\. Drain it first"),
        open_node_test(backend, states, "n3", "ada"),  # type: ignore[arg-type]
    ):
        pass
    assert states.history("n3") == []


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (report_of(PASS, node="n2"), "the report is of n2, expected n1"),
        (report_of(PASS, written_at=99.0), "n1: the report is older than its drain"),
    ],
)
def test_a_report_of_another_node_or_time_proves_nothing(
    backend: FakeNodeBackend, states: NodeStates, report: NodeHealthReport, problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        run_test(backend, states, report)
    assert states.newest()["n1"].state is NodeState.DRAINED
