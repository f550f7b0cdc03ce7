"""Check `disk-rate`: a small file written, synced and read back where a run writes, beside what `phalanx calibrate`
remembers of the same disk.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from phalanx.cluster.description import Cluster
from phalanx.cluster.disks import mount_of
from phalanx.cluster.health.disk import existing
from phalanx.cluster.health.finding import Figure, Finding, Verdict, worst
from phalanx.cluster.health.remembered import host_key, remembered
from phalanx.cluster.health.site import Site
from phalanx.cluster.health.thresholds import judge
from phalanx.cluster.probe import storage

SECONDS = 1.0
PREFIX = ".phalanx-doctor-"


def evaluate(rates: storage.Rates, then: tuple[float | None, float | None]) -> list[Finding]:
    """`then`: GB/s of writing and reading that a probe found, None where it did not."""
    figures: dict[str, Figure] = {"bytes": rates.bytes, "cache": rates.cache}
    verdicts, told = [], []
    for what, rate, before in (("written", rates.write_gbps, then[0]), ("read", rates.read_gbps, then[1])):
        figures[what] = None if rate is None else rate * 1e9
        figures[f"{what}_before"] = None if before is None else before * 1e9
        if rate is None:
            told.append(f"{what}: not measured, it came from memory")
            continue
        verdicts.append(judge("disk throughput", rate * 1e9))
        text = f"{what} at {rate * 1e3:.3g} MB/s"
        if before is not None:
            verdicts.append(judge("disk slowdown", 1 - rate / before))
            text += f" ({rate / before:.0%} of the probe's)"
        told.append(text)
    verdict = worst(verdicts)
    advice = "" if verdict is Verdict.OK else "; who else uses this disk? checkpoints and data would be waited for"
    return [Finding("disk-throughput", verdict, ", ".join(told) + advice, figures)]


def before(cluster: Cluster | None, point: str | None) -> tuple[float | None, float | None]:
    """A probe's rates, if it measured what is mounted at the same place."""
    found = cluster.measured.storage if cluster and cluster.measured else None
    if cluster is None or found is None or cluster.notes.get("folder", {}).get("point") != point:
        return None, None
    return found.node_write_gbps, found.node_read_gbps


def check(site: Site) -> list[Finding]:
    nearest = existing(site.run.absolute())
    mount = mount_of(nearest, site.root)
    with tempfile.TemporaryDirectory(prefix=scratch(os.getppid()), dir=nearest) as folder:
        storage.check_room(Path(folder), quick=True)
        rates = storage.measure(Path(folder), True, SECONDS, time.perf_counter)
    return evaluate(rates, before(remembered(site, host_key(site.root)), mount.point if mount else None))


def scratch(parent: int) -> str:
    """How the folder's name begins, by the process that asked for it."""
    return f"{PREFIX}{parent}-"


def clean(payload: dict[str, Any]) -> None:
    """Remove what a measurement that was killed left behind."""
    site = Site.from_json(payload)
    for folder in existing(site.run.absolute()).glob(f"{scratch(os.getppid())}*"):
        shutil.rmtree(folder)
