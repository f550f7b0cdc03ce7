"""What every backend that drains nodes must do, as tests: a file for each backend inherits them."""

import pytest

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import BackendNode, NodeBackend, NodeService, find_node
from train_harness import wait_until

TIMEOUT_S = 30.0


class NodeContract:
    """Subclasses give the fixtures `engine`, and `node`, the name of a node that is open."""

    def look_up(self, engine: NodeBackend, node: str) -> BackendNode:
        return find_node(engine.list_nodes(), node, engine.name)

    def test_each_node_is_listed_once(self, engine: NodeBackend, node: str) -> None:
        names = [each.name for each in engine.list_nodes()]
        assert node in names
        assert len(names) == len(set(names))

    def test_a_node_is_drained_with_a_reason_and_undrained(self, engine: NodeBackend, node: str) -> None:
        assert self.look_up(engine, node).service is NodeService.OPEN
        engine.drain_node(node, 'it\'s "hot"; x=1 $(id) é', "ada")
        drained = self.look_up(engine, node)
        assert drained.service is NodeService.DRAINED
        assert 'it\'s "hot"; x=1 $(id) é' in str(drained.reason)
        engine.undrain_node(node)
        wait_until(lambda: self.look_up(engine, node).service is NodeService.OPEN, TIMEOUT_S, f"{node} to be open")
        assert self.look_up(engine, node).reason is None

    def test_a_drained_node_takes_a_new_reason(self, engine: NodeBackend, node: str) -> None:
        for reason in ("hot", "still hot"):
            engine.drain_node(node, reason, "ada")
        assert "still hot" in str(self.look_up(engine, node).reason)
        engine.undrain_node(node)

    def test_to_drain_one_node_leaves_the_others_open(self, engine: NodeBackend, node: str) -> None:
        engine.drain_node(node, "hot", "ada")
        drained = [each.name for each in engine.list_nodes() if each.service is NodeService.DRAINED]
        engine.undrain_node(node)
        assert drained == [node]

    def test_a_node_that_is_not_there_is_said_with_the_nearest_names(self, engine: NodeBackend, node: str) -> None:
        with pytest.raises(UsageError, match=rf"{node}x: {engine.name} has no such node; nearest are .*{node}"):
            self.look_up(engine, f"{node}x")
