"""The schema as values: JSON Schema for editors, which keys there are, what each expects in words.

Keys can be asked of any model whose files people write by hand (`model`); without one they are the recipe's.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel

from phalanx.recipe.schema import PERCENT_PATTERN, STEPS_PATTERN, Recipe
from phalanx.recipe.text import Key, dotted

Schema = dict[str, Any]
Model = type[BaseModel]
_NOUNS = {"integer": "whole number", "number": "number"}


@cache
def _schema(model: Model) -> Schema:
    """The model's JSON Schema, with every reference replaced by what it refers to."""
    schema = model.model_json_schema(mode="validation")
    whole: Schema = _resolved(schema, schema.get("$defs", {}))
    return whole


def _resolved(schema: Any, parts: dict[str, Schema]) -> Any:
    if isinstance(schema, list):
        return [_resolved(one, parts) for one in schema]
    if not isinstance(schema, dict):
        return schema
    whole = {name: _resolved(below, parts) for name, below in schema.items() if name not in ("$defs", "$ref")}
    if "$ref" in schema:
        whole["anyOf"] = [_resolved(parts[schema["$ref"].rsplit("/", 1)[1]], parts)]
    return whole


def json_schema() -> Schema:
    """JSON Schema (2020-12) of a recipe file; editors complete and check from it."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Recipe.model_json_schema(mode="validation"),
        "title": "Phalanx recipe",
        "examples": [
            {
                "name": "gpt-python",
                "steps": 300,
                "optimizer": {"lr": 1e-3, "schedule": {"warmup_steps": 20, "decay": "cosine"}},
            }
        ],
    }


def alternatives(schema: Schema) -> Iterator[Schema]:
    """The forms that a value may take."""
    if "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from alternatives(one)
    else:
        yield schema


def schema_at(key: Key, model: Model = Recipe) -> Schema | None:
    """The schema of one key; None when there is no such key, or it may hold anything."""
    schema: Schema = _schema(model)
    for part in key:
        for form in alternatives(schema):
            if isinstance(part, str):
                others = form.get("additionalProperties")
                below = form.get("properties", {}).get(part, others if isinstance(others, dict) else None)
            else:
                below = dict(enumerate(form.get("prefixItems", []))).get(part, form.get("items"))
            if below is not None:
                schema = below
                break
        else:
            return None
    return schema


def keys_at(key: Key, model: Model = Recipe) -> list[str]:
    """Names of the keys that may stand below `key`."""
    forms = alternatives(schema_at(key, model) or {})
    return [name for form in forms for name in form.get("properties", form.get("propertyNames", {}).get("enum", ()))]


def flat_keys(key: Key = (), model: Model = Recipe) -> Iterator[Key]:
    """Every key of a file, parts before what is in them."""
    for name in keys_at(key, model):
        below = (*key, name)
        yield below
        yield from flat_keys(below, model)


@cache
def _automatic() -> frozenset[str]:
    return frozenset(
        dotted(key)
        for key in flat_keys()
        for form in alternatives(schema_at(key) or {})
        if "auto" in (form.get("const"), *form.get("enum", ()))
    )


def can_be_auto(name: str) -> bool:
    """Whether `auto` is a word of the recipe at this key, and not just somebody's text."""
    return name in _automatic()


def expected(schema: Schema) -> str:
    """What a value must be, in words: `a whole number above 0 or auto`."""
    words = list(dict.fromkeys(form_in_words(form) for form in alternatives(schema)))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def form_in_words(schema: Schema) -> str:
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return either([str(value) for value in schema["enum"]])
    match schema.get("type"):
        case "integer":
            return "a whole number" + _range(schema)
        case "number":
            return "a number" + _range(schema)
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "string":
            if schema.get("pattern") == STEPS_PATTERN:
                return "`N steps`"
            if schema.get("pattern") == PERCENT_PATTERN:
                return "`N%`"
            return "text" + (f" matching {schema['pattern']}" if "pattern" in schema else "")
        case "array" if "prefixItems" in schema:
            items = schema["prefixItems"]
            return f"a list of {len(items)}, each {expected(items[0])}"
        case "array":
            inner = [
                one.get("title", _NOUNS.get(one.get("type", ""), "text")).lower() + "s" + _range(one)
                for one in alternatives(schema.get("items", {}))
            ]
            return f"a list of {either(inner)}"
        case "object" if "properties" in schema:
            return f"a mapping ({', '.join(schema['properties'])})"
        case "object":
            return "a mapping"
        case _:
            return "any value"


def _range(schema: Schema) -> str:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if schema.get("type") == "integer" and above is not None and high is not None:
        low, above = above + 1, None
    if low is not None and high is not None:
        return f" from {_figure(low)} to {_figure(high)}"
    start = f"above {_figure(above)}" if above is not None else f"of at least {_figure(low)}" if low is not None else ""
    end = f"below {_figure(below)}" if below is not None else f"of at most {_figure(high)}" if high is not None else ""
    both = " and ".join(text for text in (start, end) if text)
    return f" {both}" if both else ""


def _figure(value: float) -> str:
    """A bound as people read it: 1,000,000, 0.5, 1e+18."""
    return f"{int(value):,}" if value == int(value) and (value < 1e15 or isinstance(value, int)) else f"{value:g}"


def either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
