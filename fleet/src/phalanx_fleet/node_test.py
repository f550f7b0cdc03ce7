"""Test a drained node with `phalanx doctor`: fit, it is taken back; unfit, it stays drained with what was found."""

import contextlib
from collections.abc import Iterator

from phalanx.cluster.health.runner import NodeHealthReport
from phalanx.errors import UsageError
from phalanx.jobs.backends.base import BackendNode, NodeBackend, NodeService, find_node
from phalanx_fleet.node_states import NodeState, NodeStates

TESTED_REASON = "phalanx doctor: no check failed"


@contextlib.contextmanager
def open_node_test(backend: NodeBackend, states: NodeStates, name: str, actor: str) -> Iterator[BackendNode]:
    """A drained node is under test during the block, which calls `record_node_test`; else it is drained again.

    Raises UsageError for a node that the backend does not have, or that is not drained.
    """
    node = find_node(backend.list_nodes(), name, backend.name)
    if node.service is not NodeService.DRAINED:
        raise UsageError(
            f"{name}: is not drained; {backend.name} calls it {node.state}. Drain it first: `phalanx nodes drain "
            f"{name} --reason TEXT --on {backend.name}`"
        )
    if states.find_state(name) in (NodeState.HEALTHY, NodeState.SUSPECT):  # it was drained without Phalanx
        states.change(name, NodeState.DRAINED, node.reason or f"was drained in {backend.name}", actor)
    if states.find_state(name) in (NodeState.DRAINED, NodeState.REPAIR):
        states.change(name, NodeState.TESTING, "phalanx doctor", actor)
    try:
        yield node
    finally:
        if states.find_state(name) is NodeState.TESTING:
            states.change(name, NodeState.DRAINED, "the test was interrupted", actor)


def record_node_test(
    backend: NodeBackend, states: NodeStates, node: BackendNode, report: NodeHealthReport, actor: str
) -> NodeState:
    """Record what the checks found on a node under test, and undrain it if it is fit. Returns its state.

    Raises UsageError for a report of another node, or from before the node was drained.
    """
    if report.node not in (node.name, *node.host_names):
        raise UsageError(f"the report is of {report.node}, expected {node.name}")
    drained_at = max(each.time for each in states.history(node.name) if each.state is NodeState.DRAINED)
    if report.written_at < drained_at:
        raise UsageError(f"{node.name}: the report is older than its drain; run `phalanx doctor --json` there again")
    if report.is_fit:
        backend.undrain_node(node.name)
        states.change(node.name, NodeState.HEALTHY, TESTED_REASON, actor)
        return NodeState.HEALTHY
    failed = [finding for finding in report.findings if finding.verdict.is_unfit]
    reason = "; ".join(f"{finding.check}: {finding.reason}" for finding in failed)
    states.change(node.name, NodeState.DRAINED, f"phalanx doctor: {reason}", actor)
    return NodeState.DRAINED
