"""Give a job its share of a node's cores and memory. Slurm's own default is one core a task, for all workers of a node.
Pure: what `sinfo` prints in, a job out."""

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.jobs.spec import Job

logger = logging.getLogger(__name__)

SIZES_COMMAND = ("sinfo", "--noheader", "--Node", "--format=%c %m %G")
MAX_CORES_PER_WORKER = 4
"""Cores for each worker on CPUs, where nodes have as many."""
MIN_NODE_MIB = 1024
"""A node with less has no RealMemory in slurm.conf: the default is 1 MiB."""


@dataclass(frozen=True)
class NodeSize:
    """CPUs, MiB of memory and GPUs of a node."""

    cpus: int
    memory_mib: int
    gpus: int


def parse_node_sizes(text: str) -> list[NodeSize]:
    """Parse what SIZES_COMMAND prints; lines of another form are left out."""
    sizes = []
    for line in text.splitlines():
        if match := re.fullmatch(r"(\d+)\+? (\d+)\+? (.*)", line.strip()):
            gpus = sum(int(count) for count in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", match[3]))
            sizes.append(NodeSize(int(match[1]), int(match[2]), gpus))
    return sizes


def add_node_share(job: Job, sizes: Sequence[NodeSize]) -> Job:
    """Return the job with cores and memory, where it leaves them open: of a node the share that its GPUs are, whole
    nodes for all GPUs, and without GPUs a few cores for each worker. `sizes`: the nodes that it may get."""
    fitting = [size for size in sizes if size.gpus >= job.gpus_per_node]
    is_exclusive = job.backend_options.get("exclusive", "no") not in ("no", "false")
    if not fitting:
        logger.warning(
            "job %s: sinfo does not say how large nodes are; the job asks for a few cores a worker", job.name
        )
        return job if job.cpus_per_node else replace(job, cpus_per_node=job.min_cpus_per_node)
    shares = [1.0 if is_exclusive or not job.gpus_per_node else job.gpus_per_node / size.gpus for size in fitting]
    cpus = min(math.floor(size.cpus * share) for size, share in zip(fitting, shares, strict=True))
    if not job.gpus_per_node and not is_exclusive:
        cpus = min(cpus, MAX_CORES_PER_WORKER * job.workers_per_node)
    memory_mib = min(math.floor(size.memory_mib * share) for size, share in zip(fitting, shares, strict=True))
    memory_bytes = memory_mib * 2**20 if job.gpus_per_node and memory_mib >= MIN_NODE_MIB else None
    return replace(job, cpus_per_node=job.cpus_per_node or max(1, cpus), memory_bytes=job.memory_bytes or memory_bytes)
