"""What `phalanx train` is given: here, as a job on a backend, or as one node or worker of a larger run."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.recipe import Recipe, expand_recipe, load_recipe
from phalanx.recipe.load import LoadedRecipe
from phalanx.run import Run


@dataclass(frozen=True)
class TrainArguments:
    """A recipe with overrides, or a script with its arguments, and how to run it."""

    path: Path
    """The recipe or the script."""
    overrides: Sequence[str] = ()
    """Overrides of a recipe, or the arguments of a script."""
    run: Path | None = None
    """The run directory; None: runs/NAME."""
    nproc_per_node: int | None = None
    force: bool = False
    """Resume although the recipe or the data changed."""

    @property
    def is_script(self) -> bool:
        """Whether `path` is a script that calls `phalanx.session`."""
        return self.path.suffix == ".py"

    def load_recipe(self) -> LoadedRecipe:
        """Load the recipe with its overrides. Raises RecipeError."""
        return load_recipe(self.path, self.overrides)

    def find_run(self, name: str) -> Run:
        """Return the run, given the name of the recipe or of the script."""
        return Run(self.run if self.run is not None else Path("runs") / name)

    def format_options(self, run_dir: Path) -> list[str]:
        """Return the words after the path in a command that trains in `run_dir`, without `--force`."""
        nproc_option = [] if self.nproc_per_node is None else ["--nproc-per-node", str(self.nproc_per_node)]
        return [*self.overrides, "--run", str(run_dir), *nproc_option]


def load_given_recipe(recipe: "str | os.PathLike[str] | Recipe | None", overrides: Sequence[str]) -> LoadedRecipe:
    """Load what a caller of the Python API passed: a recipe as a value, or a file with overrides."""
    if not isinstance(recipe, Recipe):
        return load_recipe(None if recipe is None else Path(recipe), overrides)
    if overrides:
        raise UsageError("overrides are for recipes in files; a Recipe is changed with model_copy")
    given_keys = recipe.model_dump(exclude_defaults=True)
    return LoadedRecipe(expand_recipe(recipe, Path.cwd()), None, Path.cwd(), given_keys)
