"""Change some keys in the text of a recipe, and keep the rest, with its comments, as the user wrote it.

What `recipe/dump.py` does with values, this does with text: new values replace the old ones where the parser found
them. ruamel.yaml's own round trip loses comments within braces and below a list that is replaced. A text that cannot be
edited in this way, such as one with aliases, is written again without its comments.
"""

import contextlib
import copy
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ruamel.yaml.nodes import CollectionNode, MappingNode, Node

from phalanx.errors import RecipeError
from phalanx.recipe.overrides import apply_overrides
from phalanx.recipe.yaml_loader import KeyPath, SourceLocations, compose, format_key, parse_yaml, to_yaml

Edit = tuple[int, int, str]
"""A range of a text, and what stands there instead."""


def rewrite_recipe(
    text: str,
    overrides: Sequence[str],
    new_values: Mapping[str, Any],
    comments: Mapping[str, str],
    header: Sequence[str] = (),
) -> str:
    """`text` with `overrides` and `new_values` (dotted keys) applied, lines of `header` above it as comments, and each
    remark as a comment above its key. RecipeError as `load_recipe` raises it for overrides that do not fit."""
    old = parse_yaml(text, "")[0] or {}
    new = copy.deepcopy(old)
    apply_overrides(
        new, SourceLocations(), [*overrides, *(f"{key}={json.dumps(value)}" for key, value in new_values.items())]
    )
    title = "".join(f"{f'# {line}'.rstrip()}\n" for line in header)
    with contextlib.suppress(RecipeError, ValueError):  # of an edit that broke the text, or found no place
        body = _edit_lines(f"{text}\n" if text and text[-1] != "\n" else text, old, new, comments)
        if parse_yaml(body, "")[0] == new:
            return title + body
    return title + "".join(f"# {key}: {remark}\n" for key, remark in comments.items()) + to_yaml(new)


def _edit_lines(text: str, old: dict[str, Any], new: dict[str, Any], comments: Mapping[str, str]) -> str:
    """Replace the values `old` in the text with `new`; the result has other values where a value has no place of its
    own."""
    root, _ = compose(text, "")
    if not isinstance(root, MappingNode):  # nothing but comments
        lines = [[f"# {one}" for one in _remarks(comments, (key,), True)] + [_entry(key, new[key])] for key in new]
        return text + "".join(f"{line}\n" for one in lines for line in one)
    result, done = "", 0
    for start, end, instead in sorted(_edits(text, root, old, new, comments, (), root), key=lambda edit: edit[0]):
        result += text[done:start] + instead
        done = end
    return result + text[done:]


def _edits(
    text: str,
    node: MappingNode,
    old: dict[str, Any],
    new: dict[str, Any],
    remarks: Mapping[str, str],
    path: KeyPath,
    above: Node,
) -> Iterator[Edit]:
    """What makes `new` of a mapping that is `old`. Remarks on what is within braces go above the node `above`."""
    nodes = {name.value: (name, value) for name, value in node.value}
    comma = ", " if nodes else ""
    for key, value in new.items():
        here = (*path, key)
        name, there = nodes.get(key, (node, None))
        line = above if node.flow_style else name
        both = isinstance(there, MappingNode) and isinstance(value, dict)
        inner = there if both and old[key].keys() <= value.keys() else None
        indent = " " * line.start_mark.column
        remark = "".join(f"# {one}\n{indent}" for one in _remarks(remarks, here, inner is None))
        if there is None and not node.flow_style:
            end = text.index("\n", _end(text, name, node))
            yield end, end, f"\n{indent}{remark}{_entry(key, value)}"
            continue
        yield line.start_mark.index, line.start_mark.index, remark
        if there is None:
            end = _end(text, *node.value[-1]) if nodes else node.end_mark.index - 1
            yield end, end, f"{comma}{_entry(key, value)}"
            comma = ", "
        elif inner is not None:
            yield from _edits(text, inner, old[key], value, remarks, here, line)
        elif value != old[key]:
            yield _replaced(text, name, there, _entry("x", value).removeprefix("x: "))


def _replaced(text: str, name: Node, old: Node, new: str) -> Edit:
    """What puts a value on the line of its key, where another one is, or nothing, or one on lines of its own."""
    start, end = old.start_mark.index, _end(text, name, old)
    if start < end and (not isinstance(old, CollectionNode) or old.flow_style):
        return start, end, new
    colon = text.index(":", name.end_mark.index) + 1
    comment = re.match(r"[ \t]*#.*|", text[colon:end])
    return colon, end, f" {new}{comment[0] if comment else ''}"


def _end(text: str, name: Node, node: Node) -> int:
    """Where the last word of a key's value ends; for the parser, blocks and nothing end where the next thing begins."""
    start: int = node.start_mark.index
    if isinstance(node, CollectionNode) and not node.flow_style:
        last = node.value[-1]
        return _end(text, *last) if isinstance(last, tuple) else _end(text, last, last)
    words = text[start : node.end_mark.index].rstrip()
    return start + len(words) if words else text.index(":", name.end_mark.index) + 1


def _entry(key: str, value: Any) -> str:
    """`key: value` on one line."""
    return to_yaml({key: value}, flow=True, width=sys.maxsize).strip()[1:-1]


def _remarks(remarks: Mapping[str, str], key: KeyPath, below: bool) -> list[str]:
    """The remarks on a key, and on those below it."""
    own = format_key(key)
    return [one for name, one in remarks.items() if name == own or (below and name.startswith(f"{own}."))]
