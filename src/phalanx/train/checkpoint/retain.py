"""Which checkpoints are kept: the newest whole ones and those that are protected. Called after a commit."""

from collections.abc import Collection
from pathlib import Path

from phalanx.train.checkpoint.format import CorruptError, list_checkpoints, read_manifest, step_of
from phalanx.train.checkpoint.publish import DELETED, discard


def retain(directory: Path, keep: int, protect: Collection[int] = ()) -> list[Path]:
    """Remove what is older than the `keep` newest whole checkpoints, except the protected steps (the best one); return
    what was removed.

    Whole means that the manifest is good; reading all data after each save would cost too much. A checkpoint that is
    not whole does not count as one of those kept. One that is killed meanwhile leaves what `clean` removes. What could
    not be removed before is tried again; OSError when storage fails.
    """
    for path in directory.glob(f"step-*{DELETED}"):
        discard(path)
    whole = 0
    removed = []
    for path in list_checkpoints(directory):
        if whole >= keep:
            if step_of(path) not in protect:
                discard(path)
                removed.append(path)
        elif _is_whole(path):
            whole += 1
    return removed


def _is_whole(path: Path) -> bool:
    try:
        read_manifest(path)
    except CorruptError:
        return False
    return True
