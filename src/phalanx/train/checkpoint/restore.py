"""Restore the newest complete checkpoint of a run into the live state: the one entry to every source.

Sources are the memory of this node, that of other nodes (`in_memory/restore.py`), and the disk (`restore_disk.py`).
Workers agree on the source, and nothing live changes before all of them have read and verified their part.
"""

from phalanx.run import Run
from phalanx.train.checkpoint.in_memory.restore import find_verified_copies, restore_in_memory
from phalanx.train.checkpoint.restore_disk import OnRejectFn, RestoredCheckpoint, restore_from_disk
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.train_state import AppState


def restore_newest(
    run: Run,
    dist_env: DistEnv,
    state: AppState,
    on_reject: OnRejectFn,
    durable_only: bool = False,
    in_place: bool = False,
) -> RestoredCheckpoint | None:
    """Load the newest checkpoint that is good for every worker into the model, optimizer and grad scaler; None if there
    is none. Every worker calls it. In-memory checkpoints count only if they are newer than all checkpoints on disk.

    Args:
        on_reject: called on every worker for each bad file, with the checkpoint's path, the file's name and the reason.
        durable_only: leave out in-memory checkpoints.
        in_place: as in `restore_from_disk`, which this falls back to.

    Raises OSError on every worker if storage failed and no other checkpoint is readable for all."""
    if not durable_only:
        verified = find_verified_copies(run, dist_env, on_reject)
        restored = None if verified is None else restore_in_memory(run, verified, dist_env, state, on_reject)
        if restored is not None:
            return restored
    return restore_from_disk(run, dist_env, state, on_reject, in_place)
