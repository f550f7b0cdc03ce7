"""How a guard reaches nodes. Requests and reports may be late, lost, or arrive twice: nothing waits for one."""

from collections.abc import Mapping
from typing import Protocol

from phalanx_fleet.power.messages import NodeReport, NodeRequest
from phalanx_fleet.power.node_keeper import NodeKeeper


class NodeLinks(Protocol):
    """Carries messages to and from nodes. `problems`: why nodes are not reached."""

    problems: dict[str, str]

    def send(self, node: str, request: NodeRequest) -> None:
        """Send a request, without waiting. A node that cannot be reached is silent."""

    def receive(self) -> list[NodeReport]:
        """Return the reports that have arrived since the last call."""

    def count_reachable(self) -> int:
        """Return how many nodes may answer what was sent to them."""

    def close(self) -> None:
        """End the connections; what nodes were lent ends by their leases."""


class LocalLinks:
    """Nodes of which the keepers are in this process."""

    def __init__(self, keepers: Mapping[str, NodeKeeper]):
        self._keepers = keepers
        self._reports: list[NodeReport] = []
        self.problems: dict[str, str] = {}

    def send(self, node: str, request: NodeRequest) -> None:
        """Have the node answer at once."""
        if node in self._keepers:
            self._reports.append(self._keepers[node].answer(request))

    def receive(self) -> list[NodeReport]:
        """Return all answers; keepers end leases meanwhile."""
        for keeper in self._keepers.values():
            keeper.check_lease()
        reports, self._reports = self._reports, []
        return reports

    def count_reachable(self) -> int:
        """Return the number of keepers."""
        return len(self._keepers)

    def close(self) -> None:
        """End all leases now: nothing else would, once this process is gone."""
        for keeper in self._keepers.values():
            keeper.end_lease()
