"""Machines of a Ray cluster as its state API describes them. Pure."""

from collections.abc import Mapping
from typing import Any

from phalanx.jobs.backends.nodes import BackendNode, NodeService


def parse_node(node: Any, jobs: Mapping[str, tuple[str, ...]]) -> BackendNode:
    """Return a machine from its `NodeState`. `jobs`: ids of the jobs on each node, by its address."""
    is_alive = node.state == "ALIVE"
    return BackendNode(
        name=node.node_ip,
        state=node.state.lower(),
        service=NodeService.OPEN if is_alive else NodeService.DOWN,
        jobs=jobs.get(node.node_ip, ()),
        reason=None if is_alive else node.state_message or None,
        num_gpus=int((node.resources_total or {}).get("GPU", 0)),
        host_names=(node.node_name,) if node.node_name not in (None, "", node.node_ip) else (),
    )
