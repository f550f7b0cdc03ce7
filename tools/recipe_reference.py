"""The page docs/reference/recipe.md, made from the schema of the recipe so that the two cannot disagree."""

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from phalanx.recipe.field_types import ConfigModel
from phalanx.recipe.schema import Recipe
from phalanx.recipe.schema_keys import (
    JsonSchema,
    child_keys,
    describe_variant,
    find_schema,
    iterate_keys,
    iterate_variants,
    join_alternatives,
)
from phalanx.recipe.yaml_loader import KeyPath, format_key, to_yaml

_INTRODUCTION_TEXT = """\
# The recipe

What to train and how, in one YAML file. Unknown keys are refused. Every key has a default, but a recipe in a file names
its `model` and its `data.source` itself. `phalanx recipe check RECIPE` checks one without running it, `phalanx recipe
schema` prints the JSON Schema for editors, and any key can be overridden on the command line: `phalanx train RECIPE
steps=50 optimizer.lr=3e-4`.

- YAML 1.2: `1e-3` is a number, `no` and `off` are words, a key that appears twice is an error.
- Paths are relative to the recipe's file. Its folder joins the import path of `module:name` values. The recipe may be
  at a URL: paths are then relative to the URL's directory, and code next to it is not fetched.
- In any text, `${python.stdlib}` is the folder of Python's standard library, `${python.packages}` that of installed
  packages, `${recipe.dir}` that of the recipe, and `${env.NAME}` an environment variable.
- `auto` is resolved before training; the run keeps what was chosen.

This page is made from the schema by `make docs`.
"""

_CONFIG_CLASSES = {part.model_config.get("title", part.__name__): part for part in ConfigModel.__subclasses__()}


def render_recipe_reference() -> str:
    """The page: a section for each part, a row for each key with what it may be, its default and its meaning."""
    sections = [_INTRODUCTION_TEXT]
    shown_titles: dict[str, str] = {}
    repeated_keys: list[KeyPath] = []
    for key in [(), *(key for key in iterate_keys(Recipe) if child_keys(key, Recipe))]:
        if any(key[: len(above)] == above for above in repeated_keys):
            continue
        variants = [variant for variant in iterate_variants(find_schema(key, Recipe) or {}) if "properties" in variant]
        title = format_key(key) if key else "Top level"
        if (config_name := variants[0]["title"]) in shown_titles:
            sections.append(f"## {title}\n\nThe same keys as below `{shown_titles[config_name]}`.\n")
            repeated_keys.append(key)
            continue
        shown_titles[config_name] = title
        sections.append(f"## {title}\n")
        for variant in variants:
            rows = [_render_row((*key, name), variant) for name in variant["properties"]]
            table = "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows])
            sections.append(f"{_description_of(variant)}\n\n{table}\n")
    return "\n".join(sections)


def _render_row(key: KeyPath, parent_schema: JsonSchema) -> str:
    schema = parent_schema["properties"][key[-1]]
    variants = list(iterate_variants(schema))
    values = ["a mapping, see below" if "properties" in variant else describe_variant(variant) for variant in variants]
    meaning = _description_of(schema) or next((text for variant in variants if (text := _description_of(variant))), "")
    cells = [
        f"`{format_key(key)}`",
        join_alternatives(list(dict.fromkeys(values))),
        _render_default(parent_schema, key),
        meaning,
    ]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _render_default(parent_schema: JsonSchema, key: KeyPath) -> str:
    """The default as YAML; of a part its own rows tell."""
    field = _find_field(_CONFIG_CLASSES[parent_schema["title"]], str(key[-1]))
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "see below"
    as_list = list(value) if isinstance(value, tuple) else value
    return f"`{to_yaml(as_list).removesuffix('...' + chr(10)).strip()}`"


def _find_field(config_class: type[ConfigModel], name: str) -> FieldInfo:
    """A part's field."""
    return config_class.model_fields[name]


def _description_of(schema: JsonSchema) -> str:
    return " ".join(str(schema.get("description", "")).split())
