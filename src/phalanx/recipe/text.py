"""YAML text to plain values, with the place of every key remembered. Knows YAML, not recipes.

The rules are those of YAML 1.2, so that `1e-3` is a number and `determinism: off` is the word `off`; PyYAML follows
1.1.
"""

import re
from typing import Any

import yaml

from phalanx.errors import RecipeError

Key = tuple[str | int, ...]
"""The path of a value: `("data", "source", 0, "weight")`."""

Places = dict[Key, str]
"""Where each value was written: `recipe.yaml:12`, or the override that gave it."""

_TAG = "tag:yaml.org,2002:"
_RESOLVERS: list[tuple[str, re.Pattern[str], str]] = [
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), "~nN"),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("int", re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), "-+0123456789"),
    (
        "float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        "-+.0123456789",
    ),
]


DIGITS = 3500
"""Of a whole number; Python writes none that has more than 4,300 (sys.set_int_max_str_digits), as 3,570 of base 16."""
DEPTH = 64
"""So deep may values be nested."""
_TOO_DEEP = f"nested too deeply, expected at most {DEPTH} levels"

_CONTROL = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What YAML does not allow in a text; PyYAML would refuse it without naming the line."""


MOST = 50_000
"""Values of a text; recipes have some hundred."""
TOO_MUCH = f"more than {MOST} values, which no recipe has"


class _TooMuch(Exception):
    """A text that is no recipe, with where that was noticed, and why."""


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with the resolution rules of YAML 1.2, for so many values."""

    _count = _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """One more value, or what is within it."""
        self._count += 1
        self._depth += 1
        if self._count > MOST or self._depth > 2 * DEPTH:  # how deep each value is shows when all are there
            why = TOO_MUCH if self._count > MOST else _TOO_DEEP
            raise _TooMuch(self.peek_event().start_mark, why)  # type: ignore[no-untyped-call]
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name


for _name, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, [*_first, ""] if _name == "null" else list(_first))


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or 1.2 would take for something else."""


for _name, _pattern, _first in _RESOLVERS:
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, list(_first))


def to_yaml(value: Any) -> str:
    """YAML of plain values, in their order; `parse` reads the same values back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)


def parse(text: str, label: str, numbered: bool = True) -> tuple[Any, Places]:
    """The value of a YAML text and the place of each of its keys: `label:LINE`, or only `label`.

    RecipeError: the text is not YAML, a key stands twice, or a tag asks for something that is not plain data.
    """

    def place(mark: yaml.Mark | None) -> str:
        return f"{label}:{mark.line + 1}" if numbered and mark is not None else label

    if match := _CONTROL.search(text):
        line = f":{text.count(chr(10), 0, match.start()) + 1}" if numbered else ""
        raise RecipeError(f"{label}{line}: not valid YAML: control character {match[0]!r}")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        why = ", ".join(part for part in (error.problem, error.context) if part)
        raise RecipeError(f"{place(error.problem_mark or error.context_mark)}: not valid YAML: {why}") from None
    except RecursionError:
        raise RecipeError(f"{label}: {_TOO_DEEP}") from None
    except _TooMuch as error:
        raise RecipeError(f"{place(error.args[0])}: {error.args[1]}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{label}: not valid YAML: {error}") from None
    finally:
        loader.dispose()
    places: Places = {}
    if node is None:
        return None, {(): place(None)}
    return _value(node, (), places, place, ()), places


def _value(node: yaml.Node, key: Key, places: Places, place: Any, above: tuple[yaml.Node, ...]) -> Any:
    """The plain value of a node; fills in `places`."""
    where = place(node.start_mark)
    places.setdefault(key, where)
    if any(node is other for other in above):
        raise RecipeError(f"{where}: an anchor that contains itself")
    if len(above) == DEPTH:
        raise RecipeError(f"{where}: {_TOO_DEEP}")
    if len(places) > MOST:  # anchors within anchors: few words may say endlessly much
        raise RecipeError(f"{where}: {TOO_MUCH}")
    above = (*above, node)
    tag = node.tag.removeprefix(_TAG)
    if isinstance(node, yaml.MappingNode) and tag == "map":
        mapping: dict[str, Any] = {}
        for name_node, value_node in node.value:
            at = place(name_node.start_mark)
            if not isinstance(name_node, yaml.ScalarNode):
                raise RecipeError(f"{at}: found a {name_node.id} as a key, expected a name")
            name = str(name_node.value)
            if _CONTROL.search(name) or "\n" in name:
                raise RecipeError(f"{at}: found {name!r} as a key, expected a name")
            if name in mapping:
                raise RecipeError(f"{at}: {dotted((*key, name))}: stands here twice, first at {places[(*key, name)]}")
            places[(*key, name)] = at
            mapping[name] = _value(value_node, (*key, name), places, place, above)
        return mapping
    if isinstance(node, yaml.SequenceNode) and tag == "seq":
        return [_value(item, (*key, index), places, place, above) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        try:
            if tag == "int" and len(node.value) > DIGITS:
                why = f"a number of {len(node.value):,} digits, expected at most {DIGITS:,}"
                raise RecipeError(f"{where}: {f'{dotted(key)}: ' if key else ''}found {why}")
            return _scalar(tag, str(node.value))
        except (ValueError, KeyError):
            pass
    raise RecipeError(f"{where}: the tag {node.tag.replace(_TAG, '!!')} cannot be used in a recipe")


def _scalar(tag: str, text: str) -> Any:
    """The value of a scalar. KeyError: unknown tag. ValueError: not of that tag's form."""
    match tag:
        case "str":
            return text
        case "null":
            return None
        case "bool":
            return {"true": True, "false": False}[text.lower()]
        case "int":
            return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
        case "float":
            return float(text.replace(".inf", "inf").replace(".nan", "nan") if text[-1].isalpha() else text)
        case _:
            raise KeyError(tag)


def dotted(key: Key) -> str:
    """`data.source.0.weight`: a key as people write it."""
    return ".".join(str(part) for part in key)


def place_of(places: Places, key: Key) -> str:
    """Where the value of `key`, or the nearest one above it, was written."""
    while key and key not in places:
        key = key[:-1]
    return places.get(key, "recipe")
