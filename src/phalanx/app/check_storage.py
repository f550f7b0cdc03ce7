"""Check on each node, before the first step, that the places of a run take files and have space for checkpoints."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.cluster.health.checks.host import nearest_existing
from phalanx.errors import UnfitNodeError, UsageError
from phalanx.formatting import format_bytes
from phalanx.planner.storage_costs import checkpoint_bytes_of
from phalanx.recipe import Recipe, load_resolved_recipe
from phalanx.recipe.locations import name_recipe_key
from phalanx.run import Run
from phalanx.storage.store import check_writable
from phalanx.storage.url import is_url, parse_url


def check_upload(recipe: Recipe) -> None:
    """Raise RecipeError where `checkpoint.upload.to` takes no objects from this node."""
    if (upload := recipe.checkpoint.upload) is not None:
        with name_recipe_key("checkpoint.upload.to"):
            check_writable(parse_url(upload.to))


def check_free_space(run: Run, recipe: Recipe, plan: Mapping[str, Any]) -> None:
    """Raise UsageError where a disk has less free space than two checkpoints take: a new one is written before an old
    one is removed. A run that has checkpoints needs space for one more. The free space of stores is not known."""
    num_new, upload = 1 if run.has_checkpoint() else 2, recipe.checkpoint.upload
    nbytes = checkpoint_bytes_of(recipe, plan.get("trainable_parameters") or 0, plan.get("frozen_parameters") or 0)
    for location in (run.location, *([] if upload is None else [upload.to])):
        path = location.removeprefix("file://")
        if not is_url(path) and (free_bytes := shutil.disk_usage(nearest_existing(Path(path))).free) < num_new * nbytes:
            raise UsageError(
                f"{location}: too little free space for checkpoints of {format_bytes(nbytes)}: {num_new} need "
                f"{format_bytes(num_new * nbytes)}, and {format_bytes(free_bytes)} are free; choose another place"
            )


def check_node(run: Run) -> None:
    """Raise UnfitNodeError where the run that the leading node has prepared cannot be kept from this node."""
    if run.resolved.is_file():  # a shared disk may show it later
        try:
            check_free_space(run, load_resolved_recipe(run.resolved), run.read_json_or_empty(run.plan))
        except UsageError as error:
            raise UnfitNodeError(str(error)) from None
