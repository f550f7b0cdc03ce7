"""Finding the files of a source by name or pattern, each once."""

import os
import re
import stat
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

from phalanx.errors import RecipeError


class File(NamedTuple):
    """A source file as it was found; size and time tell whether it changed since."""

    path: str
    size: int
    mtime_ns: int


def as_list(globs: str | list[str]) -> list[str]:
    """A glob or a list of them, as a list."""
    return [globs] if isinstance(globs, str) else globs


def find_files(globs: str | list[str], exclude: str | list[str], folder: Path) -> list[File]:
    """The files that match, glob by glob, sorted within each, each file once, by however many links and names it is
    found; RecipeError for a glob that has none.

    Relative globs are relative to `folder`; an excluding one that begins with `**/` means any place. A name that
    exists as it stands is no pattern.
    """
    unwanted = [
        (regex, _absolute(pattern, folder))
        for pattern in as_list(exclude)
        for regex in [_translate(pattern if pattern.startswith("**/") else _pattern(pattern, folder))]
    ]
    found: dict[object, File] = {}
    real = cache(os.path.realpath)
    for pattern in as_list(globs):
        matching = sorted(_matching(_absolute(pattern, folder), folder))
        files = [path for path in matching if os.path.isfile(path)]
        kept = [path for path in files if not any(path == name or regex.fullmatch(path) for regex, name in unwanted)]
        if not kept:
            others = [path for path in matching if os.path.lexists(path)]
            if others and not files:
                raise RecipeError(f"data.source: {pattern!r} matches no file: {others[0]} {_no_file(others[0])}")
            all_excluded = f" that is not excluded ({len(files)} are)" if files else ""
            raise RecipeError(f"data.source: {pattern!r} matches no file{all_excluded} (looked in {folder.absolute()})")
        for path in kept:
            found.setdefault(_identity(path, real), stat_file(path))
    return list(found.values())


def stat_file(path: str | Path) -> File:
    """A file's size and time; RecipeError when it is not there, or is a pipe, a device or a folder."""
    try:
        about = os.stat(path)
    except OSError as error:
        raise RecipeError(f"data.source: {path}: {error.strerror}") from None
    if not stat.S_ISREG(about.st_mode):
        raise RecipeError(f"data.source: {path}: not a regular file")
    return File(str(path), about.st_size, about.st_mtime_ns)


def _no_file(path: str) -> str:
    """What something is that is no file."""
    if os.path.isdir(path):
        return f"is a folder; name the files in it, such as {path}/*"
    if os.path.islink(path) and not os.path.exists(path):
        return f"is a link to {os.path.realpath(path)}, which is not there"
    return "is a pipe, a socket or a device, which cannot be read twice; write it to a file"


def _identity(path: str, real: Callable[[str], str]) -> object:
    """What is the same for all names of a file: of one with several hard links its number, else its real path."""
    about = os.stat(path)
    if about.st_nlink > 1:
        return about.st_dev, about.st_ino
    return (
        os.path.realpath(path)
        if os.path.islink(path)
        else os.path.join(real(os.path.dirname(path)), os.path.basename(path))
    )


def _absolute(pattern: str, folder: Path) -> str:
    return os.path.normpath(os.path.join(folder.absolute(), os.path.expanduser(pattern)))


def _pattern(pattern: str, folder: Path) -> str:
    """The same as a pattern, in which the folder's own name has no meaning beyond itself."""
    escaped = re.sub(r"([*?\[])", r"[\1]", str(folder.absolute()))
    return os.path.normpath(os.path.join(escaped, os.path.expanduser(pattern)))


def _matching(path: str, folder: Path) -> Iterator[str]:
    """Paths that match an absolute pattern, each at least once. What lies above `folder` is no pattern."""
    home = str(folder.absolute())
    below = path.startswith(f"{home}/")
    parts = path.removeprefix(home if below else "/").strip("/").split("/")
    steps = [part for part, before in zip(parts, ["", *parts], strict=False) if not part == before == "**"]
    yield from _descend(home if below else "/", steps, set())


def _descend(place: str, steps: list[str], entered: set[tuple[int, str]]) -> Iterator[str]:
    """Paths below the folder `place` that match. `entered`: folders that each `**` has been in: links lead it to each
    once, and none leads upwards."""
    step, *rest = steps
    if step == "**":
        yield from _descend(place, rest, entered) if rest else _files_in(place)
        links = []
        for name, is_link in _folders_in(place):
            inner = os.path.join(place, name)
            if is_link:
                links.append(inner)
            else:
                yield from _descend(inner, steps, entered)
        here = f"{os.path.realpath(place)}/" if links else ""
        for inner in links:
            real = os.path.realpath(inner)
            if (len(steps), real) not in entered and not here.startswith(f"{real.rstrip('/')}/"):
                entered.add((len(steps), real))
                yield from _descend(inner, steps, entered)
        return
    exact = os.path.join(place, step)
    names = [exact]
    if re.search(r"[*?\[]", step):
        names = [os.path.join(place, name) for name in _names_in(place) if _fits(name, step)]
        names = [exact] if os.path.lexists(exact) and exact not in names else names
    for name in names:
        if not rest:
            yield name
        elif os.path.isdir(name):
            yield from _descend(name, rest, entered)


def _fits(name: str, pattern: str) -> bool:
    """Whether a name matches; a hidden one only a pattern that begins with a dot."""
    return fnmatchcase(name, pattern) and (pattern.startswith(".") or not name.startswith("."))


def _names_in(place: str) -> list[str]:
    try:
        return os.listdir(place)
    except OSError:  # no folder, or one that may not be read
        return []


def _files_in(place: str) -> Iterator[str]:
    yield from (os.path.join(place, name) for name in _names_in(place) if not name.startswith("."))


def _folders_in(place: str) -> list[tuple[str, bool]]:
    """Folders that are not hidden, and whether each is a link."""
    try:
        with os.scandir(place) as entries:
            return [(entry.name, entry.is_symlink()) for entry in entries if entry.name[0] != "." and entry.is_dir()]
    except OSError:
        return []


def _translate(pattern: str) -> re.Pattern[str]:
    """A glob as a regular expression: `**/` is any folders or none, `*` and `?` stay within a name."""
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    tokens = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)

    def expression(token: str) -> str:
        if token.startswith("[") and token.endswith("]"):
            inside = token[1:-1].replace("\\", r"\\").replace("[", r"\[")
            return f"[^{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"
        return words.get(token) or re.escape(token)

    return re.compile("".join(map(expression, tokens)), re.DOTALL)
