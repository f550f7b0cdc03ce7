"""Cores that share memory with a GPU. On a machine with several sockets a process that feeds a GPU from the other one
reads its memory, and writes to the GPU, through the link between the sockets."""

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path


def find_local_cores(address: str, root: Path = Path("/")) -> frozenset[int]:
    """Those of the NUMA node of a PCI device, such as "0000:1b:00.0", as the kernel tells; none where it does not."""
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
    """Have this process, and what it starts, run on cores near a device only; which ones. Nothing changes (an empty
    set) where nothing is known of these, where all that are allowed are near, or none."""
    local_cores = find_local_cores(address, root)
    if not local_cores:  # on systems other than Linux, too
        return local_cores
    allowed_now = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    if not local_cores & allowed_now or local_cores >= allowed_now:
        return frozenset()
    set_affinity(local_cores & allowed_now)
    return local_cores & allowed_now
