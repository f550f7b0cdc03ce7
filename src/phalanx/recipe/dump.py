"""A recipe as YAML that `load_recipe` reads back to the same recipe."""

from typing import Any

from pydantic import BaseModel

from phalanx.recipe.schema import Recipe
from phalanx.recipe.yaml_loader import to_yaml


def dump_recipe(recipe: Recipe) -> str:
    """All keys in the order of the schema; only nulls that are the default are left out."""
    return to_yaml(_to_dict(recipe))


def _to_dict(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {
            name: _to_dict(below)
            for name, field in type(value).model_fields.items()
            if (below := getattr(value, name)) is not None or field.default is not None
        }
    if isinstance(value, dict):
        return {name: _to_dict(below) for name, below in value.items()}
    if isinstance(value, list | tuple):
        return [_to_dict(below) for below in value]
    return value
