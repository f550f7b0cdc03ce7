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


class SourceFile(NamedTuple):
    """A source file as it was found; size and time tell whether it changed since."""

    path: str
    size: int
    mtime_ns: int


def to_glob_list(globs: str | list[str]) -> list[str]:
    """A glob or a list of them, as a list."""
    return [globs] if isinstance(globs, str) else globs


def find_files(globs: str | list[str], exclude: str | list[str], base_dir: Path) -> list[SourceFile]:
    """The files that match, glob by glob, sorted within each, each file once, by however many links and names it is
    found; RecipeError for a glob that has none.

    Relative globs are relative to `base_dir`; an excluding one that begins with `**/` means any place. A name that
    exists as it stands is no pattern.
    """
    exclusions = [
        (regex, _absolute_path(pattern, base_dir))
        for pattern in to_glob_list(exclude)
        for regex in [_glob_to_regex(pattern if pattern.startswith("**/") else _absolute_pattern(pattern, base_dir))]
    ]
    found: dict[object, SourceFile] = {}
    real = cache(os.path.realpath)
    for pattern in to_glob_list(globs):
        matching = sorted(_iterate_matches(_absolute_path(pattern, base_dir), base_dir))
        files = [path for path in matching if os.path.isfile(path)]
        not_excluded = [
            path for path in files if not any(path == name or regex.fullmatch(path) for regex, name in exclusions)
        ]
        if not not_excluded:
            others = [path for path in matching if os.path.lexists(path)]
            if others and not files:
                raise RecipeError(f"data.source: {pattern!r} matches no file: {others[0]} {_no_file(others[0])}")
            all_excluded = f" that is not excluded ({len(files)} are)" if files else ""
            raise RecipeError(
                f"data.source: {pattern!r} matches no file{all_excluded} (looked in {base_dir.absolute()})"
            )
        for path in not_excluded:
            found.setdefault(_file_identity(path, real), stat_source_file(path))
    return list(found.values())


def stat_source_file(path: str | Path) -> SourceFile:
    """A file's size and time; RecipeError when it is not there, or is a pipe, a device or a folder."""
    try:
        stat_result = os.stat(path)
    except OSError as error:
        raise RecipeError(f"data.source: {path}: {error.strerror}") from None
    if not stat.S_ISREG(stat_result.st_mode):
        raise RecipeError(f"data.source: {path}: not a regular file")
    return SourceFile(str(path), stat_result.st_size, stat_result.st_mtime_ns)


def _no_file(path: str) -> str:
    """What something is that is no file."""
    if os.path.isdir(path):
        return f"is a folder; name the files in it, such as {path}/*"
    if os.path.islink(path) and not os.path.exists(path):
        return f"is a link to {os.path.realpath(path)}, which is not there"
    return "is a pipe, a socket or a device, which cannot be read twice; write it to a file"


def _file_identity(path: str, real: Callable[[str], str]) -> object:
    """What is the same for all names of a file: of one with several hard links its number, else its real path."""
    stat_result = os.stat(path)
    if stat_result.st_nlink > 1:
        return stat_result.st_dev, stat_result.st_ino
    return (
        os.path.realpath(path)
        if os.path.islink(path)
        else os.path.join(real(os.path.dirname(path)), os.path.basename(path))
    )


def _absolute_path(pattern: str, base_dir: Path) -> str:
    return os.path.normpath(os.path.join(base_dir.absolute(), os.path.expanduser(pattern)))


def _absolute_pattern(pattern: str, base_dir: Path) -> str:
    """The same as a pattern, in which the folder's own name has no meaning beyond itself."""
    escaped = re.sub(r"([*?\[])", r"[\1]", str(base_dir.absolute()))
    return os.path.normpath(os.path.join(escaped, os.path.expanduser(pattern)))


def _iterate_matches(path: str, folder: Path) -> Iterator[str]:
    """Paths that match an absolute pattern, each at least once. What lies above `base_dir` is no pattern."""
    base_path = str(folder.absolute())
    is_below = path.startswith(f"{base_path}/")
    parts = path.removeprefix(base_path if is_below else "/").strip("/").split("/")
    steps = [part for part, before in zip(parts, ["", *parts], strict=False) if not part == before == "**"]
    yield from _iterate_below(base_path if is_below else "/", steps, set())


def _iterate_below(directory: str, steps: list[str], visited: set[tuple[int, str]]) -> Iterator[str]:
    """Paths below the folder `directory` that match. `visited`: folders that each `**` has been in: links lead it to
    each once, and none leads upwards."""
    step, *rest = steps
    if step == "**":
        yield from _iterate_below(directory, rest, visited) if rest else _iterate_files(directory)
        links = []
        for name, is_link in _list_dirs(directory):
            child = os.path.join(directory, name)
            if is_link:
                links.append(child)
            else:
                yield from _iterate_below(child, steps, visited)
        real_directory = f"{os.path.realpath(directory)}/" if links else ""
        for child in links:
            real = os.path.realpath(child)
            if (len(steps), real) not in visited and not real_directory.startswith(f"{real.rstrip('/')}/"):
                visited.add((len(steps), real))
                yield from _iterate_below(child, steps, visited)
        return
    exact = os.path.join(directory, step)
    names = [exact]
    if re.search(r"[*?\[]", step):
        names = [os.path.join(directory, name) for name in _list_names(directory) if _matches_name(name, step)]
        names = [exact] if os.path.lexists(exact) and exact not in names else names
    for name in names:
        if not rest:
            yield name
        elif os.path.isdir(name):
            yield from _iterate_below(name, rest, visited)


def _matches_name(name: str, pattern: str) -> bool:
    """Whether a name matches; a hidden one only a pattern that begins with a dot."""
    return fnmatchcase(name, pattern) and (pattern.startswith(".") or not name.startswith("."))


def _list_names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:  # no folder, or one that may not be read
        return []


def _iterate_files(directory: str) -> Iterator[str]:
    yield from (os.path.join(directory, name) for name in _list_names(directory) if not name.startswith("."))


def _list_dirs(directory: str) -> list[tuple[str, bool]]:
    """Folders that are not hidden, and whether each is a link."""
    try:
        with os.scandir(directory) as entries:
            return [(entry.name, entry.is_symlink()) for entry in entries if entry.name[0] != "." and entry.is_dir()]
    except OSError:
        return []


def _glob_to_regex(pattern: str) -> re.Pattern[str]:
    """A glob as a regular expression: `**/` is any folders or none, `*` and `?` stay within a name."""
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    tokens = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)

    def expression(token: str) -> str:
        if token.startswith("[") and token.endswith("]"):
            inside = token[1:-1].replace("\\", r"\\").replace("[", r"\[")
            return f"[^{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"
        return words.get(token) or re.escape(token)

    return re.compile("".join(map(expression, tokens)), re.DOTALL)
