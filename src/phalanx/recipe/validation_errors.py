"""Read a file that users write, and describe what is wrong with it: one line for each of pydantic's problems.

`FILE:LINE: key: what was found, what was expected`. pydantic reports every branch of a union; here a problem is
reported once.
"""

import json
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from phalanx.errors import DataError, RecipeError, is_storage_error
from phalanx.recipe.schema_keys import (
    ModelClass,
    child_keys,
    describe_expected,
    find_schema,
    iterate_keys,
    iterate_variants,
)
from phalanx.recipe.yaml_loader import KeyPath, SourceLocations, format_key, location_of_key, parse_yaml
from phalanx.safe_files import read_bytes

ModelT = TypeVar("ModelT", bound=BaseModel)
_PRECISE_ERRORS = ("value_error", "union_tag_invalid", "union_tag_not_found")
"""Types of errors that say more than those of other branches of a union."""
MAX_SHOWN_PROBLEMS = 5
"""Problems that are reported at once, at most."""


def validate_value(value: Any, locations: SourceLocations, model: type[ModelT]) -> ModelT:
    """Return the `model` of what `parse_yaml` has read. Raises RecipeError with a line for each problem."""
    if empty := [
        f"{location_of_key(locations, key)}: {format_key(key)}: found nothing, expected {describe_expected(schema)}"
        for key in locations.empty_keys
        if key and (schema := find_schema(key, model))
    ]:
        raise join_problems(empty)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _describe_validation_error(error, value, locations, model) from None


def _describe_validation_error(
    error: ValidationError, value: Any, locations: SourceLocations, model: ModelClass
) -> RecipeError:
    """Return the RecipeError with all problems of `value`, which is not a valid `model`, in the order of the file."""
    key_errors = [(_key_of_error(details, value), details) for details in error.errors(include_url=False)]
    # of a union's branches, the one that got deepest is the one that was meant
    keys = [key for key, _ in key_errors]
    key_errors = [(key, details) for key, details in key_errors if not any(_is_below(other, key) for other in keys)]
    problems: dict[KeyPath, str] = {}
    for key, details in key_errors:
        if key not in problems or details["type"] in _PRECISE_ERRORS:
            problems[key] = f"{location_of_key(locations, key)}: {_describe_error(key, details, model)}"
    order = {key: index for index, key in enumerate(locations)}
    return join_problems([problems[key] for key in sorted(problems, key=lambda key: order.get(key, len(order)))])


def join_problems(problems: Sequence[str]) -> RecipeError:
    """One error of several problems, one line each."""
    num_hidden = len(problems) - MAX_SHOWN_PROBLEMS
    more = [f"... and {num_hidden} more"] if num_hidden > 0 else []
    return RecipeError("\n".join([*problems[:MAX_SHOWN_PROBLEMS], *more]))


def suggest_nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean NAME?` for a slip of the pen, else nothing."""
    close = get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def _key_of_error(error: ErrorDetails, value: Any) -> KeyPath:
    """The path of an error in the value itself: pydantic's own has the names of union branches in between."""
    key: KeyPath = ()
    last = len(error["loc"]) - 1
    for index, part in enumerate(error["loc"]):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif index == last and error["type"] == "missing" and isinstance(value, dict | str):
            pass  # a text stands for a mapping with that `kind`
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        key = (*key, part)
    return key


def _is_below(key: KeyPath, above: KeyPath) -> bool:
    return len(key) > len(above) and key[: len(above)] == above


def _describe_error(key: KeyPath, error: ErrorDetails, model: ModelClass) -> str:
    name = format_key(key)
    if error["loc"][-1:] == ("[key]",):
        if not child_keys(key[:-1], model):  # a mapping with keys of the user's own
            return f"{format_key(key[:-1])}: key {error['input']}: {error['msg'].lower()}"
        return f"{name}: unknown key{_suggest_key(key, model)}"
    match error["type"]:
        case "extra_forbidden":
            return f"{name}: unknown key{_suggest_key(key, model, error['loc'])}"
        case "missing":
            return f"{name}: missing, expected {describe_expected(find_schema(key, model, error['loc']) or {})}"
        case "union_tag_invalid":
            context = error["ctx"]
            expected = context["expected_tags"].replace("'", "")
            return f"{name}.kind: found {context['tag']!r}, expected {expected}"
        case "union_tag_not_found":
            return f"{name}.kind: missing; it says which of the mappings this is"
        case "value_error":
            return f"{name}: {error['ctx']['error']}" if name else str(error["ctx"]["error"])
    start = f"{name}: " if name else ""
    finite_text = " that is finite" if error["type"] == "finite_number" else ""
    schema = find_schema(key, model, error["loc"]) or {}
    names = [name for variant in iterate_variants(schema) for name in variant.get("enum", ())]
    nearest = suggest_nearest(error["input"], names) if isinstance(error["input"], str) else ""
    expected = describe_expected(schema)
    if expected == "text" and isinstance(error["input"], bool | int | float):
        expected = "text in quotes"  # YAML reads 1 as a number
    return f"{start}found {describe_value(error['input'])}, expected {expected}{finite_text}{nearest}"


def _suggest_key(key: KeyPath, model: ModelClass, kinds: Collection[object] = ()) -> str:
    """Suggest the key that was meant: the highest with its name elsewhere, else one with nearly its name here, else all
    keys that are allowed here."""
    name, here = str(key[-1]), child_keys(key[:-1], model, kinds)
    same_name = [other for other in iterate_keys(model) if other[-1] == name and other != key]
    min_depth = min(map(len, same_name), default=0)  # a key without its path is rarely a deeply nested one
    other_keys = [format_key(other) for other in same_name if len(other) == min_depth]
    if other_keys:
        return f"; did you mean {' or '.join(other_keys[:3])}?"
    return suggest_nearest(name, here) or f"; known are {', '.join(here)}"


def describe_value(value: Any) -> str:
    """A value from a recipe in a few words."""
    if isinstance(value, dict):
        return "a mapping"
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, list) and len(text) > 40:
        return f"a list of {len(value)}"
    return text if len(text) <= 60 else f"{text[:57]}..."


MAX_FILE_BYTES = 1 << 20


def read_user_mapping(path: Path, expected: str) -> tuple[dict[str, Any], SourceLocations]:
    """Read a YAML file with a mapping, and where its keys are. Raises RecipeError for anything else than `expected`."""
    value, locations = parse_yaml(read_user_text(path), str(path))
    if not isinstance(value, dict):
        raise RecipeError(f"{location_of_key(locations, ())}: found {describe_value(value)}, expected {expected}")
    return value, locations


def read_user_text(path: Path) -> str:
    """Read the text of a file that the user wrote. Raises RecipeError when it is missing or is not text."""
    try:
        return read_bytes(path, MAX_FILE_BYTES).decode("utf-8-sig")
    except DataError as error:
        raise RecipeError(f"{path}: cannot be read: {str(error).removeprefix(f'{path}: ')}") from None
    except FileNotFoundError:
        siblings = sorted(other.name for other in path.absolute().parent.glob("*.y*ml"))
        raise RecipeError(f"{path}: there is no such file{suggest_nearest(path.name, siblings)}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"{path}:{line}: not UTF-8 text (byte 0x{error.object[error.start]:02x})") from None
    except OSError as error:
        if is_storage_error(error):
            raise
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
