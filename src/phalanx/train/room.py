"""Whether hot copies have room where they go: on a disk, or in memory, which they share with all else."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import psutil

from phalanx.cluster.discover import cgroup_memory
from phalanx.cluster.disks import IN_MEMORY, mount_of
from phalanx.train.nodes import Nodes

COPIES = 2
"""That a node keeps."""
MEMORY_SHARE = 0.5
"""Of the memory that is free, at most so much is taken."""


def in_memory(folder: Path) -> bool:
    """Whether what lies there takes memory."""
    mount = mount_of(folder)
    return mount is not None and mount.kind in IN_MEMORY


def room_in(folder: Path) -> int:
    """Bytes that copies may take there, those that are there counted in."""
    room = shutil.disk_usage(folder).free
    if in_memory(folder):
        limit = cgroup_memory(Path("/"))
        available = psutil.virtual_memory().available
        room = min(room, int(MEMORY_SHARE * min(available, available if limit is None else limit)))
    present = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            present += path.stat().st_size
    return room + present


def no_room(said: list[dict[str, Any]], nodes: Nodes) -> str:
    """Why copies have no room on one of the nodes, as their workers tell; nothing when they have."""
    for node in range(nodes.count):
        ranks = nodes.ranks(node)
        own = sum(said[rank]["bytes"] for rank in ranks)
        kept = sum(each["bytes"] for rank, each in enumerate(said) if each["exposed"] and nodes.keeper(rank) in ranks)
        room = min(said[rank]["room"] for rank in ranks)
        buffers = own if said[ranks[0]]["in_memory"] else 0
        needed = COPIES * (own + kept) + buffers
        if needed > room:
            where = f"on node {node} " if nodes.count > 1 else ""
            return f"they need {needed / 1e6:,.1f} MB {where}and may take {room / 1e6:,.1f} MB"
    return ""
