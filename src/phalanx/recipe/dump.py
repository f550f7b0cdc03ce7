"""Pydantic models as plain values, and a recipe as YAML that `load_recipe` reads back to the same recipe."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from phalanx.recipe.schema import Recipe
from phalanx.recipe.yaml_loader import to_yaml


def dump_recipe(recipe: Recipe) -> str:
    """All keys in the order of the schema; only nulls that are the default are left out."""
    return to_yaml(to_plain_values(recipe, lambda name, field: field.default is not None))


def to_plain_values(value: Any, keeps_null: Callable[[str, FieldInfo], bool]) -> Any:
    """Return models in nested containers as dicts. Of fields that are null, only those are kept that `keeps_null`
    says."""
    if isinstance(value, BaseModel):
        value = {
            name: below
            for name, field in type(value).model_fields.items()
            if (below := getattr(value, name)) is not None or keeps_null(name, field)
        }
    if isinstance(value, dict):
        return {name: to_plain_values(below, keeps_null) for name, below in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_values(below, keeps_null) for below in value]
    return value
