"""Check `disk-throughput`: write, sync and read a small file where the run writes, and compare the rates with those
that `phalanx calibrate` measured on the same disk.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from phalanx.cluster.calibration import storage
from phalanx.cluster.disks import find_mount
from phalanx.cluster.health.baseline import find_baseline, read_host_key
from phalanx.cluster.health.checks.disk_space import nearest_existing
from phalanx.cluster.health.context import CheckContext
from phalanx.cluster.health.finding import FindingValue, HealthFinding, HealthVerdict, worst_verdict
from phalanx.cluster.health.thresholds import evaluate_threshold
from phalanx.cluster.spec import Cluster
from phalanx.formatting import format_bytes

MEASUREMENT_S = 1.0
SCRATCH_PREFIX = ".phalanx-doctor-"


def evaluate_disk_throughput(
    rates: storage.StorageRates, baseline: tuple[float | None, float | None]
) -> list[HealthFinding]:
    """Evaluate the rates. `baseline`: GB/s of writing and reading from the calibration, None if unknown."""
    figures: dict[str, FindingValue] = {"size_bytes": rates.num_bytes, "cache": rates.read_mode}
    verdicts, texts = [], []
    for key, operation, rate, baseline_rate in (
        ("write", "written", rates.write_gbps, baseline[0]),
        ("read", "read", rates.read_gbps, baseline[1]),
    ):
        figures[f"{key}_bytes_per_s"] = None if rate is None else rate * 1e9
        figures[f"{key}_baseline_bytes_per_s"] = None if baseline_rate is None else baseline_rate * 1e9
        if rate is None:
            texts.append(f"{operation}: not measured, it came from memory")
            continue
        verdicts.append(evaluate_threshold("disk throughput", rate * 1e9))
        text = f"{operation} at {format_bytes(rate * 1e9)}/s"
        if baseline_rate is not None:
            verdicts.append(evaluate_threshold("disk slowdown", 1 - rate / baseline_rate))
            text += f" ({rate / baseline_rate:.0%} of the calibrated rate)"
        texts.append(text)
    verdict = worst_verdict(verdicts)
    advice = (
        "" if verdict is HealthVerdict.PASS else "; check what else uses this disk: checkpoints and data will be slow"
    )
    return [HealthFinding("disk-throughput", verdict, ", ".join(texts) + advice, figures)]


def baseline_rates(cluster: Cluster | None, mount_point: str | None) -> tuple[float | None, float | None]:
    """Return the rates of a calibration, if it measured the same mount point."""
    found = cluster.measured.storage if cluster and cluster.measured else None
    if cluster is None or found is None or cluster.notes.get("folder", {}).get("mount_point") != mount_point:
        return None, None
    return found.node_write_gbps, found.node_read_gbps


def check_disk_throughput(context: CheckContext) -> list[HealthFinding]:
    nearest = nearest_existing(context.run_dir.absolute())
    mount = find_mount(nearest, context.root)
    with tempfile.TemporaryDirectory(prefix=scratch_prefix(os.getppid()), dir=nearest) as folder:
        storage.check_free_space(Path(folder), quick=True)
        rates = storage.measure_storage(Path(folder), True, MEASUREMENT_S, time.perf_counter)
    return evaluate_disk_throughput(
        rates, baseline_rates(find_baseline(context, read_host_key(context.root)), mount.mount_point if mount else None)
    )


def scratch_prefix(parent: int) -> str:
    """Return the name prefix of the scratch directory of the requesting process."""
    return f"{SCRATCH_PREFIX}{parent}-"


def remove_scratch(payload: dict[str, Any]) -> None:
    """Remove what a measurement that was killed left behind."""
    context = CheckContext.from_json(payload)
    for folder in nearest_existing(context.run_dir.absolute()).glob(f"{scratch_prefix(os.getppid())}*"):
        shutil.rmtree(folder)
