"""YAML text to plain values, with the place of every key remembered. Knows YAML, not recipes.

The rules are those of YAML 1.2, so that `1e-3` is a number and `determinism: off` is the word `off`. ruamel.yaml
parses, in Python: its parser in C ends the process on a text of 100,000 brackets.
"""

import contextlib
import io
import re
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, StreamMark, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import BaseResolver, implicit_resolvers

from phalanx.errors import RecipeError

KeyPath = tuple[str | int, ...]
"""The path of a value: `("data", "source", 0, "weight")`."""


class SourceLocations(dict[KeyPath, str]):
    """Where each value was written: `recipe.yaml:12`, or the override that gave it."""

    def __init__(self, places: Mapping[KeyPath, str] | None = None) -> None:
        super().__init__(places or {})
        self.empty_keys: list[KeyPath] = []
        """Keys with nothing behind them. YAML takes this for null, which switches parts off; it is a slip where lines
        below are commented out, or not indented."""


_YAML_TAG_PREFIX = "tag:yaml.org,2002:"
_SCALAR_TAGS = [_YAML_TAG_PREFIX + name for name in ("null", "bool", "int", "float", "str")]

MAX_DEPTH = 64
"""Maximum nesting of values."""
_TOO_DEEP_TEXT = f"nested too deeply, expected at most {MAX_DEPTH} levels"

_CONTROL_CHARACTERS = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What YAML does not allow in a text; the parser would refuse it without naming the line."""


_UNICODE_LINE_BREAKS = re.compile("[\x85\u2028\u2029]")
"""What YAML 1.1 takes for a line break."""
MAX_VALUES = 50_000
"""Values of a text; recipes have some hundred."""
TOO_MANY_VALUES_TEXT = f"more than {MAX_VALUES} values, which no recipe has"


class _Rules(BaseResolver):
    """YAML 1.2's core schema: no dates, no merging of mappings, no underscores in numbers, as ruamel.yaml adds them."""

    processing_version = (1, 2)

    def __init__(self, version: Any, loader: Any) -> None:
        super().__init__(loader)


_FLOAT_PATTERN = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
for _name, _pattern, _first in (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", _FLOAT_PATTERN, list("-+.0123456789")),
):
    _Rules.add_implicit_resolver_base(_YAML_TAG_PREFIX + _name, re.compile(f"^(?:{_pattern})$"), _first)


class _Cautious(_Rules):
    """Rules for writing: a string that YAML 1.1, YAML 1.2 or ruamel.yaml takes for something else is quoted."""


for _, *_rule in implicit_resolvers:
    _Cautious.add_implicit_resolver_base(*_rule)


class _Representer(SafeRepresenter):
    """Escapes what YAML takes for a line break: elsewhere than between double quotes it would become a space."""

    def represent_str(self, data: str) -> Any:
        """Make the scalar of a text."""
        style = '"' if _UNICODE_LINE_BREAKS.search(data) else None
        return self.represent_scalar(f"{_YAML_TAG_PREFIX}str", data, style=style)


_Representer.add_representer(str, _Representer.represent_str)


def to_yaml(value: Any, flow: bool | None = None, width: int = 120) -> str:
    """YAML of plain values, in their order, as YAML 1.1 has it where it differs; `parse_yaml` reads the same values
    back.

    `flow`: whether mappings and lists stand in braces and brackets; None: those of nothing but scalars.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver, yaml.Representer, yaml.version = _Cautious, _Representer, (1, 1)
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = flow, False  # type: ignore[assignment]
    yaml.brace_single_entry_mapping_in_flow_sequence = True
    yaml.width = width
    text = io.StringIO()
    yaml.dump(value, text)
    return text.getvalue().removeprefix("%YAML 1.1\n---").lstrip()


def _compose(text: str, label: str, numbered: bool) -> tuple[Node | None, YAML]:
    """The root of a YAML text's nodes, and what makes values of scalars. RecipeError: the text is not YAML."""
    if match := _CONTROL_CHARACTERS.search(text):
        line = f":{text.count(chr(10), 0, match.start()) + 1}" if numbered else ""
        raise RecipeError(f"{label}{line}: not valid YAML: control character {match[0]!r}")
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _Rules
    yaml.composer.warn_double_anchors = False
    try:
        return yaml.compose(text), yaml
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = ", ".join(part for part in (error.problem, error.context) if part)
        raise RecipeError(f"{_place(label, mark if numbered else None)}: not valid YAML: {why}") from None
    except RecursionError:
        raise RecipeError(f"{label}: {_TOO_DEEP_TEXT}") from None
    except (YAMLError, ValueError, OverflowError) as error:  # the last two: escapes of characters that do not exist
        raise RecipeError(f"{label}: not valid YAML: {error}") from None


def parse_yaml(text: str, label: str, with_lines: bool = True) -> tuple[Any, SourceLocations]:
    """The value of a YAML text and the place of each of its keys: `label:LINE`, or only `label`.

    RecipeError: the text is not YAML, a key appears twice, or a tag asks for something that is not plain data.
    """
    node, yaml = _compose(text, label, with_lines)
    locations = SourceLocations()

    def location(node: Node) -> str:
        return _place(label, node.start_mark if with_lines else None)

    def value(node: Node, key: KeyPath, above: tuple[Node, ...]) -> Any:
        """The plain value of a node; fills in `locations`."""
        where = location(node)
        locations.setdefault(key, where)
        if any(node is other for other in above):
            raise RecipeError(f"{where}: an anchor that contains itself")
        if len(above) == MAX_DEPTH:
            raise RecipeError(f"{where}: {_TOO_DEEP_TEXT}")
        if len(locations) > MAX_VALUES:  # anchors within anchors: few words may say endlessly much
            raise RecipeError(f"{where}: {TOO_MANY_VALUES_TEXT}")
        above = (*above, node)
        if isinstance(node, MappingNode) and node.tag == f"{_YAML_TAG_PREFIX}map":
            mapping: dict[str, Any] = {}
            for name_node, value_node in node.value:
                at = location(name_node)
                if not isinstance(name_node, ScalarNode):
                    raise RecipeError(f"{at}: found a {name_node.id} as a key, expected a name")
                name = str(name_node.value)
                if _CONTROL_CHARACTERS.search(name) or "\n" in name:
                    raise RecipeError(f"{at}: found {name!r} as a key, expected a name")
                if name in mapping:
                    raise RecipeError(
                        f"{at}: {format_key((*key, name))}: appears twice, first at {locations[(*key, name)]}"
                    )
                locations[(*key, name)] = at
                mapping[name] = value(value_node, (*key, name), above)
            return mapping
        if isinstance(node, SequenceNode) and node.tag == f"{_YAML_TAG_PREFIX}seq":
            return [value(item, (*key, index), above) for index, item in enumerate(node.value)]
        if isinstance(node, ScalarNode) and node.tag in _SCALAR_TAGS:
            if not node.value and node.tag == f"{_YAML_TAG_PREFIX}null":
                locations.empty_keys.append(key)
            with contextlib.suppress(ValueError, LookupError):
                return yaml.constructor.construct_object(node)
        raise RecipeError(
            f"{where}: the tag {str(node.tag).replace(_YAML_TAG_PREFIX, '!!')} cannot be used in a recipe"
        )

    if node is not None:
        return value(node, (), ()), locations
    locations[()] = label
    locations.empty_keys.append(())
    return None, locations


def _place(label: str, mark: StreamMark | None) -> str:
    return label if mark is None else f"{label}:{mark.line + 1}"


def format_key(key: KeyPath) -> str:
    """`data.source.0.weight`: a key as people write it."""
    return ".".join(str(part) for part in key)


def location_of_key(locations: SourceLocations, key: KeyPath) -> str:
    """Where the value of `key`, or the nearest one above it, was written."""
    while key and key not in locations:
        key = key[:-1]
    return locations.get(key, "recipe")
