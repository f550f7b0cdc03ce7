"""A recipe's text with some keys changed, and the rest, with its comments, as somebody wrote it.

What `recipe/dump.py` does with values, this does with a text. A key on a line of its own is changed in that line, any
other together with all below the same top key; where that cannot be done, the whole text is written anew.
"""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.recipe.overrides import override
from phalanx.recipe.text import Key, Places, dotted, parse, to_yaml

_LINE = re.compile(r"(\s*[\w.-]+:\s+)([^\s#{\[&*!|>'\"][^\s#]*)(\s+#.*|\s*)")
"""A plain scalar on a line of its own: what stands before it, the value, a comment."""
_MISSING = object()
_GONE = "\0"
"""Stands for a line that a block written anew has replaced; YAML has no such character."""


def rewritten(
    text: str,
    overrides: Sequence[str],
    changes: Mapping[str, Any],
    remarks: Mapping[str, str],
    head: Sequence[str] = (),
) -> str:
    """`text` with `overrides` and `changes` (dotted keys) applied, lines of `head` above it as comments, and each
    remark as a comment above its key. RecipeError as `load_recipe` raises it for overrides that do not fit."""
    old, places = parse(text, "")
    old = {} if old is None else old
    new, nowhere = copy.deepcopy(old), Places()
    override(new, nowhere, [*overrides, *(f"{key}={json.dumps(value)}" for key, value in changes.items())])
    said: dict[Key, str] = {tuple(key.split(".")): remark for key, remark in remarks.items()}
    title = [f"# {line}".rstrip() for line in head]
    body = _edited(text.splitlines(), old, new, places, said)
    if body is not None and parse("\n".join(body), "")[0] == new:
        return "\n".join([*title, *body]) + "\n"
    listed = [f"# {dotted(key)}: {remark}" for key, remark in said.items()]
    return "\n".join([*title, *listed]) + "\n" + to_yaml(new)


def _edited(
    lines: list[str], old: dict[str, Any], new: dict[str, Any], places: Places, remarks: dict[Key, str]
) -> list[str] | None:
    """The lines after the change; None when top keys do not stand on lines of their own."""
    tops = {key: _line(places, (key,)) for key in old}
    if len(set(tops.values())) < len(tops) or any(not lines[at].startswith(key) for key, at in tops.items()):
        return None
    starts = [*tops.values(), len(lines)]
    ends = dict(zip(tops, starts[1:], strict=True))
    inserted: dict[int, list[str]] = {}
    result = list(lines)
    for key, at in tops.items():
        leaves = _leaves(old[key], new[key], (key,))
        rows = {leaf: _row(lines, places, leaf) for leaf in leaves}
        above = {leaf: remark for leaf, remark in remarks.items() if leaf[0] == key}
        if all(row is not None for row in rows.values()) and all(leaf in leaves for leaf in above):
            for leaf, row in rows.items():
                assert row is not None
                result[row] = _with_value(lines[row], _value(new, leaf))
                inserted[row] = [_comment(lines[row], remark) for name, remark in above.items() if name == leaf]
        elif leaves or above:
            end = ends[key]
            while end > at + 1 and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
                end -= 1  # what stands above the next key belongs to it
            result[at:end] = [_entry(key, new[key]), *[_GONE] * (end - at - 1)]
            inserted[at] = [f"# {remark}" for remark in above.values()]
    whole: list[str] = []
    for number, line in enumerate(result):
        whole += [*inserted.get(number, []), *([] if line == _GONE else [line])]
    for key in new:
        if key not in old:
            whole += [f"# {remark}" for leaf, remark in remarks.items() if leaf[0] == key]
            whole.append(_entry(key, new[key]))
    return whole


def _line(places: Places, key: Key) -> int:
    """The line, counted from 0, where a key of a text without a name was written: its place is `:12`."""
    return int(places[key].rpartition(":")[2]) - 1


def _row(lines: list[str], places: Places, leaf: Key) -> int | None:
    """The line where a leaf's value can be exchanged."""
    if leaf not in places:
        return None
    row = _line(places, leaf)
    return row if _LINE.fullmatch(lines[row]) and lines[row].split(":")[0].strip() == leaf[-1] else None


def _with_value(line: str, value: Any) -> str:
    match = _LINE.fullmatch(line)
    assert match is not None
    return match[1] + _entry("x", value).removeprefix("x: ") + match[3]


def _entry(key: str, value: Any) -> str:
    """`key: value`. A mapping of nothing but scalars would be written in braces, so an empty one is put beside it."""
    return to_yaml({key: value, "_": {}}).removesuffix("_: {}\n").rstrip("\n")


def _comment(line: str, remark: str) -> str:
    return f"{line[: len(line) - len(line.lstrip())]}# {remark}"


def _leaves(old: Any, new: Any, key: Key) -> list[Key]:
    """Keys below `key` whose values differ, the deepest that both have."""
    if isinstance(old, dict) and isinstance(new, dict) and new.keys() >= old.keys():
        return [
            leaf
            for name in new
            for leaf in _leaves(old.get(name, _MISSING), new[name], (*key, name))
            if old.get(name, _MISSING) != new[name]
        ]
    return [] if old == new else [key]


def _value(holder: Any, key: Key) -> Any:
    for part in key:
        holder = holder[part]
    return holder
