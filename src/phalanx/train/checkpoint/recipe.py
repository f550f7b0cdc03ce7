"""Read the recipe that a checkpoint was trained with. The checksummed manifest holds it, independently of the other
files of the run."""

from pathlib import Path

from pydantic import ValidationError

from phalanx.errors import DataError
from phalanx.recipe import ResolvedRecipe
from phalanx.run import Run
from phalanx.train.checkpoint.format import CheckpointManifest, list_checkpoints, read_manifest


def recipe_in(checkpoint: Path, manifest: CheckpointManifest) -> ResolvedRecipe:
    """Return the resolved recipe of a checkpoint. Raises DataError if its manifest holds none that Phalanx can read."""
    try:
        return ResolvedRecipe.model_validate(manifest.meta["recipe"])
    except (KeyError, ValidationError):
        raise DataError(f"{checkpoint}: holds no recipe of this Phalanx") from None


def newest_recipe(run: Run) -> ResolvedRecipe | None:
    """Return the resolved recipe of the newest checkpoint that has a readable one; None if the run has no checkpoint.
    Raises DataError if it has checkpoints but none has a readable recipe."""
    if not run.checkpoints.is_dir():
        return None
    wrong: list[str] = []
    for path in list_checkpoints(run.checkpoints):
        try:
            return recipe_in(path, read_manifest(path))
        except DataError as error:
            wrong.append(str(error))
    if wrong:
        raise DataError(f"{run.resolved}: is missing, and no checkpoint holds a readable recipe: {wrong[0]}")
    return None
