"""What `phalanx calibrate` once measured on this machine, as far as it still holds: what the checks compare with.

A probe's file is found by a digest of the whole machine, which changes when a GPU is lost; here files are looked
through, and each check says what must be alike.
"""

from collections.abc import Collection
from pathlib import Path

from phalanx.cluster.description import Cluster
from phalanx.cluster.discover import this_machine
from phalanx.cluster.health.site import Site
from phalanx.cluster.naming import load_cluster
from phalanx.cluster.probe.key import key_of
from phalanx.errors import RecipeError

MOST = 8
"""Files that are read, those that were written last: each takes half a second."""
HARDWARE = frozenset({"cpu", "flags", "kernel", "driver"})
"""Of a probe's key, what is known without asking torch for GPUs."""


def host_key(root: Path = Path("/")) -> dict[str, str]:
    """The part of a probe's key that does not depend on GPUs."""
    key = key_of(this_machine(root, find_accelerators=list), root)
    return {name: text for name, text in key.items() if name in HARDWARE}


def remembered(site: Site, key: dict[str, str], ignoring: Collection[str] = ()) -> Cluster | None:
    """The newest probe whose key has everything of `key` but what is ignored; None where there is none."""
    folder = site.cache / "clusters"
    files = sorted(folder.glob("*.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)
    wanted = {name: text for name, text in key.items() if name not in ignoring}
    for path in files[:MOST]:
        try:
            cluster = load_cluster(str(path))
        except RecipeError:  # torn, or of another version: `phalanx calibrate` makes it again
            continue
        if cluster.measured is not None and wanted.items() <= cluster.measured.key.items():
            return cluster
    return None


def remembered_gpus(site: Site) -> int | None:
    """How many GPUs the newest probe of this machine found; None without one, or when that trained on its CPU."""
    cluster = remembered(site, host_key(site.root))
    return None if cluster is None or cluster.node.accelerator.generation == "cpu" else cluster.node.count
