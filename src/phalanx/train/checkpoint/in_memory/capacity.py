"""Check that in-memory checkpoints fit where they are stored: on a disk, or in memory shared with everything else."""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from phalanx.cluster.discovery import read_cgroup_memory
from phalanx.cluster.disks import MEMORY_FILE_SYSTEMS, find_mount
from phalanx.formatting import format_bytes
from phalanx.train.distributed.object_collectives import NodeMap

COPIES_PER_NODE = 2
"""Copies that a node keeps."""
MAX_FREE_MEMORY_FRACTION = 0.5
"""Maximum fraction of the free memory that copies may take."""


class CopyNeeds(NamedTuple):
    """What the copies of one worker need, and the place for them on its node."""

    size_bytes: int
    """Bytes of a copy of this worker's part."""
    is_exposed: bool
    """Whether the next node keeps a replica of it."""
    available_bytes: int = 0
    in_memory: bool = False
    """Whether the node's folder takes memory."""
    problem: str = ""
    """Why the node has no folder; then nothing else about it is known."""


def is_memory_backed(folder: Path) -> bool:
    """Return whether files in `folder` take memory (tmpfs and similar)."""
    mount = find_mount(folder)
    return mount is not None and mount.file_system in MEMORY_FILE_SYSTEMS


def find_available_bytes(folder: Path) -> int:
    """Return the bytes that copies may take in `folder`, including those of the copies that are there already."""
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


def explain_missing_space(needs: Sequence[CopyNeeds], node_map: NodeMap) -> str:
    """Return why copies do not fit on one of the nodes, given the needs of all workers by rank; "" if they fit."""
    for node in range(node_map.num_nodes):
        ranks = node_map.ranks_on(node)
        own = sum(needs[rank].size_bytes for rank in ranks)
        replica_bytes = sum(
            each.size_bytes
            for rank, each in enumerate(needs)
            if each.is_exposed and node_map.replica_rank(rank) in ranks
        )
        available_bytes = min(needs[rank].available_bytes for rank in ranks)
        buffers = own if needs[ranks[0]].in_memory else 0
        needed = COPIES_PER_NODE * (own + replica_bytes) + buffers
        if needed > available_bytes:
            where = f"on node {node} " if node_map.num_nodes > 1 else ""
            return f"they need {format_bytes(needed)} {where}and may take {format_bytes(available_bytes)}"
    return ""
