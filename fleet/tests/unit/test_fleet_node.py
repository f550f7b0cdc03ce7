"""The state of a node of what its backend says and what Phalanx decided."""

import pytest

from phalanx.jobs.backends.base import BackendNode, NodeService
from phalanx_fleet.fleet_node import LatestReading, find_newest_reading, merge_state
from phalanx_fleet.node_states import NodeChange, NodeState

OPEN, DRAINED, DOWN = NodeService


def change(state: NodeState) -> NodeChange:
    return NodeChange("n1", state, "Xid 79", "ada", 1.0)


DECIDED = "Xid 79 (ada)"
CONTRADICTION = f"{DECIDED}; but the backend starts jobs there: it was undrained without Phalanx"


@pytest.mark.parametrize(
    ("service", "decided", "state", "reason"),
    [
        (OPEN, None, "healthy", None),
        (OPEN, NodeState.HEALTHY, "healthy", None),
        (OPEN, NodeState.SUSPECT, "suspect", DECIDED),
        (OPEN, NodeState.DRAINED, "drained", CONTRADICTION),
        (DRAINED, NodeState.DRAINED, "drained", DECIDED),
        (DRAINED, NodeState.TESTING, "testing", DECIDED),
        (DRAINED, None, "drained", "of the backend"),
        (DRAINED, NodeState.SUSPECT, "drained", "of the backend"),
        (DOWN, None, "down", "of the backend"),
        (DOWN, NodeState.SUSPECT, "down", "of the backend"),
        (DOWN, NodeState.DRAINED, "drained", DECIDED),
    ],
)
def test_what_the_backend_does_counts(
    service: NodeService, decided: NodeState | None, state: str, reason: str | None
) -> None:
    node = BackendNode("n1", "word", service, reason=None if service is OPEN else "of the backend")
    assert merge_state(node, None if decided is None else change(decided)) == (state, reason)


def test_without_a_backend_the_decision_counts() -> None:
    assert merge_state(None, None) == ("healthy", None)
    assert merge_state(None, change(NodeState.SUSPECT)) == ("suspect", DECIDED)


def test_the_newest_reading_is_taken() -> None:
    old, new = LatestReading(1.0, 60.0), LatestReading(2.0, 1.0)
    assert find_newest_reading([old, None, new]) is new
    assert find_newest_reading([None]) is None
