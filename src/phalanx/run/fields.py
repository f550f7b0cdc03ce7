"""Typed dataclasses as JSON objects and back: the events of a run, and the messages between its processes.

A reader checks every field by its type. A field that has its default may be left out; one that the class does not have
is ignored.
"""

import math
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

LATEST_TIME_S, LARGEST_COUNT, LARGEST_FLOAT = 1e11, 1 << 53, 1e30
"""Unix seconds of a time, a count and any other number beyond which they are none."""
ExitStatus = Annotated[int, "exit status"]
"""How a process ended: its exit code, or the number of the signal that ended it, negative. Other integers are counts,
not negative."""
Kind = TypeVar("Kind")
Check = Callable[[Any], Any]
"""Returns a JSON value as a field has it. ValueError or OverflowError where it is of another type."""


class TypedMessage:
    """A message; `kind` names its class among JSON values, in snake case."""

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


def to_fields(value: Any) -> dict[str, Any]:
    """Return an event or message as JSON values: its `kind`, and its fields but those that have their default."""
    value_type: Any = type(value)
    found: dict[str, Any] = {"kind": value_type.kind}
    defaults = _defaults(value_type)
    for name, each in vars(value).items():
        if name not in defaults or each != defaults[name]:
            found[name] = _to_json(each)
    return found


def read_fields(found: Any, kinds: Mapping[str, type[Kind]]) -> Kind:
    """Return the instance of one of `kinds` that `to_fields` made these JSON values of. ValueError or OverflowError
    where they are of no known kind, lack a field, or have one of the wrong type."""
    kind = found.get("kind") if isinstance(found, dict) else None
    value_type = kinds.get(kind) if isinstance(kind, str) else None
    if value_type is None:
        raise ValueError(kind)
    value: Kind = read_as(value_type, found)
    return value


def read_as(value_type: Any, found: Any) -> Any:
    """Return the instance of a dataclass with these fields. Errors as of `read_fields`."""
    defaults, checks = _defaults(value_type), _checks(value_type)
    values, found = dict(defaults), _object(found)
    for name, check, required in checks:
        if name in found:
            values[name] = check(found[name])
        elif required:
            raise ValueError(name)
    value = object.__new__(value_type)
    value.__dict__.update(values)  # the constructor of a frozen dataclass takes twice as long
    return value


def _to_json(value: Any) -> Any:
    if type(value) is tuple:
        return [vars(each) if is_dataclass(each) else each for each in value]
    return vars(value) if is_dataclass(value) else value


@cache
def _defaults(value_type: Any) -> dict[str, Any]:
    return {each.name: each.default for each in fields(value_type) if each.default is not MISSING}


@cache
def _checks(value_type: Any) -> tuple[tuple[str, Check, bool], ...]:
    """For each field: its name, the check of its value, and whether it is required."""
    hints = get_type_hints(value_type, include_extras=True)
    return tuple(
        (each.name, _time if each.name == "time" else _check_of(hints[each.name]), each.default is MISSING)
        for each in fields(value_type)
    )


def _check_of(hint: Any) -> Check:
    """The check of a type: those that fields of events and messages have."""
    if hint in _CHECK_BY_TYPE:
        return _CHECK_BY_TYPE[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (of,) = (each for each in arguments if each is not types.NoneType)
        inner = _finite if of is float else _check_of(of)
        return lambda value: None if value is None else inner(value)
    if origin is Literal:
        return lambda value: _one_of(value, arguments)
    if origin is tuple:
        return _tuple_check(arguments)
    if origin is dict:
        text, inner = _check_of(arguments[0]), _check_of(arguments[1])
        return lambda value: {text(key): inner(each) for key, each in _object(value).items()}
    assert is_dataclass(hint)
    return lambda value: read_as(hint, value)


def _tuple_check(arguments: tuple[Any, ...]) -> Check:
    """The check of a list: of any length, or of these types in this order."""
    if arguments[-1] is Ellipsis:
        inner = _check_of(arguments[0])
        return lambda value: tuple(inner(each) for each in _list(value))
    checks = [_check_of(each) for each in arguments]
    return lambda value: tuple(check(each) for check, each in zip(checks, _list(value), strict=True))


def _float(value: Any) -> float:
    if (type(value) is float or type(value) is int) and -LARGEST_FLOAT < value < LARGEST_FLOAT:
        return float(value)
    raise ValueError(value)


def _finite(value: Any) -> float:
    """A loss that explodes has no limit."""
    if (type(value) is float or type(value) is int) and math.isfinite(value):
        return float(value)
    raise ValueError(value)


def _time(value: Any) -> float:
    if 0 <= (time := _float(value)) <= LATEST_TIME_S:
        return time
    raise ValueError(value)


def _count(value: Any) -> int:
    if type(value) is int and 0 <= value <= LARGEST_COUNT:
        return value
    raise ValueError(value)


def _status(value: Any) -> int:
    if type(value) is int and -LARGEST_COUNT <= value <= LARGEST_COUNT:
        return value
    raise ValueError(value)


def _text(value: Any) -> str:
    if type(value) is str:
        return value
    raise ValueError(value)


def _flag(value: Any) -> bool:
    if type(value) is bool:
        return value
    raise ValueError(value)


def _object(value: Any) -> dict[str, Any]:
    if type(value) is dict:
        return value
    raise ValueError(value)


def _list(value: Any) -> list[Any]:
    if type(value) is list:
        return value
    raise ValueError(value)


def _anything(value: Any) -> Any:
    return value


def _one_of(value: Any, known: tuple[Any, ...]) -> Any:
    if type(value) is str and value in known:
        return value
    raise ValueError(value)


_CHECK_BY_TYPE: dict[Any, Check] = {
    float: _float,
    int: _count,
    ExitStatus: _status,
    str: _text,
    bool: _flag,
    Any: _anything,
}
