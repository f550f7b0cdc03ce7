"""What is wrong with a file that people write, in words: from pydantic's errors to one line for each problem.

`FILE:LINE: key: what was found, what was expected`. pydantic reports every branch of a union; here a problem is told
once.
"""

import json
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from phalanx.errors import RecipeError
from phalanx.recipe.schema import Recipe
from phalanx.recipe.shape import Model, expected, flat_keys, keys_at, schema_at
from phalanx.recipe.text import Key, Places, dotted, place_of

MOST = 5
"""So many problems are told at once."""


def explained(error: ValidationError, value: Any, places: Places, model: Model = Recipe) -> RecipeError:
    """The RecipeError that tells all problems of `value`, which is no `model`, in the order of the file."""
    found = [(_key(details, value), details) for details in error.errors(include_url=False)]
    # of a union's branches, the one that got deepest is the one that was meant
    keys = [key for key, _ in found]
    found = [(key, details) for key, details in found if not any(_below(other, key) for other in keys)]
    problems: dict[Key, str] = {}
    for key, details in found:
        if key not in problems or details["type"] == "value_error":
            problems[key] = f"{place_of(places, key)}: {_problem(key, details, model)}"
    order = {key: index for index, key in enumerate(places)}
    return several([problems[key] for key in sorted(problems, key=lambda key: order.get(key, len(order)))])


def several(problems: Sequence[str]) -> RecipeError:
    """One error of several problems, one line each."""
    rest = len(problems) - MOST
    return RecipeError("\n".join([*problems[:MOST], *([f"... and {rest} more"] if rest > 0 else [])]))


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean NAME?` for a slip of the pen, else nothing."""
    close = get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def _key(details: ErrorDetails, value: Any) -> Key:
    """The path of an error in the value itself: pydantic's own has the names of union branches in between."""
    key: Key = ()
    last = len(details["loc"]) - 1
    for index, part in enumerate(details["loc"]):
        if isinstance(value, dict) and (part in value or (index == last and details["type"] == "missing")):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        key = (*key, part)
    return key


def _below(key: Key, above: Key) -> bool:
    return len(key) > len(above) and key[: len(above)] == above


def _problem(key: Key, details: ErrorDetails, model: Model) -> str:
    name = dotted(key)
    if details["loc"][-1:] == ("[key]",):
        return f"{name}: unknown key{_meant(key, model)}"
    match details["type"]:
        case "extra_forbidden":
            return f"{name}: unknown key{_meant(key, model)}"
        case "missing":
            return f"{name}: missing, expected {expected(schema_at(key, model) or {})}"
        case "value_error":
            return f"{name}: {details['ctx']['error']}" if name else str(details["ctx"]["error"])
    start = f"{name}: " if name else ""
    finite = " that is finite" if details["type"] == "finite_number" else ""
    return f"{start}found {found(details['input'])}, expected {expected(schema_at(key, model) or {})}{finite}"


def _meant(key: Key, model: Model) -> str:
    """The key that was meant: the highest of its name elsewhere, else one of nearly its name here, else all that may
    stand here."""
    name, here = str(key[-1]), keys_at(key[:-1], model)
    alike = [other for other in flat_keys(model=model) if other[-1] == name]
    least = min(map(len, alike), default=0)  # a key deep down is rarely meant by who leaves out where it stands
    elsewhere = [dotted(other) for other in alike if len(other) == least]
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere[:3])}?"
    return nearest(name, here) or f"; known are {', '.join(here)}"


def found(value: Any) -> str:
    """A value from a recipe in a few words."""
    if isinstance(value, dict):
        return "a mapping"
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, list) and len(text) > 40:
        return f"a list of {len(value)}"
    return text if len(text) <= 60 else f"{text[:57]}..."
