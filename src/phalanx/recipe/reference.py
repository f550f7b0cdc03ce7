"""The reference page of the recipe, docs/reference/recipe.md, made from the schema so that the two cannot disagree."""

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from phalanx.recipe.schema import Part
from phalanx.recipe.shape import Schema, alternatives, either, flat_keys, form_in_words, keys_at, schema_at
from phalanx.recipe.text import Key, dotted, to_yaml

_INTRODUCTION = """\
# The recipe

What to train and how, in one YAML file. Unknown keys are refused. Every key has a default, but a recipe in a file names
its `model` and its `data.source` itself. `phalanx recipe check RECIPE` checks one without running it, `phalanx recipe
schema` prints the JSON Schema for editors, and any key can be overridden on the command line: `phalanx train RECIPE
steps=50 optimizer.lr=3e-4`.

- YAML 1.2: `1e-3` is a number, `no` and `off` are words, a key that stands twice is an error.
- Paths are relative to the recipe's file. Its folder joins the import path of `module:name` values.
- In any text, `${python.stdlib}` is the folder of Python's standard library, `${python.packages}` that of installed
  packages, `${recipe.dir}` that of the recipe, and `${env.NAME}` an environment variable.
- `auto` is resolved before training; the run keeps what was chosen.

This page is made from the schema by `make docs`; `phalanx recipe schema --markdown` prints it.
"""

_PARTS = {part.model_config.get("title", part.__name__): part for part in Part.__subclasses__()}


def markdown() -> str:
    """The page: a section for each part, a row for each key with what it may be, its default and its meaning."""
    sections = [_INTRODUCTION]
    shown: dict[str, str] = {}
    repeated: list[Key] = []
    for key in [(), *(key for key in flat_keys() if keys_at(key))]:
        if any(key[: len(above)] == above for above in repeated):
            continue
        forms = [form for form in alternatives(schema_at(key) or {}) if "properties" in form]
        title = dotted(key) if key else "Top level"
        if (part := forms[0]["title"]) in shown:
            sections.append(f"## {title}\n\nThe same keys as below `{shown[part]}`.\n")
            repeated.append(key)
            continue
        shown[part] = title
        sections.append(f"## {title}\n\n" + "\n".join(_text(form) for form in forms) + "\n")
        rows = [_row((*key, name), form) for form in forms for name in form["properties"]]
        sections.append("\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows]) + "\n")
    return "\n".join(sections)


def _row(key: Key, holder: Schema) -> str:
    schema = schema_at(key) or {}
    forms = list(alternatives(schema))
    values = ["a mapping, see below" if "properties" in form else form_in_words(form) for form in forms]
    meaning = _text(schema) or next((text for form in forms if (text := _text(form))), "")
    cells = [f"`{dotted(key)}`", either(list(dict.fromkeys(values))), _default(holder, key), meaning]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _default(holder: Schema, key: Key) -> str:
    """The default as YAML; of a part its own rows tell."""
    field = _field(_PARTS[holder["title"]], str(key[-1]))
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "see below"
    plain = list(value) if isinstance(value, tuple) else value
    return f"`{to_yaml(plain).removesuffix('...' + chr(10)).strip()}`"


def _field(part: type[Part], name: str) -> FieldInfo:
    """A part's field."""
    return part.model_fields[name]


def _text(schema: Schema) -> str:
    return " ".join(str(schema.get("description", "")).split())
