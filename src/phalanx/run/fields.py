"""Typed dataclasses as JSON objects and back: the events of a run, and the messages between its processes.

A reader checks every field by its type. A field that has its default may be left out; one that the class does not have
is ignored.
"""

import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

LATEST_TIME_S, LARGEST_COUNT, LARGEST_FLOAT = 1e11, 1 << 53, 1e30
"""Unix seconds of a time, a count and any other number beyond which they are none."""
ExitStatus = Annotated[int, "exit status"]
"""How a process ended: its exit code, or the number of the signal that ended it, negative. Other integers are counts,
not negative."""
Kind = TypeVar("Kind")
Check = Callable[[Any], Any]
"""Returns a JSON value as a field has it. ValueError or OverflowError where it is of another type."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class TypedMessage:
    """A message: each subclass becomes a frozen dataclass. `kind` names it in JSON, by default in snake case."""

    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str | None = None, kw_only: bool = True) -> None:
        cls.kind = kind or re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        dataclass(frozen=True, kw_only=kw_only)(cls)


def to_fields(value: Any) -> dict[str, Any]:
    """Return an event or message as JSON values: its `kind`, and its fields but those that have their default."""
    return {"kind": value.kind, **to_json(value)}


def read_fields(found: Any, kinds: Mapping[str, type[Kind]]) -> Kind:
    """Return the instance of one of `kinds` that `to_fields` made these JSON values of. ValueError or OverflowError
    where they are of no known kind, lack a field, or have one of the wrong type."""
    kind = found.get("kind") if isinstance(found, dict) else None
    value_type = kinds.get(kind) if isinstance(kind, str) else None
    if value_type is None:
        raise ValueError(kind)
    value: Kind = read_as(value_type, found)
    return value


def to_json(value: Any) -> Any:
    """Return dataclasses, tuples and dicts as JSON values, without fields that have their default."""
    if is_dataclass(value):
        value_type: Any = type(value)
        defaults = _defaults(value_type)
        return {key: to_json(each) for key, each in vars(value).items() if key not in defaults or each != defaults[key]}
    if isinstance(value, tuple):
        return [to_json(each) for each in value]
    return {key: to_json(each) for key, each in value.items()} if type(value) is dict else value


def read_as(value_type: Any, found: Any) -> Any:
    """Return the instance of a dataclass with these fields. Errors as of `read_fields`."""
    defaults, checks = _defaults(value_type), _checks(value_type)
    values, found = dict(defaults), _check_object(found)
    for name, check, required in checks:
        if name in found:
            values[name] = check(found[name])
        elif required:
            raise ValueError(name)
    value = object.__new__(value_type)
    value.__dict__.update(values)  # the constructor of a frozen dataclass takes twice as long
    return value


@cache
def _defaults(value_type: Any) -> dict[str, Any]:
    return {each.name: each.default for each in fields(value_type) if each.default is not MISSING}


@cache
def _checks(value_type: Any) -> tuple[tuple[str, Check, bool], ...]:
    """For each field: its name, the check of its value, and whether it is required."""
    hints = get_type_hints(value_type, include_extras=True)
    return tuple(
        (each.name, _check_time if each.name == "time" else _check_of(hints[each.name]), each.default is MISSING)
        for each in fields(value_type)
    )


def _check_of(hint: Any) -> Check:
    """The check of a type: those that fields of events and messages have."""
    if hint in _CHECK_BY_TYPE:
        return _CHECK_BY_TYPE[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (of,) = (each for each in arguments if each is not types.NoneType)
        inner = _check_finite if of is float else _check_of(of)
        return lambda value: None if value is None else inner(value)
    if origin is Literal:
        return _accept(arguments.__contains__)
    if origin is tuple:
        return _tuple_check(arguments)
    if origin is dict:
        text, inner = _check_of(arguments[0]), _check_of(arguments[1])
        return lambda value: {text(key): inner(each) for key, each in _check_object(value).items()}
    if issubclass(hint, tuple):  # a NamedTuple
        values = _tuple_check(tuple(get_type_hints(hint).values()))
        return lambda value: hint(*values(value))
    assert is_dataclass(hint)
    return lambda value: read_as(hint, value)


def _tuple_check(arguments: tuple[Any, ...]) -> Check:
    """The check of a list: of any length, or of these types in this order."""
    if arguments[-1] is Ellipsis:
        inner = _check_of(arguments[0])
        return lambda value: tuple(inner(each) for each in _check_list(value))
    checks = [_check_of(each) for each in arguments]
    return lambda value: tuple(check(each) for check, each in zip(checks, _check_list(value), strict=True))


def _accept(is_valid: Callable[[Any], bool], convert: Callable[[Any], Any] = lambda value: value) -> Check:
    def check(value: Any) -> Any:
        if is_valid(value):
            return convert(value)
        raise ValueError(value)

    return check


def _accept_type(value_type: type) -> Check:
    return _accept(lambda value: type(value) is value_type)


def _accept_float(low: float, high: float) -> Check:
    return _accept(lambda value: type(value) in (float, int) and low <= value <= high, float)


def _accept_int(low: int, high: int) -> Check:
    return _accept(lambda value: type(value) is int and low <= value <= high)


_check_time = _accept_float(0, LATEST_TIME_S)
_check_finite = _accept_float(-sys.float_info.max, sys.float_info.max)  # a loss that explodes has no limit
_check_object, _check_list = _accept_type(dict), _accept_type(list)
_CHECK_BY_TYPE: dict[Any, Check] = {
    float: _accept_float(-LARGEST_FLOAT, LARGEST_FLOAT),
    int: _accept_int(0, LARGEST_COUNT),
    ExitStatus: _accept_int(-LARGEST_COUNT, LARGEST_COUNT),
    str: _accept_type(str),
    bool: _accept_type(bool),
    Any: _accept(lambda value: True),
}
