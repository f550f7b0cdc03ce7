"""Check `limits`: open files that a process may have, and memory that it may lock, which RDMA needs."""

import resource
from collections.abc import Callable

from phalanx.cluster.health.context import CheckContext
from phalanx.cluster.health.finding import FindingValue, HealthFinding, HealthVerdict, worst_verdict
from phalanx.cluster.health.thresholds import evaluate_threshold
from phalanx.cluster.nics import discover_nics
from phalanx.formatting import BYTES_PER_MIB

GetRlimit = Callable[[int], tuple[int, int]]
TYPICAL_LOCKED_BYTES = 64 * BYTES_PER_MIB
"""Bytes: what many systems grant, and RDMA needs far more."""


def measure_ulimits(context: CheckContext, limit: GetRlimit = resource.getrlimit) -> dict[str, FindingValue]:
    """Limits of this process; None: there is none."""
    files, hard_limit = limit(resource.RLIMIT_NOFILE)
    locked, _ = limit(resource.RLIMIT_MEMLOCK)
    return {
        "open_files": None if files == resource.RLIM_INFINITY else files,
        "open_files_most": None if hard_limit == resource.RLIM_INFINITY else hard_limit,
        "locked_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "rdma_ports": sum(card.is_up and card.link_kind != "ethernet" for card in discover_nics(context.root)),
    }


def evaluate_ulimits(figures: dict[str, FindingValue]) -> list[HealthFinding]:
    files, locked = figures["open_files"], figures["locked_bytes"]
    verdicts, summary = [HealthVerdict.PASS], "no limit of open files"
    if isinstance(files, int):
        verdicts.append(evaluate_threshold("open files", files))
        summary = f"{files} open files a process"
        if verdicts[-1] is not HealthVerdict.PASS:
            summary += f": raise it (ulimit -n; at most {figures['open_files_most']} here)"
    if figures["rdma_ports"] and isinstance(locked, int) and locked <= TYPICAL_LOCKED_BYTES:
        verdicts.append(HealthVerdict.WARN)
        summary += f"; only {locked / BYTES_PER_MIB:.0f} MiB may be locked, and RDMA needs more: ulimit -l unlimited"
    return [HealthFinding("ulimits", worst_verdict(verdicts), summary, figures)]


def check_ulimits(context: CheckContext) -> list[HealthFinding]:
    return evaluate_ulimits(measure_ulimits(context))
