"""What to train and how: the schema, loading with overrides, and checks.

A recipe is a value. This package loads one from a file, reports what is wrong with it, and knows nothing of torch, runs
or machines. Only import paths in a recipe execute the user's code, in `import_object`.
"""

from typing import TYPE_CHECKING

from phalanx.lazy_exports import make_getattr

if TYPE_CHECKING:
    from phalanx.recipe.checks import check_recipe
    from phalanx.recipe.imports import describe_exception, import_object
    from phalanx.recipe.load import load_recipe, load_resolved_recipe
    from phalanx.recipe.schema import Recipe, ResolvedRecipe
    from phalanx.recipe.work_division import scale_batch_with_workers

__all__ = [
    "Recipe",
    "ResolvedRecipe",
    "check_recipe",
    "describe_exception",
    "import_object",
    "load_recipe",
    "load_resolved_recipe",
    "scale_batch_with_workers",
]

if not TYPE_CHECKING:
    __getattr__ = make_getattr(
        __name__,
        {
            "checks": ("check_recipe",),
            "imports": ("describe_exception", "import_object"),
            "load": ("load_recipe", "load_resolved_recipe"),
            "schema": ("Recipe", "ResolvedRecipe"),
            "work_division": ("scale_batch_with_workers",),
        },
    )
