"""Thresholds of health checks for WARN and FAIL, with reasons. docs/how-to/health-checks.md shows the table.

A threshold is one-sided: an upper limit if `is_upper`, else a lower limit.
"""

from dataclasses import dataclass

from phalanx.cluster.health.finding import HealthVerdict
from phalanx.formatting import BYTES_PER_GIB, BYTES_PER_MIB


@dataclass(frozen=True)
class Threshold:
    """Limits `warn` and `fail` in `unit`; None if there is no such verdict."""

    unit: str
    warn: float | None
    fail: float | None
    reason: str
    is_upper: bool = True

    def verdict_of(self, value: float) -> HealthVerdict:
        """Return the verdict for a value."""
        for verdict, bound in ((HealthVerdict.FAIL, self.fail), (HealthVerdict.WARN, self.warn)):
            if bound is not None and (value > bound if self.is_upper else value < bound):
                return verdict
        return HealthVerdict.PASS


MATMUL_REASON = (
    "SuperBench (USENIX ATC 2024): 5 % off the baseline is defective; beyond 20 % every step waits for this device"
)
OUR_CHOICE = "our choice"

THRESHOLD_BY_NAME = {
    "matmul slowdown": Threshold("share", 0.05, 0.20, MATMUL_REASON),
    "clock under load": Threshold("share of the maximum", 0.7, None, f"{OUR_CHOICE}, as in `phalanx "
                                                                     f"calibrate`", is_upper=False),
    "busy cores": Threshold("cores", 0.3, None, f"{OUR_CHOICE}: background load of an idle system, as in "
                                                f"`phalanx calibrate`"),
    "disk slowdown": Threshold("share of its rate lost", 0.5, 0.9, f"{OUR_CHOICE}: disk rates vary, also with other "
                                                                   f"load"),
    "disk throughput": Threshold("bytes/s", 50e6, 5e6, f"{OUR_CHOICE}: 20 s per GB, as in `phalanx "
                                                       f"calibrate`", is_upper=False),
    "run disk free": Threshold("bytes", 10 * BYTES_PER_GIB, BYTES_PER_GIB, f"{OUR_CHOICE}: checkpoints of a small "
                                                                           f"model", is_upper=False),
    "cache disk free": Threshold("bytes", BYTES_PER_GIB, 100 * BYTES_PER_MIB, f"{OUR_CHOICE}: cache and temporary "
                                                                              f"files", is_upper=False),
    "inodes free": Threshold("files", 10_000, 1_000, f"{OUR_CHOICE}: shards, logs and checkpoints are "
                                                     f"files", is_upper=False),
    "memory free": Threshold("share", 0.25, 0.05, f"{OUR_CHOICE}: other programs use the rest", is_upper=False),
    "swap used": Threshold("share of memory", 0.05, None, f"{OUR_CHOICE}: memory that was swapped out may be again"),
    "/dev/shm free": Threshold("bytes", BYTES_PER_GIB, 32 * BYTES_PER_MIB, "NCCL's guide: 1 GiB; containers begin "
                                                                           "with 64 MiB", is_upper=False),
    "GPU memory in use": Threshold("share", 0.05, 0.5, f"{OUR_CHOICE}: a free GPU holds less than 5 %"),
    "GPU temperature margin": Threshold("degrees below slow-down", 5, 0, "NVML's slow-down threshold", is_upper=False),
    "corrected ECC errors": Threshold("errors", None, 20e6, "Azure's node health checks, ND H100 v5"),
    "retired pages": Threshold("pages", 0, 60, "NVIDIA's page retirement guide: from 60 on a board is replaced"),
    "clock error": Threshold("s", 1, None, f"{OUR_CHOICE}: events of several nodes are sorted by time"),
    "clock skew": Threshold("s", 1, 300, f"{OUR_CHOICE}; munge and Kerberos refuse credentials beyond 300 s"),
    "clock skew (report times)": Threshold("s", 30, None, f"{OUR_CHOICE}: nodes do not start at the same time"),
    "open files": Threshold("files", 1024, 256, "Linux' default; a worker has sockets to its peers", is_upper=False),
    "name resolution": Threshold("s", 2, None, f"{OUR_CHOICE}: each worker resolves names when it starts"),
    "uninterruptible processes": Threshold("processes", 0, None, "gcm's d-state check"),
    "zombies": Threshold("processes", 10, None, f"{OUR_CHOICE}, after gcm's zombie check"),
    "XID age": Threshold("s", None, 3600, f"{OUR_CHOICE}: a reset may have fixed an older one", is_upper=False),
    "round trip": Threshold("s", 1e-3, None, f"{OUR_CHOICE}: within a data center it is a tenth of that"),
    "link throughput": Threshold("bytes/s", 100e6, 10e6, f"{OUR_CHOICE}: 1 Gbit/s carries 118 MB/s of "
                                                         f"TCP", is_upper=False),
    "link slowdown": Threshold("share", 0.2, 0.5, f"{OUR_CHOICE}: links vary more than devices do"),
    "link asymmetry": Threshold("times the slower way", 2, None, f"{OUR_CHOICE}: links are symmetric"),
}  # fmt: skip
"""By name."""


def evaluate_threshold(name: str, value: float) -> HealthVerdict:
    """Return the verdict of the named threshold for a value."""
    return THRESHOLD_BY_NAME[name].verdict_of(value)
