"""Node rank and number of nodes, from the environment variables of the launcher that started this process."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from phalanx.errors import UsageError

STORE_VARIABLE = "PHALANX_STORE_PATH"
"""Names the file where workers of one machine meet."""
STORE_KEY_VARIABLE = "PHALANX_STORE_KEY"
"""Holds what workers of several nodes sign with what they say in the store where they meet."""
EXPECTED_VARIABLE = "PHALANX_NUM_EXPECTED_NODES"
"""How many nodes a launcher has started of a run that may train on fewer than it has."""
NODE_NAME_VARIABLE = "PHALANX_NODE_NAME"
"""Name of the machine where the host name is another: that of a pod."""


def find_node_name() -> str:
    """Return the name of this machine, as operators and the fleet file know it."""
    return os.environ.get(NODE_NAME_VARIABLE) or os.uname().nodename


@dataclass(frozen=True)
class NodeEnv:
    """Which node of how many this is, and where the leading one listens. `min_nodes`: with how many nodes the run may
    train; None: only with all of them. `num_expected`: how many should join, this one included, where that is known.
    `took_over`: this node leads in place of a leader that was lost."""

    node_rank: int = 0
    num_nodes: int = 1
    leader_address: tuple[str, int] | None = None
    min_nodes: int | None = None
    num_expected: int | None = None
    took_over: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read PHALANX_NODE_RANK, PHALANX_NUM_NODES (N or MIN:MAX), PHALANX_NUM_EXPECTED_NODES and PHALANX_LEADER_ADDR;
        one node without them."""
        min_nodes, nodes = parse_num_nodes(environment.get("PHALANX_NUM_NODES") or "1", "PHALANX_NUM_NODES=")
        node = _read_number(environment, "PHALANX_NODE_RANK") or 0
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
        expected = _read_number(environment, EXPECTED_VARIABLE)
        return cls(node, nodes, (host.strip("[]"), int(port)), min_nodes if min_nodes < nodes else None, expected)


def _read_number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text and not text.isdecimal():
        raise UsageError(f"{name}={text}: expected a number")
    return int(text) if text else None


def parse_num_nodes(text: str, name: str) -> tuple[int, int]:
    """Parse a number of nodes, N or MIN:MAX: the least and the largest. Raises UsageError, which begins with `name`."""
    match = re.fullmatch(r"(?:([0-9]+):)?([0-9]+)", text.strip())
    if match is None or not 0 < int(match[1] or match[2]) <= int(match[2]):
        raise UsageError(f"{name}{text}: expected a number of nodes such as 4, or MIN:MAX such as 2:4")
    return int(match[1] or match[2]), int(match[2])
