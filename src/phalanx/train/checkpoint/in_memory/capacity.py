"""Whether hot copies have room where they go: on a disk, or in memory, which they share with all else."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import psutil

from phalanx.cluster.discovery import read_cgroup_memory
from phalanx.cluster.disks import MEMORY_FILE_SYSTEMS, find_mount
from phalanx.train.distributed.object_collectives import NodeMap

COPIES_PER_NODE = 2
"""That a node keeps."""
MAX_FREE_MEMORY_FRACTION = 0.5
"""Of the memory that is free, at most so much is taken."""


def is_memory_backed(folder: Path) -> bool:
    """Whether what lies there takes memory."""
    mount = find_mount(folder)
    return mount is not None and mount.file_system in MEMORY_FILE_SYSTEMS


def find_available_bytes(folder: Path) -> int:
    """Bytes that copies may take there, those that are there counted in."""
    available_bytes = shutil.disk_usage(folder).free
    if is_memory_backed(folder):
        limit = read_cgroup_memory(Path("/"))
        available = psutil.virtual_memory().available
        available_bytes = min(
            available_bytes, int(MAX_FREE_MEMORY_FRACTION * min(available, available if limit is None else limit))
        )
    present = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            present += path.stat().st_size
    return available_bytes + present


def explain_missing_space(gathered: list[dict[str, Any]], node_map: NodeMap) -> str:
    """Why copies have no room on one of the nodes, as their workers tell; nothing when they have."""
    for node in range(node_map.num_nodes):
        ranks = node_map.ranks_on(node)
        own = sum(gathered[rank]["bytes"] for rank in ranks)
        replica_bytes = sum(
            each["bytes"]
            for rank, each in enumerate(gathered)
            if each["exposed"] and node_map.replica_rank(rank) in ranks
        )
        available_bytes = min(gathered[rank]["room"] for rank in ranks)
        buffers = own if gathered[ranks[0]]["in_memory"] else 0
        needed = COPIES_PER_NODE * (own + replica_bytes) + buffers
        if needed > available_bytes:
            where = f"on node {node} " if node_map.num_nodes > 1 else ""
            return f"they need {needed / 1e6:,.1f} MB {where}and may take {available_bytes / 1e6:,.1f} MB"
    return ""
