"""Find words that the project does not use, in code, docs and help texts: `python tools/words.py [--list]`.

One concept has one word, and it is the field's. The list is banned_words.txt. Exit code 1
when any is found. `--list` prints each place, else the counts by word.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("banned_words.txt")


def read_list(path: Path = LIST) -> dict[str, list[str]]:
    """The banned words by section."""
    sections: dict[str, list[str]] = {}
    current: list[str] = []
    for line in path.read_text().splitlines():
        if line.startswith("["):
            current = sections.setdefault(line.strip("[]"), [])
        elif not line.startswith("#"):
            current += line.split()
    return sections


BANNED = read_list()
TEXT = re.compile(
    r"(?<![\w-])(" + "|".join(phrase.replace("-", r"[\s-]+") for phrase in BANNED["text"]) + r")(?![\w-])", re.I
)
SKIPPED = ("docs/benchmarks/notes/", "fleet/docs/benchmarks/notes.md")
"""Diaries: they quote what was printed then."""
ALLOWED_MARK = "# words: allow"
"""Ends a line of code with a string that must not change, such as a part of a hash key."""


@dataclass(frozen=True)
class Found:
    """A banned word at a place."""

    path: Path
    line: int
    word: str
    kind: str


def text_words(path: Path, first_line: int, text: str, kind: str) -> Iterator[Found]:
    """Banned words of a text that begins in `first_line` of a file."""
    for match in TEXT.finditer(text):
        word = " ".join(match[1].lower().replace("-", " ").split())
        yield Found(path, first_line + text.count("\n", 0, match.start()), word, kind)


def split_identifier(name: str) -> list[str]:
    """Lower-case words of a snake_case or CamelCase name."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def python_words(path: Path, source: str) -> Iterator[Found]:
    """Banned words of a Python file: in comments, in strings, in the names that it defines."""
    for number, line in enumerate(source.splitlines(), 1):
        if match := re.search(r"(?:^|\s)#(.*)", line):
            yield from text_words(path, number, match[1], "comment")
    allowed = {number for number, line in enumerate(source.splitlines(), 1) if line.endswith(ALLOWED_MARK)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.lineno not in allowed:
            yield from text_words(path, node.lineno, node.value, "text")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _name_words(path, node.lineno, node.name)
            if not isinstance(node, ast.ClassDef) and node.name in BANNED["function"]:
                yield Found(path, node.lineno, node.name, "function")
            doc = ast.get_docstring(node) or ""
            if doc.split(" ", 1)[0] in ("Of", "By"):
                yield Found(path, node.lineno, doc.split(" ", 1)[0], "docstring")
        elif isinstance(node, ast.arg):
            yield from _name_words(path, node.lineno, node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield from _name_words(path, node.lineno, node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from _name_words(path, node.lineno, node.attr)


def _name_words(path: Path, line: int, name: str) -> Iterator[Found]:
    for part in split_identifier(name):
        if part in BANNED["name"]:
            yield Found(path, line, part, "name")


def all_words(root: Path = ROOT) -> list[Found]:
    """Banned words of both packages, their docs, READMEs and the change log."""
    found: list[Found] = []
    for package in (root / "src", root / "fleet" / "src"):
        for path in sorted(package.rglob("*.py")):
            found += python_words(path, path.read_text())
    pages = [*(root / "docs").rglob("*.md"), *(root / "fleet").rglob("*.md"), *root.glob("*.md")]
    pages.sort()
    for path in pages:
        if not str(path.relative_to(root)).startswith(SKIPPED):
            found += text_words(path, 1, path.read_text(), "docs")
    return found


def main() -> int:
    found = all_words()
    if "--list" in sys.argv[1:]:
        for each in found:
            print(f"{each.path.relative_to(ROOT)}:{each.line}: {each.word} ({each.kind})")
    else:
        for (kind, word), count in Counter((each.kind, each.word) for each in found).most_common():
            print(f"{count:6}  {word} ({kind})")
    print(f"{len(found)} banned words", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
