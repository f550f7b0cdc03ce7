"""What `phalanx train` is given: here, as a job on a backend, or as one node or worker of a larger run."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.recipe import Recipe, load_recipe
from phalanx.recipe.load import LoadedRecipe, expand_recipe
from phalanx.run import Run
from phalanx.storage.run_objects import make_local_directory
from phalanx.storage.url import is_url


@dataclass(frozen=True)
class TrainArguments:
    """A recipe with overrides, or a script with its arguments, and how to run it."""

    path: str | Path
    """The recipe, its URL, or the script."""
    overrides: Sequence[str] = ()
    """Overrides of a recipe, or the arguments of a script."""
    run: str | Path | None = None
    """The run directory or URL; None: runs/NAME."""
    nproc_per_node: int | None = None
    force: bool = False
    """Resume although the recipe or the data changed."""
    is_kept_recipe: bool = False
    """Whether the recipe is the run's own."""

    @property
    def is_script(self) -> bool:
        """Whether `path` is a script that calls `phalanx.session`."""
        return str(self.path).endswith(".py")

    def load_recipe(self) -> LoadedRecipe:
        """Load the recipe with its overrides. Raises RecipeError."""
        return load_recipe(self.path, self.overrides)

    def find_run(self, name: str) -> Run:
        """Return the run, given the name of the recipe or of the script; of a URL its local directory."""
        return find_train_run(self.run, name)

    def format_options(self, run: Run) -> list[str]:
        """Return the words after the path in a command that trains `run`, without `--force`."""
        nproc_option = [] if self.nproc_per_node is None else ["--nproc-per-node", str(self.nproc_per_node)]
        return [*self.overrides, "--run", run.location, *nproc_option]


def find_train_run(given: "str | os.PathLike[str] | None", name: str) -> Run:
    """Return the run to train: in a directory, or the local directory of a run at a URL."""
    if isinstance(given, str) and is_url(given):
        return make_local_directory(given, "runs")
    return Run(Path("runs") / name if given is None else Path(given))


def find_kept_recipe(run: str | None) -> Path:
    """Return the recipe with which a run was started. UsageError where there is no run."""
    if run is None:
        raise UsageError(
            "give a recipe: phalanx train RECIPE; or a run, which resumes with its own: phalanx train --run DIR|URL"
        )
    return Run.open_existing(run).recipe


def load_given_recipe(recipe: "str | os.PathLike[str] | Recipe | None", overrides: Sequence[str]) -> LoadedRecipe:
    """Load what a caller of the Python API passed: a recipe as a value, or a file with overrides."""
    if not isinstance(recipe, Recipe):
        return load_recipe(None if recipe is None else os.fspath(recipe), overrides)
    if overrides:
        raise UsageError("overrides are for recipes in files; a Recipe is changed with model_copy")
    given_keys = recipe.model_dump(exclude_defaults=True)
    return LoadedRecipe(expand_recipe(recipe, Path.cwd()), None, Path.cwd(), given_keys)
