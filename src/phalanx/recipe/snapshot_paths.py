"""Recipes of a job: code is read from the job's snapshot, data from their original place.

The snapshot of the recipe's folder is unpacked at PHALANX_SNAPSHOT_DIR; PHALANX_SNAPSHOT_SOURCE, where known, names the
original folder. `jobs` sets both for the processes it starts; without them nothing here changes a path.
"""

import os
from collections.abc import Mapping
from pathlib import Path

SNAPSHOT_DIR_VARIABLE = "PHALANX_SNAPSHOT_DIR"
"""Variable that names the unpacked copy."""
SNAPSHOT_SOURCE_VARIABLE = "PHALANX_SNAPSHOT_SOURCE"
"""Variable that names the folder that it is a copy of."""


def resolve_data_dir(recipe_dir: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """What the relative paths of a recipe in `recipe_dir` are relative to: for one in the copy, the folder that it was
    copied from, since data did not travel; where that cannot be seen from here, the copy."""
    original = _rebase(recipe_dir, environ.get(SNAPSHOT_DIR_VARIABLE), environ.get(SNAPSHOT_SOURCE_VARIABLE))
    return original if original is not None and original.is_dir() else recipe_dir


def resolve_code_dir(recipe_dir: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder from which the modules of a recipe in `recipe_dir` are imported: its snapshot, if there is
    one."""
    return _rebase(recipe_dir, environ.get(SNAPSHOT_SOURCE_VARIABLE), environ.get(SNAPSHOT_DIR_VARIABLE)) or recipe_dir


def _rebase(folder: Path, old: str | None, new: str | None) -> Path | None:
    """The place below `new` of what lies below `old`; None when it does not."""
    if old is None or new is None:
        return None
    relative = Path(os.path.relpath(os.path.realpath(folder), os.path.realpath(old)))
    return None if ".." in relative.parts else Path(new) / relative
