"""The schema as values: JSON Schema for editors, which keys there are, what each expects in words.

Functions with a `model` argument work on any file that users write by hand, and do not load the recipe's schema.
"""

from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel

from phalanx.recipe.field_types import PERCENT_REGEX, STEPS_REGEX
from phalanx.recipe.yaml_loader import KeyPath, format_key

JsonSchema = dict[str, Any]
ModelClass = type[BaseModel]
_FORMAT_TEXTS = {
    "date": "a date such as 2026-01-31",
    "date-time": "a time such as 2026-11-28T10:00:00Z",
    "power": "a power with its unit, such as 45 kW",
}
_TYPE_NOUNS = {"integer": "whole number", "number": "number"}


@cache
def _inlined_schema(model: ModelClass) -> JsonSchema:
    """The model's JSON Schema, with every reference replaced by what it refers to."""
    schema = model.model_json_schema(mode="validation")
    resolved: JsonSchema = _inline_refs(schema, schema.get("$defs", {}))
    return resolved


def _inline_refs(schema: Any, definitions: dict[str, JsonSchema]) -> Any:
    if isinstance(schema, list):
        return [_inline_refs(one, definitions) for one in schema]
    if not isinstance(schema, dict):
        return schema
    resolved = {
        name: _inline_refs(below, definitions) for name, below in schema.items() if name not in ("$defs", "$ref")
    }
    if "$ref" in schema:
        resolved["anyOf"] = [_inline_refs(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)]
    return resolved


def json_schema() -> JsonSchema:
    """JSON Schema (2020-12) of a recipe file; editors complete and check from it."""
    from phalanx.recipe.schema import Recipe

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


def iterate_variants(schema: JsonSchema) -> Iterator[JsonSchema]:
    """The forms that a value may take."""
    if parts := schema.get("anyOf") or schema.get("oneOf"):  # the second has a key that says which it is
        for one in parts:
            yield from iterate_variants(one)
    else:
        yield schema


def _choose_variants(schema: JsonSchema, kinds: Collection[object]) -> list[JsonSchema]:
    """The forms of a value; of mappings with a `kind` only those of these kinds, if there are any."""
    variants = list(iterate_variants(schema))
    of_kinds = [each for each in variants if each.get("properties", {}).get("kind", {}).get("const") in kinds]
    return of_kinds or variants


def find_schema(key: KeyPath, model: ModelClass, kinds: Collection[object] = ()) -> JsonSchema | None:
    """The schema of one key; None when there is no such key, or it may hold anything. `kinds` of the mappings above."""
    schema: JsonSchema = _inlined_schema(model)
    for part in key:
        for variant in _choose_variants(schema, kinds):
            if isinstance(part, str):
                others = variant.get("additionalProperties")
                child = variant.get("properties", {}).get(part, others if isinstance(others, dict) else None)
            else:
                child = dict(enumerate(variant.get("prefixItems", []))).get(part, variant.get("items"))
            if child is not None:
                schema = child
                break
        else:
            return None
    return schema


def child_keys(key: KeyPath, model: ModelClass, kinds: Collection[object] = ()) -> list[str]:
    """Names of the keys that may stand below `key`, a mapping of one of these kinds."""
    names: list[str] = []
    for variant in _choose_variants(find_schema(key, model, kinds) or {}, kinds):
        names += variant.get("properties", variant.get("propertyNames", {}).get("enum", ()))
    return names


def iterate_keys(model: ModelClass, key: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key of a file, parts before what is in them."""
    for name in child_keys(key, model):
        child = (*key, name)
        yield child
        yield from iterate_keys(model, child)


@cache
def _auto_keys() -> frozenset[str]:
    from phalanx.recipe.schema import Recipe

    return frozenset(
        format_key(key)
        for key in iterate_keys(Recipe)
        for variant in iterate_variants(find_schema(key, Recipe) or {})
        if "auto" in (variant.get("const"), *variant.get("enum", ()))
    )


def can_be_auto(name: str) -> bool:
    """Whether `auto` has a meaning at this key, and is not free text."""
    return name in _auto_keys()


def describe_expected(schema: JsonSchema) -> str:
    """What a value must be, in words: `a whole number above 0 or auto`."""
    return join_alternatives(list(dict.fromkeys(map(describe_variant, iterate_variants(schema)))))


def describe_variant(schema: JsonSchema) -> str:
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return join_alternatives([str(value) for value in schema["enum"]])
    match schema.get("type"):
        case "integer":
            return "a whole number" + _describe_range(schema)
        case "number":
            return "a number" + _describe_range(schema)
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "string":
            if schema.get("pattern") == STEPS_REGEX:
                return "`N steps`"
            if schema.get("pattern") == PERCENT_REGEX:
                return "`N%`"
            if (text := _FORMAT_TEXTS.get(schema.get("format", ""))) is not None:
                return text
            return "text" + (f" matching {schema['pattern']}" if "pattern" in schema else "")
        case "array" if "prefixItems" in schema:
            items = schema["prefixItems"]
            return f"a list of {len(items)}, each {describe_expected(items[0])}"
        case "array" if any(
            one.get("title", "").endswith("Entry") for one in iterate_variants(schema.get("items", {}))
        ):
            return "a list of mappings"
        case "array":
            item_texts = [
                one.get("title", _TYPE_NOUNS.get(one.get("type", ""), "text")).lower() + "s" + _describe_range(one)
                for one in iterate_variants(schema.get("items", {}))
            ]
            return f"a list of {join_alternatives(item_texts)}"
        case "object" if "properties" in schema:
            return f"a mapping ({', '.join(schema['properties'])})"
        case "object":
            return "a mapping that is not empty" if schema.get("minProperties") else "a mapping"
        case _:
            return "any value"


def _describe_range(schema: JsonSchema) -> str:
    minimum, exclusive_minimum = schema.get("minimum"), schema.get("exclusiveMinimum")
    maximum, exclusive_maximum = schema.get("maximum"), schema.get("exclusiveMaximum")
    if schema.get("type") == "integer" and exclusive_minimum is not None and maximum is not None:
        minimum, exclusive_minimum = exclusive_minimum + 1, None
    if minimum is not None and maximum is not None:
        return f" from {_figure(minimum)} to {_figure(maximum)}"
    bounds = {"above": exclusive_minimum, "of at least": minimum, "below": exclusive_maximum, "of at most": maximum}
    both = " and ".join(f"{word} {_figure(bound)}" for word, bound in bounds.items() if bound is not None)
    return f" {both}" if both else ""


def _figure(value: float) -> str:
    """A bound as people read it: 1,000,000, 0.5, 1e+18."""
    return f"{int(value):,}" if value == int(value) and (value < 1e15 or isinstance(value, int)) else f"{value:g}"


def join_alternatives(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
