"""From which figure on a machine is remarked (WARN) or unfit (BAD), and why there. One table, which
docs/how-to/health-checks.md shows.

A threshold looks at one side only: `is_upper` ones at figures that are too large, the others at those that are too
small.
"""

from dataclasses import dataclass

from phalanx.cluster.health.finding import HealthVerdict

BYTES_PER_GIB = 2.0**30
BYTES_PER_MIB = 2.0**20


@dataclass(frozen=True)
class Threshold:
    """`warn` and `fail` in the unit that is named; None where there is no such verdict."""

    unit: str
    warn: float | None
    fail: float | None
    reason: str
    is_upper: bool = True

    def verdict_of(self, value: float) -> HealthVerdict:
        """What is said of a figure."""
        for verdict, bound in ((HealthVerdict.FAIL, self.fail), (HealthVerdict.WARN, self.warn)):
            if bound is not None and (value > bound if self.is_upper else value < bound):
                return verdict
        return HealthVerdict.PASS


MATMUL_REASON = (
    "SuperBench (USENIX ATC 2024): 5 % off the baseline is defective; beyond 20 % a step of all waits for this one"
)
OUR_CHOICE = "our choice"

THRESHOLD_BY_NAME = {
    "matmul slowdown": Threshold("share", 0.05, 0.20, MATMUL_REASON),
    "clock under load": Threshold("share of the highest", 0.7, None, f"{OUR_CHOICE}, as in `phalanx "
                                                                     f"calibrate`", is_upper=False),
    "busy cores": Threshold("cores", 0.3, None, f"{OUR_CHOICE}: what any system does beside, as in `phalanx "
                                                f"calibrate`"),
    "disk slowdown": Threshold("share of its rate lost", 0.5, 0.9, f"{OUR_CHOICE}: disks vary, also with what others "
                                                                   f"do"),
    "disk throughput": Threshold("bytes/s", 50e6, 5e6, f"{OUR_CHOICE}: 20 s per GB, as in `phalanx "
                                                       f"calibrate`", is_upper=False),
    "run disk free": Threshold("bytes", 10 * BYTES_PER_GIB, BYTES_PER_GIB, f"{OUR_CHOICE}: checkpoints of a small "
                                                                           f"model", is_upper=False),
    "cache disk free": Threshold("bytes", BYTES_PER_GIB, 100 * BYTES_PER_MIB, f"{OUR_CHOICE}: cache and temporary "
                                                                              f"files", is_upper=False),
    "inodes free": Threshold("files", 10_000, 1_000, f"{OUR_CHOICE}: shards, logs and checkpoints are "
                                                     f"files", is_upper=False),
    "memory free": Threshold("share", 0.25, 0.05, f"{OUR_CHOICE}: what else runs here holds the rest", is_upper=False),
    "swap used": Threshold("share of memory", 0.05, None, f"{OUR_CHOICE}: what was swapped out once may be so again"),
    "/dev/shm free": Threshold("bytes", BYTES_PER_GIB, 32 * BYTES_PER_MIB, "NCCL's guide: 1 GiB; containers begin "
                                                                           "with 64 MiB", is_upper=False),
    "GPU memory in use": Threshold("share", 0.05, 0.5, f"{OUR_CHOICE}: a free GPU holds less than 5 %"),
    "GPU temperature margin": Threshold("degrees below slow-down", 5, 0, "NVML's slow-down threshold", is_upper=False),
    "corrected ECC errors": Threshold("errors", None, 20e6, "Azure's node health checks, ND H100 v5"),
    "retired pages": Threshold("pages", 0, 60, "NVIDIA's page retirement guide: from 60 on a board is replaced"),
    "clock error": Threshold("s", 1, None, f"{OUR_CHOICE}: events of several nodes are put in order by it"),
    "clock skew": Threshold("s", 1, 300, f"{OUR_CHOICE}; munge and Kerberos refuse credentials beyond 300 s"),
    "clock skew (report times)": Threshold("s", 30, None, f"{OUR_CHOICE}: nodes do not start at one moment"),
    "open files": Threshold("files", 1024, 256, "Linux' default; a worker has sockets to its peers", is_upper=False),
    "name resolution": Threshold("s", 2, None, f"{OUR_CHOICE}: each worker asks for names when it starts"),
    "uninterruptible processes": Threshold("processes", 0, None, "gcm's d-state check"),
    "zombies": Threshold("processes", 10, None, f"{OUR_CHOICE}, after gcm's zombie check"),
    "XID age": Threshold("s", None, 3600, f"{OUR_CHOICE}: an older one may be mended by a reset", is_upper=False),
    "round trip": Threshold("s", 1e-3, None, f"{OUR_CHOICE}: within a room it is a tenth of that"),
    "link throughput": Threshold("bytes/s", 100e6, 10e6, f"{OUR_CHOICE}: 1 Gbit/s carries 118 MB/s of "
                                                         f"TCP", is_upper=False),
    "link slowdown": Threshold("share", 0.2, 0.5, f"{OUR_CHOICE}: links vary more than devices do"),
    "link asymmetry": Threshold("times the slower way", 2, None, f"{OUR_CHOICE}: links are symmetric"),
}  # fmt: skip
"""By name."""


def evaluate_threshold(name: str, value: float) -> HealthVerdict:
    """What the table says of a figure."""
    return THRESHOLD_BY_NAME[name].verdict_of(value)
