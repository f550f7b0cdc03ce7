"""Where a run's hot copies lie on a node, and which of them belong to its history. What they hold is train's business.

Each node has a private folder of its own for a run: below /dev/shm, which is memory, or below PHALANX_IN_MEMORY_DIR.
Its name comes from the run directory's path, so that the agent of a node can always say what is to be removed.

`hot.json` in the run directory lists lines of history, the newest first, each with the last of its steps that counts:
null for the line that is being trained. Whoever goes back to a step cuts all lines there. A copy carries the token of
its line, so one that a lost node brings back later, or that a deleted run left, is known for what it is. `saved` is the
newest checkpoint: where it is gone, somebody has undone what came after the one before, and no copy counts.
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
"""Names the folder below which hot copies lie."""
SHM_DIR = Path("/dev/shm")
DIR_PREFIX = "phalanx-hot"
OWNER_FILE = "run"
"""File in a node's folder that holds the run directory's path."""
STALE_AFTER_S, ABANDONED_AFTER_S = 7200.0, 86_400.0
"""Seconds without a change after which a folder belongs to no run: one whose run has no hot copies any more, and any.
By the wall clock, since that is what files have: both are longer than what it may be set by."""
MAX_EPOCHS = 8
"""Lines that are kept: only copies of the newest are ever there."""

Epochs = list[tuple[str, int | None]]
"""Tokens, the newest first, each with the last step that counts, None for all."""


def find_base_dir(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder below which hot copies lie on this node; None where there is no memory that looks like a folder."""
    named = environment.get(DIR_VARIABLE)
    if named:
        return Path(named)
    return SHM_DIR if SHM_DIR.is_dir() else None


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Which node this is, as our agent or torchrun says, so that several on one machine keep apart."""
    return environment.get("PHALANX_NODE_RANK") or environment.get("GROUP_RANK") or "0"


def find_node_dir(run: Run, environment: Mapping[str, str] = os.environ) -> Path | None:
    """This node's folder for hot copies of a run; it need not exist."""
    base = find_base_dir(environment)
    if base is None:
        return None
    name = hashlib.sha256(os.fsencode(os.path.realpath(run.path))).hexdigest()[:16]
    return base / f"{DIR_PREFIX}-{os.getuid()}-{name}-{node_name(environment)}"


def create_node_dir(run: Run, environment: Mapping[str, str] = os.environ) -> Path:
    """Make this node's folder, for nobody else to read, and clear away what dead runs left beside it. UsageError when
    there is no place for it, or another user has taken the name; OSError when the file system refuses."""
    folder = find_node_dir(run, environment)
    if folder is None:
        raise UsageError(f"there is no {SHM_DIR} here; name a folder by {DIR_VARIABLE}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    base = folder.parent.stat()
    if not base.st_mode & stat.S_ISVTX and (base.st_uid not in (os.getuid(), 0) or is_writable_by_others(base)):
        raise UsageError(
            f"{folder.parent}: other users may put another folder in the place of one of this user's there"
        )
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not is_private(folder):
        raise UsageError(f"{folder}: is not a folder that only this user can read; remove it")
    (folder / OWNER_FILE).write_text(os.path.realpath(run.path))
    remove_stale_dirs(folder)
    return folder


def is_private(folder: Path) -> bool:
    """Whether it is a real folder of this user's that nobody else may read."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def remove_stale_dirs(own_dir: Path, now_s: float | None = None) -> None:
    """Remove folders beside `own_dir` that are nobody's: their agent was killed, and nobody started the run again."""
    now = time.time() if now_s is None else now_s
    for other in own_dir.parent.glob(f"{DIR_PREFIX}-{os.getuid()}-*"):
        if other == own_dir or not is_private(other):
            continue
        with suppress(OSError):  # its own agent may be removing it
            owner, age = Run(Path((other / OWNER_FILE).read_text())), now - other.stat().st_mtime
            if age > (STALE_AFTER_S if not history_path(owner).exists() else ABANDONED_AFTER_S):
                shutil.rmtree(other)


def remove_node_dir(run: Run, environment: Mapping[str, str] = os.environ) -> None:
    """Remove this node's hot copies of a run, if there are any."""
    folder = find_node_dir(run, environment)
    if folder is not None and is_private(folder):
        shutil.rmtree(folder, ignore_errors=True)


def history_path(run: Run) -> Path:
    """Where the lines of history stand."""
    return run.path / "hot.json"


def delete_history(run: Run) -> None:
    """No hot copy of a run counts from here on."""
    history_path(run).unlink(missing_ok=True)


def read_epochs(run: Run) -> tuple[Epochs, int]:
    """The lines of a run's history, and its newest checkpoint's step, 0 for none. No lines when no hot copy was ever
    begun, or when the file is not what it should be: then no copy can be trusted."""
    try:
        value = run.read_json(history_path(run)) or {}
    except DataError:
        return [], 0
    epochs, saved = value.get("lines"), value.get("saved")
    if not isinstance(epochs, list) or not isinstance(saved, int):
        return [], 0
    valid = [line for line in epochs if isinstance(line, list) and len(line) == 2]
    if len(valid) < len(epochs) or not all(last_step is None or isinstance(last_step, int) for _, last_step in valid):
        return [], 0
    return [(str(token), last_step) for token, last_step in valid], saved


def begin_epoch(run: Run, token: str) -> None:
    """A new line goes on from where the last was cut. OSError when there is no room to say so."""
    epochs, saved = read_epochs(run)
    _write_history(run, [(token, None), *epochs], saved)


def truncate_history(run: Run, step: int) -> None:
    """The run goes on from this step: what was copied of later steps belongs to no history any more."""
    epochs, saved = read_epochs(run)
    _write_or_delete(
        run, [(token, step if upto is None else min(upto, step)) for token, upto in epochs], min(saved, step)
    )


def record_checkpoint(run: Run, step: int) -> None:
    """There is a checkpoint of this step."""
    _write_or_delete(run, read_epochs(run)[0], step)


def is_valid_copy(epochs: Epochs, token: str, step: int) -> bool:
    """Whether a copy of this line and step belongs to the run's history."""
    return any(token == known and (last_step is None or step <= last_step) for known, last_step in epochs)


def _write_or_delete(run: Run, epochs: Epochs, saved: int) -> None:
    if not epochs:
        return
    try:
        _write_history(run, epochs, saved)
    except OSError:  # no room to say which copies count: then none does
        delete_history(run)


def _write_history(run: Run, epochs: Epochs, saved: int) -> None:
    write_json(history_path(run), {"saved": saved, "lines": [list(line) for line in epochs[:MAX_EPOCHS]]})
