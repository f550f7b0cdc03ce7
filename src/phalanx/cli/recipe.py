"""`phalanx recipe`: check a recipe without running it, and print the schema."""

import json
from typing import Annotated, Any

import typer

from phalanx.cli.options import OverridesArgument, RecipeArgument

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Check a recipe; print the JSON Schema for editors.")


@app.command()
def schema() -> None:
    """Print the JSON Schema of recipes.

    Editors use it for completion and checks.
    """
    from phalanx.recipe.schema_keys import json_schema

    print(json.dumps(json_schema(), indent=2))


@app.command()
def check(
    path: RecipeArgument,
    overrides: OverridesArgument = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="World size to check for.",
            show_default="as the recipe's parallelism requires, else 1",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole recipe as JSON.")] = False,
) -> None:
    """Check a recipe without running it.

    Checks keys, values, world size, import paths and the arguments of the model.
    """
    from phalanx.recipe.checks import check_recipe, num_workers_for
    from phalanx.recipe.imports import check_known_arguments, huggingface_location, import_object
    from phalanx.recipe.load import list_import_paths, load_recipe
    from phalanx.recipe.locations import huggingface_directory, name_recipe_key
    from phalanx.recipe.schema_keys import can_be_auto
    from phalanx.storage.url import is_url, parse_url

    loaded = load_recipe(path, overrides or [])
    check_recipe(loaded.recipe, loaded.recipe_dir, world_size or num_workers_for(loaded.recipe, 1), loaded.location_of)
    location = huggingface_location(loaded.recipe.model.build)
    if location is None:
        with loaded.locate_errors():
            builder = import_object(loaded.recipe.model.build, loaded.recipe_dir, "model.build")
            check_known_arguments(builder, loaded.recipe.model.args)
    elif is_url(location):  # only named: a check downloads nothing
        with name_recipe_key(loaded.location_of("model.build")):
            parse_url(location)
    else:
        huggingface_directory(loaded.recipe.model.build, loaded.recipe_dir, loaded.location_of("model.build"))
    for key, value in list_import_paths(loaded.recipe):
        if key != "model.build":
            import_object(value, loaded.recipe_dir, loaded.location_of(key))
    # A recipe for phalanx.session has neither model nor data, but says how to train.
    if len(loaded.missing_keys()) == 1 or not loaded.given.keys() - {"name"}:
        loaded.check_required()
    recipe_json = loaded.recipe.model_dump(mode="json")
    auto_keys = [key for key in _list_auto_keys(recipe_json) if can_be_auto(key)]
    if as_json:
        print(json.dumps({"recipe": recipe_json, "auto": auto_keys}, indent=2))
    else:
        recipe, batch = loaded.recipe, loaded.recipe.batch
        per_worker_text = " a worker" if batch.scale_with_workers else ""
        print(f"ok  {path}: {recipe.name}, {recipe.steps} steps of {batch.global_size} samples{per_worker_text}")
        if auto_keys:
            print(f"auto, resolved at the start: {', '.join(auto_keys)}")


def _list_auto_keys(value: Any, key: str = "") -> Any:
    """Yield the keys that are `auto`."""
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _list_auto_keys(below, f"{key}.{name}" if key else name)
    elif value == "auto":
        yield key
