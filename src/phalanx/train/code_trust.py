"""Decide whether the model code that a run directory names may be imported: only where this user has trained with the
same code, or confirms it now.

Every run that this user starts leaves a mark in the user's state folder: a hash of what builds its model and its task,
with their arguments and the folder that their modules come from. A run directory that came from elsewhere has none, and
nothing in it can make one.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.recipe import Recipe
from phalanx.recipe.schema import GrpoConfig
from phalanx.run.private_files import check_owner, state_root

SHIPPED_MODELS_PREFIX = "phalanx.models:"
HUGGING_FACE_PREFIX = "hf:"


def list_user_code(recipe: Recipe) -> list[str]:
    """The import paths by which a trained model needs code that did not come with Phalanx."""
    build, task = recipe.model.build, recipe.task_kind
    shipped = build.startswith(SHIPPED_MODELS_PREFIX) and "." not in build.removeprefix(SHIPPED_MODELS_PREFIX)
    own = [] if shipped or build.startswith(HUGGING_FACE_PREFIX) else [build]
    reward = [recipe.task.reward] if isinstance(recipe.task, GrpoConfig) else []
    return own + ([task] if ":" in task else []) + reward


def record_trust(recipe: Recipe, folder: Path) -> None:
    """Record that this user trains with this code. Where the state folder cannot be written, readers of the run ask the
    user."""
    if list_user_code(recipe):
        with suppress(OSError, UsageError):
            marker = _trust_marker_path(recipe, folder)
            marker.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            marker.touch()


def check_trusted(path: Path, recipe: Recipe, folder: Path) -> None:
    """UsageError where the run at `path` needs code that this user has not trained with: it names the code."""
    code = list_user_code(recipe)
    if not code:
        return
    marker = _trust_marker_path(recipe, folder)
    if marker.exists():
        return
    raise UsageError(
        f"{path}: its model would run code that you have not trained with here: {' and '.join(code)}, from {folder} or "
        "the installed packages; look at it, and add --trust-code if you trust it"
    )


def _trust_marker_path(recipe: Recipe, folder: Path) -> Path:
    root = state_root()
    check_owner(root, "the state folder")
    code = {**recipe.model_dump(mode="json", include={"model", "task"}), "folder": os.path.realpath(folder)}
    text = json.dumps(code, sort_keys=True)
    return root / "trained-with" / hashlib.sha256(text.encode()).hexdigest()
