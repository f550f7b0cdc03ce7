"""Dotted overrides, `optimizer.lr=3e-4`: from the command line into the values of a recipe, before they are checked."""

from collections.abc import Sequence
from typing import Any

from phalanx.errors import RecipeError, UsageError
from phalanx.recipe.text import Key, Places, parse


def override(value: dict[str, Any], places: Places, overrides: Sequence[str]) -> None:
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
        _put(value, parts, parse(text, label, numbered=False)[0], places, label)


def _put(value: dict[str, Any], parts: list[str], new: Any, places: Places, label: str) -> None:
    """Set one value, making the mappings above it."""
    holder: Any = value
    for depth, part in enumerate(parts[:-1]):
        index = _index(holder, part, parts[:depth], label)
        below = holder[index] if isinstance(holder, list) else holder.get(index)
        if below is None or below == "auto":
            below = holder[index] = {}
            _placed(places, _key(value, parts[: depth + 1]), label)
        elif not isinstance(below, dict | list):
            at = ".".join(parts[: depth + 1])
            raise RecipeError(f"{label}: {at} is {below!r}, not a mapping: it has nothing below it to change")
        holder = below
    holder[_index(holder, parts[-1], parts[:-1], label)] = new
    _placed(places, _key(value, parts), label)


def _index(holder: dict[str, Any] | list[Any], part: str, above: list[str], label: str) -> Any:
    """`part` as a key of a mapping or a position in a list."""
    if isinstance(holder, dict):
        return part
    if not part.isdecimal() or len(part) > 9 or int(part) >= len(holder):
        raise RecipeError(
            f"{label}: {'.'.join(above)} is a list of {len(holder)}: found {part!r}, expected a position from 0"
        )
    return int(part)


def _key(value: Any, parts: list[str]) -> Key:
    """The parts as a key, with numbers where there are lists."""
    key: Key = ()
    for part in parts:
        here: str | int = int(part) if isinstance(value, list) else part
        key = (*key, here)
        value = value[here]
    return key


def _placed(places: Places, key: Key, label: str) -> None:
    """What stands at and below `key` now comes from `label`."""
    for old in [old for old in places if old[: len(key)] == key]:
        del places[old]
    places[key] = label
