"""What to train and how: the schema, loading with overrides, and checks.

A recipe is a value; this room turns a file into one, says in words what is wrong with it, and knows nothing of torch,
runs or machines. Import paths in it are the only thing that executes somebody's code, in `import_object`.
"""

from phalanx.recipe.changes import Difference, differences, is_free, refused
from phalanx.recipe.checks import check, check_device, workers_for
from phalanx.recipe.dump import dump_recipe
from phalanx.recipe.growing import grown, growth_told, stays_told
from phalanx.recipe.imports import huggingface_directory, import_object, told
from phalanx.recipe.load import Loaded, load_recipe
from phalanx.recipe.reference import markdown
from phalanx.recipe.schema import Recipe
from phalanx.recipe.shape import can_be_auto, json_schema
from phalanx.recipe.variables import expanded

__all__ = [
    "Difference",
    "Loaded",
    "Recipe",
    "can_be_auto",
    "check",
    "check_device",
    "differences",
    "dump_recipe",
    "expanded",
    "grown",
    "growth_told",
    "huggingface_directory",
    "import_object",
    "is_free",
    "json_schema",
    "load_recipe",
    "markdown",
    "refused",
    "stays_told",
    "told",
    "workers_for",
]
