"""Patterns of dotted names, such as `blocks.*.ffn`."""

import re
from collections.abc import Iterable
from functools import cache


@cache
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    parts = ("[^.]+" if part == "*" else re.escape(part).replace(r"\*", "[^.]*") for part in pattern.split("."))
    return re.compile(r"\.".join(parts))


def matches_pattern(pattern: str, name: str) -> bool:
    """Whether a dotted name fits a pattern, part by part: `blocks.*.ffn` fits `blocks.0.ffn`, not `blocks.0.1.ffn`."""
    return _compile_pattern(pattern).fullmatch(name) is not None


def find_matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that fit, in their order."""
    return [name for name in names if matches_pattern(pattern, name)]
