"""What to train and how: the schema, loading with overrides, and checks.

A recipe is a value. This package loads one from a file, reports what is wrong with it, and knows nothing of torch, runs
or machines. Only import paths in a recipe execute the user's code, in `import_object`.
"""

from typing import TYPE_CHECKING

from phalanx.lazy_exports import make_getattr

if TYPE_CHECKING:
    from phalanx.recipe.batch_scaling import describe_batch_scaling, describe_kept_batch, scale_batch_with_workers
    from phalanx.recipe.checks import check_recipe, num_workers_for
    from phalanx.recipe.devices import check_device
    from phalanx.recipe.diff import RecipeDifference, diff_recipes, incompatible_changes, is_free_on_resume
    from phalanx.recipe.imports import describe_exception, huggingface_location, import_object
    from phalanx.recipe.load import LoadedRecipe, dump_recipe, expand_recipe, load_recipe, load_resolved_recipe
    from phalanx.recipe.schema import Recipe, ResolvedRecipe
    from phalanx.recipe.schema_keys import can_be_auto, json_schema

__all__ = [
    "LoadedRecipe",
    "Recipe",
    "RecipeDifference",
    "ResolvedRecipe",
    "can_be_auto",
    "check_device",
    "check_recipe",
    "describe_batch_scaling",
    "describe_exception",
    "describe_kept_batch",
    "diff_recipes",
    "dump_recipe",
    "expand_recipe",
    "huggingface_location",
    "import_object",
    "incompatible_changes",
    "is_free_on_resume",
    "json_schema",
    "load_recipe",
    "load_resolved_recipe",
    "num_workers_for",
    "scale_batch_with_workers",
]

if not TYPE_CHECKING:
    __getattr__ = make_getattr(
        __name__,
        {
            "batch_scaling": ("describe_batch_scaling", "describe_kept_batch", "scale_batch_with_workers"),
            "checks": ("check_recipe", "num_workers_for"),
            "devices": ("check_device",),
            "diff": ("RecipeDifference", "diff_recipes", "incompatible_changes", "is_free_on_resume"),
            "imports": ("describe_exception", "huggingface_location", "import_object"),
            "schema_keys": ("can_be_auto", "json_schema"),
            "load": ("LoadedRecipe", "dump_recipe", "expand_recipe", "load_recipe", "load_resolved_recipe"),
            "schema": ("Recipe", "ResolvedRecipe"),
        },
    )
