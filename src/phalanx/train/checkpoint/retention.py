"""Retention of checkpoints: keep the newest complete ones and those that are protected."""

from collections.abc import Collection
from pathlib import Path

from phalanx.train.checkpoint.commit import DELETED_SUFFIX, discard_directory
from phalanx.train.checkpoint.format import CorruptCheckpointError, list_checkpoints, parse_step, read_manifest


def apply_retention(directory: Path, keep: int, protect: Collection[int] = ()) -> list[Path]:
    """Remove all checkpoints except the `keep` newest complete ones and the protected steps (the best one); return what
    was removed. Call it after a commit.

    Complete means that the manifest is good; reading all data after each save would be too expensive. An incomplete
    checkpoint does not count as kept. If the process is killed meanwhile, `clean_checkpoint_dir` removes the rest.
    Failed removals are tried again at the next call. Raises OSError if storage fails.
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
