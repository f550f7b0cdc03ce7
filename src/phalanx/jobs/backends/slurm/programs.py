"""Run Slurm's programs, and read what they say about nodes: `sinfo` lists them, `squeue` the jobs on them, and
`scontrol update` drains and undrains them.
"""

import logging
import math
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import BackendNode, NodeService
from phalanx.jobs.backends.slurm.status import expand_hostlist, split_columns
from phalanx.jobs.spec import Job

logger = logging.getLogger(__name__)

RunProgram = Callable[[Sequence[str]], tuple[int, str, str]]
"""Runs a program; its exit code (127: there is none), what it printed, and its errors."""

COMMAND_TIMEOUT_S = 600.0
"""Time limit of one of Slurm's programs, which retry for a while to reach a controller."""


SIZES_COMMAND = ("sinfo", "--noheader", "--Node", "--format=%c %m %G")
MAX_CORES_PER_WORKER = 4
"""Cores for each worker on CPUs, where nodes have as many."""
MIN_NODE_MIB = 1024
"""A node with less has no RealMemory in slurm.conf: the default is 1 MiB."""

NODE_COLUMNS = {
    "name": ("nodelist", 256),
    "host": ("nodehost", 256),
    "state": ("statelong", 64),
    "gres": ("gres", 512),
    "user": ("user", 64),
    "reason": ("reason", 1024),
}
"""Columns of `sinfo --Format`: name and width, at which sinfo truncates. The reason comes last: it may hold any
character, and sinfo counts bytes."""
NODE_FORMAT = ",".join(f"{name}:{width}" for name, width in NODE_COLUMNS.values())
SINFO_COMMAND = ("sinfo", "--noheader", "--Node", "--all", f"--Format={NODE_FORMAT}")
SQUEUE_COMMAND = ("squeue", "--noheader", "--all", "--array", "--states=running,completing", "--format=%i %N")
DRAINED_STATES = ("drain", "fail")
"""Beginnings of states in which an administrator keeps new jobs away; `drained*` is one that does not answer, too."""
OPEN_STATES = ("idle", "mixed", "alloc", "comp", "plan", "resv", "reserved", "maint")
PERMISSION_TEXTS = ("Invalid user id", "Access/permission denied")
"""Answers of `scontrol update` to a user that may not change nodes."""
UNKNOWN_TEXTS = ("", "none", "Unknown", "(null)")


def run_program(argv: Sequence[str]) -> tuple[int, str, str]:
    begun = time.perf_counter()
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=COMMAND_TIMEOUT_S
        )
    except FileNotFoundError:
        return 127, "", f"{argv[0]}: not found"
    except subprocess.TimeoutExpired:
        return 1, "", f"{argv[0]} did not answer within {COMMAND_TIMEOUT_S:.0f} s"
    logger.debug("%s: exit code %d in %.2f s", shlex.join(argv), done.returncode, time.perf_counter() - begun)
    return done.returncode, done.stdout, done.stderr


def clean_error(err: str) -> str:
    """Slurm's words, in one line, without what it puts before them."""
    if "Could not establish a configuration source" in err:
        return (
            "Slurm's programs find no slurm.conf on this machine; submit from a login node of the cluster, or set "
            "SLURM_CONF to the path of the cluster's slurm.conf"
        )
    lines = [re.sub(r"^(\w+: )?(error: )?", "", line).strip() for line in err.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line)) or "it failed without a word"


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


def parse_nodes(nodes_text: str, jobs_text: str) -> list[BackendNode]:
    """Return the nodes of both outputs. A node of several partitions is printed once for each of them."""
    jobs = _parse_jobs(jobs_text)
    found: dict[str, BackendNode] = {}
    for line in nodes_text.splitlines():
        row = split_columns(line, NODE_COLUMNS)
        if row["name"] and row["name"] not in found:
            found[row["name"]] = BackendNode(
                name=row["name"],
                state=row["state"],
                service=_parse_service(row["state"]),
                jobs=tuple(jobs.get(row["name"], ())),
                reason=_format_reason(row),
                num_gpus=count_gpus(row["gres"]),
                host_names=(row["host"],) if row["host"] not in ("", row["name"]) else (),
            )
    return list(found.values())


def count_gpus(gres: str) -> int:
    """Return the GPUs of a node's generic resources: `gpu:h100:8(S:0-1),nic:4` has 8."""
    kinds = (part.split(":") for part in re.sub(r"\([^)]*\)", "", gres).split(","))
    return sum(int(kind[-1]) if kind[-1].isdecimal() else 1 for kind in kinds if kind[0] == "gpu")


def _parse_service(state: str) -> NodeService:
    if state.startswith(DRAINED_STATES):
        return NodeService.DRAINED
    is_answering = not state.endswith("*")
    return NodeService.OPEN if is_answering and state.startswith(OPEN_STATES) else NodeService.DOWN


def _format_reason(row: Mapping[str, str]) -> str | None:
    if row["reason"] in UNKNOWN_TEXTS:
        return None
    user = re.sub(r"\(.*", "", row["user"])  # "ada(1000)"
    return row["reason"] if user in UNKNOWN_TEXTS else f"{row['reason']} ({user})"


def _parse_jobs(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        id, _, nodes = line.strip().partition(" ")
        for node in expand_hostlist(nodes):
            found.setdefault(node, []).append(id)
    return found


class SlurmNodes:
    """The nodes of a Slurm: NodeBackend's part of its backend."""

    def __init__(self, run_program: RunProgram):
        self._run_program = run_program

    def list_nodes(self) -> list[BackendNode]:
        """Return the nodes of all partitions, with the jobs of all users on them."""
        outputs = []
        for command in (SINFO_COMMAND, SQUEUE_COMMAND):
            code, out, err = self._run_program(command)
            if code:
                raise UsageError(f"slurm: {clean_error(err)}")
            outputs.append(out)
        return parse_nodes(*outputs)

    def drain_node(self, node: str, reason: str, actor: str) -> None:
        """Drain a node. Slurm records its own user as the actor."""
        self._update_node(node, "State=DRAIN", f"Reason={reason}")

    def undrain_node(self, node: str) -> None:
        self._update_node(node, "State=RESUME")

    def _update_node(self, node: str, *changes: str) -> None:
        code, _, err = self._run_program(("scontrol", "update", f"NodeName={node}", *changes))
        if code and any(text in err for text in PERMISSION_TEXTS):  # Slurm's level of an operator is not enough
            raise UsageError(
                f"{node}: Slurm refuses it to your user; it takes root, SlurmUser, or a user with "
                "`sacctmgr modify user NAME set adminlevel=admin`"
            )
        if code:
            raise UsageError(f"{node}: {clean_error(err)}")
