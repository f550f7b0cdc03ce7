"""Bind a process to the cores of its GPU's NUMA node. From another socket, memory reads and writes to the GPU go
through the link between the sockets."""

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path


def find_local_cores(address: str, root: Path = Path("/")) -> frozenset[int]:
    """Return the cores of the NUMA node of a PCI device ("0000:1b:00.0") from sysfs; empty if unknown."""
    try:
        text = (root / "sys/bus/pci/devices" / address / "local_cpulist").read_text().strip()
    except OSError:  # no such device in this container
        return frozenset()
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        if (match := re.fullmatch(r"(\d+)(?:-(\d+))?", part)) is None:
            return frozenset()
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def bind_to_local_cores(
    address: str,
    root: Path = Path("/"),
    allowed: Collection[int] | None = None,
    set_affinity: Callable[[Collection[int]], None] = lambda cores: os.sched_setaffinity(0, cores),
) -> frozenset[int]:
    """Restrict this process and its children to the cores near a device. Returns these cores.

    Returns an empty set and changes nothing when the near cores are unknown, or when all or none of the allowed cores
    are near.
    """
    local_cores = find_local_cores(address, root)
    if not local_cores:  # on systems other than Linux, too
        return local_cores
    allowed_now = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    if not local_cores & allowed_now or local_cores >= allowed_now:
        return frozenset()
    set_affinity(local_cores & allowed_now)
    return local_cores & allowed_now
