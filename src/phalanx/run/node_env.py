"""Node rank and number of nodes, from the environment variables of the launcher that started this process."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from phalanx.errors import UsageError

STORE_VARIABLE = "PHALANX_STORE_PATH"
"""Names the file where workers of one machine meet."""
STORE_KEY_VARIABLE = "PHALANX_STORE_KEY"
"""Holds what workers of several nodes sign with what they say in the store where they meet."""
NODE_NAME_VARIABLE = "PHALANX_NODE_NAME"
"""Name of the machine where the host name is another: that of a pod."""


def find_node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the name of this machine, as operators and the fleet file know it."""
    return environment.get(NODE_NAME_VARIABLE) or os.uname().nodename


@dataclass(frozen=True)
class NodeEnv:
    """Which node of how many this is, and where the leading one listens."""

    node_rank: int = 0
    num_nodes: int = 1
    leader_address: tuple[str, int] | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """As PHALANX_NODE_RANK, PHALANX_NUM_NODES and PHALANX_LEADER_ADDR say; alone when they say nothing."""
        try:
            nodes = int(environment.get("PHALANX_NUM_NODES") or 1)
            node = int(environment.get("PHALANX_NODE_RANK") or 0)
        except ValueError as error:
            raise UsageError(f"PHALANX_NUM_NODES and PHALANX_NODE_RANK must be numbers: {error}") from None
        if not 0 <= node < nodes:
            raise UsageError(f"PHALANX_NODE_RANK={node} is not below PHALANX_NUM_NODES={nodes}")
        if nodes == 1:
            return cls()
        host, _, port = environment.get("PHALANX_LEADER_ADDR", "").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UsageError(
                f"PHALANX_NUM_NODES={nodes} needs PHALANX_LEADER_ADDR=HOST:PORT, where node 0 listens; found "
                f"{environment.get('PHALANX_LEADER_ADDR', '')!r}"
            )
        return cls(node, nodes, (host.strip("[]"), int(port)))
