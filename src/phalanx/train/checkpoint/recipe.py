"""The recipe that a checkpoint was trained with. It is in the manifest, under its checksum, whatever became of the
run's other files."""

from pathlib import Path

from pydantic import ValidationError

from phalanx.errors import DataError
from phalanx.recipe import ResolvedRecipe
from phalanx.run import Run
from phalanx.train.checkpoint.format import CheckpointManifest, list_checkpoints, read_manifest


def recipe_in(checkpoint: Path, manifest: CheckpointManifest) -> ResolvedRecipe:
    """The resolved recipe of a checkpoint with this manifest. DataError where it holds none that this Phalanx knows."""
    try:
        return ResolvedRecipe.model_validate(manifest.meta["recipe"])
    except (KeyError, ValidationError):
        raise DataError(f"{checkpoint}: holds no recipe of this Phalanx") from None


def newest_recipe(run: Run) -> ResolvedRecipe | None:
    """The resolved recipe in the newest checkpoint that says one; None where a run has no checkpoint. DataError where
    none of those that it has is readable."""
    if not run.checkpoints.is_dir():
        return None
    wrong: list[str] = []
    for path in list_checkpoints(run.checkpoints):
        try:
            return recipe_in(path, read_manifest(path))
        except DataError as error:
            wrong.append(str(error))
    if wrong:
        raise DataError(f"{run.resolved}: is missing, and no checkpoint tells what it said: {wrong[0]}")
    return None
