"""Check `limits`: open files that a process may have, and memory that it may lock, which RDMA needs."""

import resource
from collections.abc import Callable

from phalanx.cluster.cards import cards
from phalanx.cluster.health.finding import Figure, Finding, Verdict, worst
from phalanx.cluster.health.site import Site
from phalanx.cluster.health.thresholds import MIB, judge

Limit = Callable[[int], tuple[int, int]]
LOCKED = 64 * MIB
"""Bytes: what many systems grant, and RDMA needs far more."""


def look(site: Site, limit: Limit = resource.getrlimit) -> dict[str, Figure]:
    """Limits of this process; None: there is none."""
    files, most = limit(resource.RLIMIT_NOFILE)
    locked, _ = limit(resource.RLIMIT_MEMLOCK)
    return {
        "open_files": None if files == resource.RLIM_INFINITY else files,
        "open_files_most": None if most == resource.RLIM_INFINITY else most,
        "locked": None if locked == resource.RLIM_INFINITY else locked,
        "rdma_ports": sum(card.up and card.kind != "ethernet" for card in cards(site.root)),
    }


def evaluate(figures: dict[str, Figure]) -> list[Finding]:
    files, locked = figures["open_files"], figures["locked"]
    verdicts, told = [Verdict.OK], "no limit of open files"
    if isinstance(files, int):
        verdicts.append(judge("open files", files))
        told = f"{files} open files a process"
        if verdicts[-1] is not Verdict.OK:
            told += f": raise it (ulimit -n; at most {figures['open_files_most']} here)"
    if figures["rdma_ports"] and isinstance(locked, int) and locked <= LOCKED:
        verdicts.append(Verdict.WARN)
        told += f"; only {locked / MIB:.0f} MiB may be locked, and RDMA needs more: ulimit -l unlimited"
    return [Finding("ulimits", worst(verdicts), told, figures)]


def check(site: Site) -> list[Finding]:
    return evaluate(look(site))
