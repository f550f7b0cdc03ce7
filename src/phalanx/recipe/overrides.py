"""Dotted overrides, `optimizer.lr=3e-4`: from the command line into the values of a recipe, before they are checked;
and into the text of a recipe, which keeps its comments."""

import contextlib
import copy
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter

from phalanx.errors import RecipeError, UsageError
from phalanx.recipe.yaml_loader import KeyPath, SourceLocations, parse_yaml, to_yaml


def apply_overrides(value: dict[str, Any], locations: SourceLocations, overrides: Sequence[str]) -> None:
    """Apply `a.b.c=VALUE` arguments in order, in place. VALUE is YAML.

    Below a missing key, null or `auto` a mapping is made. A number picks from a list: `data.source.0.weight=2`.
    UsageError: not of that form. RecipeError: no such place, or the value is not YAML.
    """
    for argument in overrides:
        name, equals, text = argument.partition("=")
        parts = name.strip().split(".")
        if not equals or not all(parts):
            raise UsageError(f"override {argument!r}: expected KEY=VALUE, such as optimizer.lr=3e-4")
        label = f"override {argument if len(argument) <= 100 else f'{argument[:97]}...'}"
        new, found = parse_yaml(text, label, with_lines=False)
        _set_value(value, parts, new, locations, label)
        key = _key(value, parts)
        locations.empty_keys += [(*key, *below) for below in found.empty_keys]


def _set_value(value: dict[str, Any], parts: list[str], new: Any, locations: SourceLocations, label: str) -> None:
    """Set one value, making the mappings above it."""
    parent: Any = value
    for depth, part in enumerate(parts[:-1]):
        index = _index(parent, part, parts[:depth], label)
        child = parent[index] if isinstance(parent, list) else parent.get(index)
        if child is None or child == "auto":
            child = parent[index] = {}
            _record_location(locations, _key(value, parts[: depth + 1]), label)
        elif not isinstance(child, dict | list):
            dotted_path = ".".join(parts[: depth + 1])
            raise RecipeError(f"{label}: {dotted_path} is {child!r}, not a mapping: it has nothing below it to change")
        parent = child
    parent[_index(parent, parts[-1], parts[:-1], label)] = new
    _record_location(locations, _key(value, parts), label)


def _index(container: dict[str, Any] | list[Any], part: str, above: list[str], label: str) -> Any:
    """`part` as a key of a mapping or a position in a list."""
    if isinstance(container, dict):
        return part
    if not part.isdecimal() or len(part) > 9 or int(part) >= len(container):
        raise RecipeError(
            f"{label}: {'.'.join(above)} is a list of {len(container)}: found {part!r}, expected a position from 0"
        )
    return int(part)


def _key(value: Any, parts: list[str]) -> KeyPath:
    """The parts as a key, with numbers where there are lists."""
    key: KeyPath = ()
    for part in parts:
        item: str | int = int(part) if isinstance(value, list) else part
        key = (*key, item)
        value = value[item]
    return key


def _record_location(locations: SourceLocations, key: KeyPath, label: str) -> None:
    """What stands at and below `key` now comes from `label`."""
    for old in [old for old in locations if old[: len(key)] == key]:
        del locations[old]
    locations.empty_keys = [old for old in locations.empty_keys if old[: len(key)] != key]
    locations[key] = label


class _NullRepresenter(RoundTripRepresenter):
    """Writes null as `null`: a recipe must not have a key with nothing behind it."""

    def represent_none(self, data: None) -> ScalarNode:
        node: ScalarNode = self.represent_scalar("tag:yaml.org,2002:null", "null")
        return node


_NullRepresenter.add_representer(type(None), _NullRepresenter.represent_none)


def rewrite_recipe(
    text: str,
    overrides: Sequence[str],
    new_values: Mapping[str, Any],
    comments: Mapping[str, str],
    header: Sequence[str] = (),
) -> str:
    """`text` with `overrides` and `new_values` (dotted keys) applied. Above it stand the lines of `header` and the
    comments on keys. RecipeError as `load_recipe` raises it for overrides that do not fit."""
    old = parse_yaml(text, "")[0] or {}
    new = copy.deepcopy(old)
    changes = [f"{key}={json.dumps(value)}" for key, value in new_values.items()]
    apply_overrides(new, SourceLocations(), [*overrides, *changes])
    lines = [*header, *(f"{key}: {comment}" for key, comment in comments.items())]
    title = "".join(f"{f'# {line}'.rstrip()}\n" for line in lines)
    with contextlib.suppress(RecipeError, YAMLError):  # such as a text with aliases, of which one place changed
        body = _edit_text(text, new)
        if parse_yaml(body, "")[0] == new:
            return title + body
    return title + to_yaml(new)


def _edit_text(text: str, new: dict[str, Any]) -> str:
    """Replace the values of the text that differ from `new`. Comments within a replaced list are lost."""
    yaml, out = YAML(), io.StringIO()
    yaml.Representer = _NullRepresenter
    yaml.preserve_quotes, yaml.width = True, 1 << 20
    document = yaml.load(text)
    _update(document if isinstance(document, CommentedMap) else (document := CommentedMap()), new)
    yaml.dump(document, out)
    return out.getvalue()


def _update(node: CommentedMap, new: dict[str, Any]) -> None:
    for key in [key for key in node if key not in new]:
        del node[key]
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(node.get(key), CommentedMap):
            _update(node[key], value)
        elif key not in node or node[key] != value:
            node[key] = value
