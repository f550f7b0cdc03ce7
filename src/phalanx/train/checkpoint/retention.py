"""Which checkpoints are kept: the newest whole ones and those that are protected. Called after a commit."""

from collections.abc import Collection
from pathlib import Path

from phalanx.train.checkpoint.commit import DELETED_SUFFIX, discard_directory
from phalanx.train.checkpoint.format import CorruptCheckpointError, list_checkpoints, parse_step, read_manifest


def apply_retention(directory: Path, keep: int, protect: Collection[int] = ()) -> list[Path]:
    """Remove what is older than the `keep` newest whole checkpoints, except the protected steps (the best one); return
    what was removed.

    Whole means that the manifest is good; reading all data after each save would cost too much. A checkpoint that is
    not whole does not count as one of those kept. One that is killed meanwhile leaves what `clean` removes. What could
    not be removed before is tried again; OSError when storage fails.
    """
    for path in directory.glob(f"step-*{DELETED_SUFFIX}"):
        discard_directory(path)
    whole = 0
    removed = []
    for path in list_checkpoints(directory):
        if whole >= keep:
            if parse_step(path) not in protect:
                discard_directory(path)
                removed.append(path)
        elif _has_good_manifest(path):
            whole += 1
    return removed


def _has_good_manifest(path: Path) -> bool:
    try:
        read_manifest(path)
    except CorruptCheckpointError:
        return False
    return True
