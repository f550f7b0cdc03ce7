"""Find an earlier calibration of this machine as the baseline of health checks.

`phalanx calibrate` names its file by a digest of the whole machine, which changes when a GPU is lost. So this module
reads all files, and each check states which fields of the key must match.
"""

from collections.abc import Collection
from pathlib import Path

from phalanx.cluster.calibration.hardware_key import hardware_key
from phalanx.cluster.discovery import discover_machine
from phalanx.cluster.health.context import CheckContext
from phalanx.cluster.load import load_cluster
from phalanx.cluster.spec import Cluster
from phalanx.errors import RecipeError

MAX_FILES_READ = 8
"""Read only this many files, the newest first: each takes 0.5 s."""
HOST_KEY_FIELDS = frozenset({"cpu", "flags", "kernel", "driver"})
"""Fields of a calibration's key that are known without asking torch for GPUs."""


def read_host_key(root: Path = Path("/")) -> dict[str, str]:
    """Return the fields of a calibration's key that do not depend on GPUs."""
    key = hardware_key(discover_machine(root, find_accelerators=list), root)
    return {name: text for name, text in key.items() if name in HOST_KEY_FIELDS}


def find_baseline(context: CheckContext, key: dict[str, str], ignored_fields: Collection[str] = ()) -> Cluster | None:
    """Return the newest calibration that matches all fields of `key` except the ignored ones; None without one."""
    folder = context.cache_dir / "clusters"
    files = sorted(folder.glob("*.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)
    required_fields = {name: text for name, text in key.items() if name not in ignored_fields}
    for path in files[:MAX_FILES_READ]:
        try:
            cluster = load_cluster(str(path))
        except RecipeError:  # incomplete, or of another version: `phalanx calibrate` rewrites it
            continue
        if cluster.measured is not None and required_fields.items() <= cluster.measured.key.items():
            return cluster
    return None


def baseline_gpu_count(context: CheckContext) -> int | None:
    """Return the number of GPUs in the newest calibration of this machine; None without one, or if it was of the
    CPU."""
    cluster = find_baseline(context, read_host_key(context.root))
    return None if cluster is None or cluster.node.accelerator.generation == "cpu" else cluster.node.count
