"""Where a run's in-memory checkpoints are on a node, and which of them belong to its history. `train` defines their
content.

Each node has a private folder for a run: below /dev/shm, which is memory, or below PHALANX_IN_MEMORY_DIR. Its name is
derived from the run directory's path, so that the agent of a node always knows which folder to remove.

`in_memory.json` in the run directory lists the epochs of the run's history, newest first, each with its last valid
step: null for the epoch that is being trained. A run that goes back to a step truncates all epochs there. A copy
carries the token of its epoch, which identifies stale copies that a lost node brings back or a deleted run left behind.
`last_saved_step` is the step of the newest checkpoint: where it is missing, the user has undone what came after the one
before, and no copy is valid.
"""

import hashlib
import os
import shutil
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from phalanx.errors import DataError, UsageError
from phalanx.run.directory import Run, write_json
from phalanx.run.private_files import is_writable_by_others

DIR_VARIABLE = "PHALANX_IN_MEMORY_DIR"
"""Names the folder below which in-memory checkpoints are stored."""
SHM_DIR = Path("/dev/shm")
DIR_PREFIX = "phalanx-in-memory"
OWNER_FILE = "run"
"""File in a node's folder that holds the run directory's path."""
STALE_AFTER_S, ABANDONED_AFTER_S = 7200.0, 86_400.0
"""Seconds without a change after which a folder is removed: one of a run that has no valid in-memory checkpoint, and
any other. By the wall clock, since file times use it: both are longer than usual clock adjustments."""
MAX_EPOCHS = 8
"""Epochs that are kept: copies exist only of the newest ones."""

Epochs = list[tuple[str, int | None]]
"""Tokens, the newest first, each with the last step that counts, None for all."""


def find_base_dir(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of all in-memory checkpoints on this node; None where no memory is mounted as a folder."""
    named = environment.get(DIR_VARIABLE)
    if named:
        return Path(named)
    return SHM_DIR if SHM_DIR.is_dir() else None


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Name this node by the node rank of the agent or of torchrun: several nodes may be on one machine."""
    return environment.get("PHALANX_NODE_RANK") or environment.get("GROUP_RANK") or "0"


def find_node_dir(run: Run, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return this node's folder for the in-memory checkpoints of a run; it need not exist."""
    base = find_base_dir(environment)
    if base is None:
        return None
    name = hashlib.sha256(os.fsencode(os.path.realpath(run.path))).hexdigest()[:16]
    return base / f"{DIR_PREFIX}-{os.getuid()}-{name}-{node_name(environment)}"


def create_node_dir(run: Run, environment: Mapping[str, str] = os.environ) -> Path:
    """Create this node's folder, readable only by this user, and remove sibling folders of dead runs. Raises UsageError
    when there is no place for it or another user has taken the name; OSError when the file system refuses."""
    folder = find_node_dir(run, environment)
    if folder is None:
        raise UsageError(f"there is no {SHM_DIR} here; name a folder by {DIR_VARIABLE}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    base = folder.parent.stat()
    if not base.st_mode & stat.S_ISVTX and (base.st_uid not in (os.getuid(), 0) or is_writable_by_others(base)):
        raise UsageError(f"{folder.parent}: other users may replace this user's folders there")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not is_private(folder):
        raise UsageError(f"{folder}: is not a folder that only this user can read; remove it")
    (folder / OWNER_FILE).write_text(os.path.realpath(run.path))
    remove_stale_dirs(folder)
    return folder


def is_private(folder: Path) -> bool:
    """Whether it is a real folder of this user that no other user can read."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def remove_stale_dirs(own_dir: Path, now_s: float | None = None) -> None:
    """Remove abandoned sibling folders of `own_dir`: their agent was killed, and the run was not started again."""
    now = time.time() if now_s is None else now_s
    for other in own_dir.parent.glob(f"{DIR_PREFIX}-{os.getuid()}-*"):
        if other == own_dir or not is_private(other):
            continue
        with suppress(OSError):  # its own agent may be removing it
            owner, age = Run(Path((other / OWNER_FILE).read_text())), now - other.stat().st_mtime
            if age > (STALE_AFTER_S if not history_path(owner).exists() else ABANDONED_AFTER_S):
                shutil.rmtree(other)


def remove_node_dir(run: Run, environment: Mapping[str, str] = os.environ) -> None:
    """Remove this node's in-memory checkpoints of a run, if there are any."""
    folder = find_node_dir(run, environment)
    if folder is not None and is_private(folder):
        shutil.rmtree(folder, ignore_errors=True)


def history_path(run: Run) -> Path:
    """Return the file that lists the epochs of a run's history."""
    return run.path / "in_memory.json"


def delete_history(run: Run) -> None:
    """Invalidate all in-memory checkpoints of a run."""
    path = history_path(run)
    path.unlink(missing_ok=True)
    for draft in run.path.glob(f".{path.name}.*.tmp"):  # of a worker that was killed while it wrote the file
        draft.unlink(missing_ok=True)


def read_epochs(run: Run) -> tuple[Epochs, int]:
    """Return the epochs of a run's history, and the step of its newest checkpoint (0 for none). No epochs when there
    was never an in-memory checkpoint, or when the file is not valid: then no copy can be trusted."""
    try:
        value = run.read_json(history_path(run)) or {}
    except DataError:
        return [], 0
    epochs, saved = value.get("epochs"), value.get("last_saved_step")
    if not isinstance(epochs, list) or not isinstance(saved, int):
        return [], 0
    valid = [epoch for epoch in epochs if isinstance(epoch, list) and len(epoch) == 2]
    if len(valid) < len(epochs) or not all(last_step is None or isinstance(last_step, int) for _, last_step in valid):
        return [], 0
    return [(str(token), last_step) for token, last_step in valid], saved


def begin_epoch(run: Run, token: str) -> None:
    """Begin an epoch where the last one was truncated. Raises OSError when the file cannot be written."""
    epochs, saved = read_epochs(run)
    _write_history(run, [(token, None), *epochs], saved)


def truncate_history(run: Run, step: int) -> None:
    """Invalidate copies of steps after `step`, at which the run resumes."""
    epochs, saved = read_epochs(run)
    _write_or_delete(
        run, [(token, step if upto is None else min(upto, step)) for token, upto in epochs], min(saved, step)
    )


def record_checkpoint(run: Run, step: int) -> None:
    """There is a checkpoint of this step."""
    _write_or_delete(run, read_epochs(run)[0], step)


def is_valid_copy(epochs: Epochs, token: str, step: int) -> bool:
    """Whether a copy of this epoch and step belongs to the run's history."""
    return any(token == known and (last_step is None or step <= last_step) for known, last_step in epochs)


def _write_or_delete(run: Run, epochs: Epochs, saved: int) -> None:
    if not epochs:
        return
    try:
        _write_history(run, epochs, saved)
    except OSError:  # the disk is full: without a record of the valid copies none is valid
        delete_history(run)


def _write_history(run: Run, epochs: Epochs, saved: int) -> None:
    write_json(history_path(run), {"last_saved_step": saved, "epochs": [list(epoch) for epoch in epochs[:MAX_EPOCHS]]})
