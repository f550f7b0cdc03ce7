"""What `phalanx calibrate` once measured on this machine, as far as it still holds: what the checks compare with.

A probe's file is found by a digest of the whole machine, which changes when a GPU is lost; here files are looked
through, and each check says what must be alike.
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
"""Files that are read, those that were written last: each takes half a second."""
HOST_KEY_FIELDS = frozenset({"cpu", "flags", "kernel", "driver"})
"""Of a probe's key, what is known without asking torch for GPUs."""


def read_host_key(root: Path = Path("/")) -> dict[str, str]:
    """The part of a probe's key that does not depend on GPUs."""
    key = hardware_key(discover_machine(root, find_accelerators=list), root)
    return {name: text for name, text in key.items() if name in HOST_KEY_FIELDS}


def find_baseline(context: CheckContext, key: dict[str, str], ignored_fields: Collection[str] = ()) -> Cluster | None:
    """The newest probe whose key has everything of `key` but what is ignored; None where there is none."""
    folder = context.cache_dir / "clusters"
    files = sorted(folder.glob("*.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)
    required_fields = {name: text for name, text in key.items() if name not in ignored_fields}
    for path in files[:MAX_FILES_READ]:
        try:
            cluster = load_cluster(str(path))
        except RecipeError:  # torn, or of another version: `phalanx calibrate` makes it again
            continue
        if cluster.measured is not None and required_fields.items() <= cluster.measured.key.items():
            return cluster
    return None


def baseline_gpu_count(context: CheckContext) -> int | None:
    """How many GPUs the newest probe of this machine found; None without one, or when that trained on its CPU."""
    cluster = find_baseline(context, read_host_key(context.root))
    return None if cluster is None or cluster.node.accelerator.generation == "cpu" else cluster.node.count
