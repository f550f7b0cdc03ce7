"""Drain and undrain nodes from the page, as `phalanx fleet` does."""

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.jobs.backends.nodes import NodeBackend, open_node_backend


@dataclass(frozen=True)
class NodeActions:
    """What the page does to the nodes of a backend. Every method raises UsageError where that cannot be done."""

    backend: str = "local"
    open_backend: Callable[[str], NodeBackend] = open_node_backend

    @property
    def actor(self) -> str:
        """The name in the history: the user of the server, since all browsers have the same token."""
        from phalanx.app.fleet_nodes import find_actor

        return f"{find_actor()} (page)"

    def drain(self, node: str, reason: str) -> None:
        """Start no new job on a node."""
        from phalanx.app.fleet_nodes import drain_node, open_node_states

        with open_node_states() as states:
            drain_node(self.open_backend(self.backend), states, node, reason, self.actor)

    def undrain(self, node: str, reason: str) -> None:
        """Start jobs on a node again."""
        from phalanx.app.fleet_nodes import open_node_states, undrain_node

        with open_node_states() as states:
            undrain_node(self.open_backend(self.backend), states, node, reason, self.actor)
