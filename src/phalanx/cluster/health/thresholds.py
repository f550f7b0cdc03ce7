"""From which figure on a machine is remarked (WARN) or unfit (BAD), and why there. One table, which
docs/how-to/health-checks.md shows.

A threshold looks at one side only: `high` ones at figures that are too large, the others at those that are too small.
"""

from dataclasses import dataclass

from phalanx.cluster.health.finding import Verdict

GIB = 2.0**30
MIB = 2.0**20


@dataclass(frozen=True)
class Threshold:
    """`warn` and `bad` in the unit that is named; None where there is no such verdict."""

    unit: str
    warn: float | None
    bad: float | None
    why: str
    high: bool = True

    def judge(self, value: float) -> Verdict:
        """What is said of a figure."""
        for verdict, bound in ((Verdict.BAD, self.bad), (Verdict.WARN, self.warn)):
            if bound is not None and (value > bound if self.high else value < bound):
                return verdict
        return Verdict.OK


PACE = "SuperBench (USENIX ATC 2024): 5 % off the baseline is defective; beyond 20 % a step of all waits for this one"
OURS = "our choice"

TABLE = {
    "matmul slowdown": Threshold("share", 0.05, 0.20, PACE),
    "clock under load": Threshold("share of the highest", 0.7, None, f"{OURS}, as in `phalanx calibrate`", high=False),
    "busy cores": Threshold("cores", 0.3, None, f"{OURS}: what any system does beside, as in `phalanx calibrate`"),
    "disk slowdown": Threshold("share of its rate lost", 0.5, 0.9, f"{OURS}: disks vary, also with what others do"),
    "disk throughput": Threshold("bytes/s", 50e6, 5e6, f"{OURS}: 20 s per GB, as in `phalanx calibrate`", high=False),
    "run disk free": Threshold("bytes", 10 * GIB, GIB, f"{OURS}: checkpoints of a small model", high=False),
    "cache disk free": Threshold("bytes", GIB, 100 * MIB, f"{OURS}: cache and temporary files", high=False),
    "inodes free": Threshold("files", 10_000, 1_000, f"{OURS}: shards, logs and checkpoints are files", high=False),
    "memory free": Threshold("share", 0.25, 0.05, f"{OURS}: what else runs here holds the rest", high=False),
    "swap used": Threshold("share of memory", 0.05, None, f"{OURS}: what was swapped out once may be so again"),
    "/dev/shm free": Threshold("bytes", GIB, 32 * MIB, "NCCL's guide: 1 GiB; containers begin with 64 MiB", high=False),
    "GPU memory in use": Threshold("share", 0.05, 0.5, f"{OURS}: a free GPU holds less than 5 %"),
    "GPU temperature margin": Threshold("degrees below slow-down", 5, 0, "NVML's slow-down threshold", high=False),
    "corrected ECC errors": Threshold("errors", None, 20e6, "Azure's node health checks, ND H100 v5"),
    "retired pages": Threshold("pages", 0, 60, "NVIDIA's page retirement guide: from 60 on a board is replaced"),
    "clock error": Threshold("s", 1, None, f"{OURS}: events of several nodes are put in order by it"),
    "clock skew": Threshold("s", 1, 300, f"{OURS}; munge and Kerberos refuse credentials beyond 300 s"),
    "clock skew (report times)": Threshold("s", 30, None, f"{OURS}: nodes do not start at one moment"),
    "open files": Threshold("files", 1024, 256, "Linux' default; a worker has sockets to its peers", high=False),
    "name resolution": Threshold("s", 2, None, f"{OURS}: each worker asks for names when it starts"),
    "uninterruptible processes": Threshold("processes", 0, None, "gcm's d-state check"),
    "zombies": Threshold("processes", 10, None, f"{OURS}, after gcm's zombie check"),
    "XID age": Threshold("s", None, 3600, f"{OURS}: an older one may be mended by a reset", high=False),
    "round trip": Threshold("s", 1e-3, None, f"{OURS}: within a room it is a tenth of that"),
    "link throughput": Threshold("bytes/s", 100e6, 10e6, f"{OURS}: 1 Gbit/s carries 118 MB/s of TCP", high=False),
    "link slowdown": Threshold("share", 0.2, 0.5, f"{OURS}: links vary more than devices do"),
    "link asymmetry": Threshold("times the slower way", 2, None, f"{OURS}: links are symmetric"),
}  # fmt: skip
"""By name."""


def judge(name: str, value: float) -> Verdict:
    """What the table says of a figure."""
    return TABLE[name].judge(value)
