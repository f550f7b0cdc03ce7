"""Finding the files of a source by name or pattern, each once."""

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from glob import escape, glob
from pathlib import Path
from typing import NamedTuple

from phalanx.errors import RecipeError, UsageError
from phalanx.recipe.data_schema import DataConfig, DataSource, EvaluationConfig
from phalanx.recipe.locations import describe_version, name_recipe_key
from phalanx.run.directory import Run
from phalanx.storage.cache import find_objects
from phalanx.storage.hub import download_snapshot, pin_revision
from phalanx.storage.store import ObjectInfo, open_store
from phalanx.storage.url import WILDCARD_REGEX, StoreUrl, fixed_prefix, is_url, parse_url

SOURCE_ORIGINS_KEY = "data.source"
"""Key of environment.json's `origins` with the commits of `hf://` sources by URL."""
_HUB_URL_TEXT = re.compile(r'"hf://(?:[^"\\]|\\.)*"')


class SourceFile(NamedTuple):
    """A source file, or an object by its URL, as it was found; size and version tell whether it changed since."""

    path: str
    size: int
    version: int | str
    """When a file was modified, in ns; the ETag of an object."""


def to_glob_list(globs: str | list[str]) -> list[str]:
    """A glob or a list of them, as a list."""
    return [globs] if isinstance(globs, str) else globs


def find_files(globs: str | list[str], exclude: str | list[str], base_dir: Path) -> list[SourceFile]:
    """The files that match, glob by glob, sorted within each, each file once, by however many links and names it is
    found; RecipeError for a glob that has none.

    Relative globs are relative to `base_dir`; an excluding one that begins with `**/` means any place. A name that
    exists as it stands is no pattern. A glob may be a URL: it matches the objects of a store as it would files.
    """
    if hub := next((each for each in to_glob_list(exclude) if each.startswith("hf://")), None):
        raise RecipeError(f"data.source: exclude: found {hub!r}, expected the names in it, such as **/old/*.jsonl")
    exclusions = [
        (regex, pattern if is_anywhere else _absolute_path(pattern, base_dir))
        for pattern in to_glob_list(exclude)
        for is_anywhere in [pattern.startswith("**/") or is_url(pattern)]
        for regex in [_glob_to_regex(pattern if is_anywhere else _absolute_pattern(pattern, base_dir))]
    ]
    excluded_folders = [
        re.compile(regex.pattern.removesuffix("/.*"), re.DOTALL)
        for regex, _ in exclusions
        if regex.pattern.endswith("/.*")
    ]
    found: dict[object, SourceFile] = {}
    real = cache(os.path.realpath)
    for pattern in to_glob_list(globs):
        if is_url(pattern) and not pattern.startswith("hf://"):
            objects = _find_objects(pattern, exclusions)
            found.update((file.path, file) for file in objects if file.path not in found)
            continue
        pattern = _download_matches(pattern) if is_url(pattern) else pattern
        matching = sorted(_find_matches(pattern, base_dir, excluded_folders))
        not_excluded = [path for path in matching if os.path.isfile(path) and not _is_excluded(path, exclusions)]
        if not not_excluded:
            matching = sorted(_find_matches(pattern, base_dir, []))
            files = [path for path in matching if os.path.isfile(path)]
            if directory := next((path for path in matching if os.path.isdir(path)), None):
                advice = f"{directory} is a folder; name the files in it, such as {directory}/*"
                raise RecipeError(f"data.source: {pattern!r} matches no file: {advice}")
            all_excluded = f" that is not excluded ({len(files)} are)" if files else ""
            raise RecipeError(f"data.source: {pattern!r} matches no file{all_excluded} (in {base_dir.absolute()})")
        for path in not_excluded:
            found.setdefault(_file_identity(path, real), stat_source_file(path))
    return list(found.values())


def _is_excluded(path: str, exclusions: list[tuple[re.Pattern[str], str]]) -> bool:
    return any(path == name or regex.fullmatch(path) for regex, name in exclusions)


def _find_objects(pattern: str, exclusions: list[tuple[re.Pattern[str], str]]) -> list[SourceFile]:
    """The objects that the glob of a URL matches and nothing excludes, sorted."""
    with name_recipe_key("data.source"):
        url = parse_url(pattern)
        is_listable = url.scheme not in ("http", "https")  # servers of files do not list them
        if not is_listable and WILDCARD_REGEX.search(url.key):
            raise UsageError(f"{url}: objects of {url.scheme}:// cannot be listed; name each without wildcards")
        listed = find_objects(replace(url, key=fixed_prefix(url.key))) if url.key else []
    regex = _path_regex(url.key or "**")
    matching = [each for each in listed if each.key == url.key or regex.fullmatch(f"{each.key}/")]
    files = [_describe_object(url, each) for each in matching]
    kept = [file for file in files if not _is_excluded(file.path, exclusions)]
    if not kept:
        all_excluded = f" that is not excluded ({len(files)} are)" if files else ""
        raise RecipeError(
            f"data.source: {pattern!r} matches no object{all_excluded}; name objects, such as "
            f"{replace(url, key=fixed_prefix(url.key))}/**/*.txt"
        )
    return kept


def _describe_object(url: StoreUrl, info: ObjectInfo) -> SourceFile:
    return SourceFile(str(replace(url, key=info.key)), info.size, info.etag or str(info.modified))


def list_source_objects(url: str) -> list[tuple[str, SourceFile]]:
    """The objects below a URL, with their names relative to it."""
    with name_recipe_key("data.source"):
        root = parse_url(url)
        return [(root.relative(each.key), _describe_object(root, each)) for each in find_objects(root)]


def _download_matches(pattern: str) -> str:
    """Download what the glob of an `hf://` URL may match, and return the glob of the copies."""
    with name_recipe_key("data.source"):
        url = parse_url(pattern)
        if not WILDCARD_REGEX.search(url.key):
            return str(download_snapshot(url))
        prefix = fixed_prefix(url.key)
        rest = url.key.removeprefix(prefix).lstrip("/")
        root = download_snapshot(replace(url, key=prefix), [rest, rest.replace("**/", "")])
    return f"{escape(str(root))}/{rest}"


def pin_sources(
    data: DataConfig, evaluation: EvaluationConfig, run: Run
) -> tuple[DataConfig, EvaluationConfig, dict[str, str]]:
    """Both with each `hf://` URL of a source at the commit that the run has recorded, else at that which its revision
    means now: all nodes, and a resume, read the same. Downloads what they match. Also the commits by URL."""
    commits = dict(run.read_json_or_empty(run.environment).get("origins", {}).get(SOURCE_ORIGINS_KEY, {}))

    def pin_url(match: re.Match[str]) -> str:
        url = json.loads(match[0])
        if url not in commits:
            commits[url] = describe_version(Path(_download_matches(url)))
        return json.dumps(str(pin_revision(parse_url(url), commits[url])))

    def pin(source: DataSource | None) -> DataSource | None:
        if source is None or source.prepared is not None:  # what is prepared is pinned when it is opened
            return source
        return DataSource.model_validate_json(_HUB_URL_TEXT.sub(pin_url, source.model_dump_json()))

    data = data.model_copy(update={"source": [pin(source) for source in data.sources]})
    return data, evaluation.model_copy(update={"source": pin(evaluation.source)}), commits


def localize_source(base_dir: Path, name: str) -> str:
    """The path of a file or directory of a source; a URL as it is, one of a hub its local copy."""
    return _download_matches(name) if name.startswith("hf://") else join_location(base_dir, name)


def join_location(base_dir: Path, name: str) -> str:
    """The path of a name relative to `base_dir`; a URL as it is."""
    return name if is_url(name) else str(base_dir / name)


def stat_source_file(path: str | Path) -> SourceFile:
    """Size and version of a file or object; RecipeError when it is not there, or a pipe, a device or a directory."""
    if is_url(path):
        with name_recipe_key("data.source"):
            url = parse_url(str(path))
            return _describe_object(url, open_store(url).head(url.key))
    try:
        stat_result = os.stat(path)
    except OSError as error:
        raise RecipeError(f"data.source: {path}: {error.strerror}") from None
    if not stat.S_ISREG(stat_result.st_mode):
        raise RecipeError(f"data.source: {path}: not a regular file")
    return SourceFile(str(path), stat_result.st_size, stat_result.st_mtime_ns)


def _file_identity(path: str, real: Callable[[str], str]) -> object:
    """What is the same for all names of a file: of one with several hard links its number, else its real path."""
    stat_result = os.stat(path)
    if stat_result.st_nlink > 1:
        return stat_result.st_dev, stat_result.st_ino
    if os.path.islink(path):
        return os.path.realpath(path)
    return os.path.join(real(os.path.dirname(path)), os.path.basename(path))


def _absolute_path(pattern: str, base_dir: Path) -> str:
    return os.path.normpath(os.path.join(base_dir.absolute(), os.path.expanduser(pattern)))


def _absolute_pattern(pattern: str, base_dir: Path) -> str:
    """The same as a pattern, in which the folder's own name has no meaning beyond itself."""
    escaped = re.sub(r"([*?\[])", r"[\1]", str(base_dir.absolute()))
    return os.path.normpath(os.path.join(escaped, os.path.expanduser(pattern)))


def _find_matches(pattern: str, base_dir: Path, excluded_folders: list[re.Pattern[str]]) -> list[str]:
    """Return the paths that a pattern matches as Python's `glob` does. Links among directories lead to each of them
    about once, where `glob` would follow them without end. `**` does not enter excluded directories."""
    exact = _absolute_path(pattern, base_dir)
    if os.path.lexists(exact):
        return [exact]
    head, recursive, rest = _absolute_pattern(pattern, base_dir).partition("/**")
    if not recursive or (rest and rest[0] != "/"):
        return glob(head + recursive + rest)
    regex = _path_regex(f"**{rest}")
    with_hidden = any(step.startswith(".") for step in rest.split("/"))
    return [
        path
        for directory in glob(head or "/")
        for path in walk_files(directory, with_hidden, excluded_folders)
        if regex.fullmatch(f"{path.removeprefix(directory).lstrip('/')}/")
    ]


def _path_regex(pattern: str) -> re.Pattern[str]:
    """A glob as a regular expression for paths with a slash behind them; hidden files as `glob` treats them."""
    steps = [step for step in pattern.split("/") if step]
    if steps[-1] == "**":
        steps.append("*")
    return re.compile("".join(map(_step_to_regex, steps)), re.DOTALL)


def _step_to_regex(step: str) -> str:
    """One step of a path, with the slash behind it; `**` is any number of them. No wildcard matches a leading dot."""
    if step == "**":
        return r"(?:(?!\.)[^/]+/)*"
    hidden = "" if step.startswith(".") else r"(?!\.)"
    return f"{hidden}{_glob_to_regex(step).pattern}/"


def walk_files(
    directory: str | Path, with_hidden: bool = True, excluded_folders: Sequence[re.Pattern[str]] = ()
) -> Iterator[str]:
    """Yield what lies below a directory and is none, through links as well, but not in directories above or excluded
    ones."""
    visited = {str(parent) for parent in Path(os.path.realpath(directory)).parents}
    for folder, folders, names in os.walk(directory, followlinks=True):
        visited.add(os.path.realpath(folder))
        folders[:] = [
            name
            for name in folders
            if (with_hidden or name[0] != ".")
            and not any(regex.fullmatch(os.path.join(folder, name)) for regex in excluded_folders)
            and os.path.realpath(os.path.join(folder, name)) not in visited
        ]
        yield from (os.path.join(folder, name) for name in names)


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
