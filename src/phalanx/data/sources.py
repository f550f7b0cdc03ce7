"""Finding the files of a source, and reading documents from them in pieces of bounded size.

Text, .gz, .xz, JSON lines and Parquet; images are in `images.py`. Nothing here tokenises or writes. Whatever is read
comes as `Chunk`s of at most about a mebibyte (a JSON line or a Parquet cell is the exception: it comes whole).
"""

import glob
import gzip
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from phalanx.errors import DataError, RecipeError, UsageError

CHUNK = 1 << 20
_PACKED = (".gz", ".xz")


class File(NamedTuple):
    """A source file as it was found; size and time tell whether it changed since."""

    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Part:
    """A part of a source file: bytes start .. stop - 1, or those row groups of a Parquet file.

    Byte ranges are nominal: whoever reads one takes the lines that begin in it, so parts that meet share no line.
    """

    path: str
    start: int
    stop: int
    weight: int  # bytes on disk, for balance and progress
    last: bool = True  # whether the file ends with this part
    label: int = 0  # class of an image


class Chunk(NamedTuple):
    """Some bytes of a document, whether it begins and ends with them, and the bytes on disk read since the last."""

    data: bytes
    begins: bool
    ends: bool
    consumed: int


def as_list(globs: str | list[str]) -> list[str]:
    """A glob or a list of them, as a list."""
    return [globs] if isinstance(globs, str) else globs


def find_files(globs: str | list[str], exclude: str | list[str], folder: Path) -> list[File]:
    """The files that match, glob by glob, sorted within each, each file once; RecipeError for a glob that has none.

    Relative globs are relative to `folder`; an excluding one that begins with `**/` means any place.
    """
    unwanted = [
        _translate(pattern if pattern.startswith("**/") else _absolute(pattern, folder)) for pattern in as_list(exclude)
    ]
    found: dict[str, None] = {}
    for pattern in as_list(globs):
        matches = sorted(glob.iglob(_absolute(pattern, folder), recursive=True, include_hidden=False))
        files = [path for path in matches if os.path.isfile(path)]
        kept = [path for path in files if not any(regex.fullmatch(path) for regex in unwanted)]
        if not kept:
            all_excluded = f" that is not excluded ({len(files)} are)" if files else ""
            raise RecipeError(f"data.source: {pattern!r} matches no file{all_excluded} (looked in {folder.absolute()})")
        found.update(dict.fromkeys(kept))
    return [stat_file(path) for path in found]


def stat_file(path: str | Path) -> File:
    """A file's size and time; RecipeError when it is not there."""
    try:
        stat = os.stat(path)
    except OSError as error:
        raise RecipeError(f"data.source: {path}: {error.strerror}") from None
    return File(str(path), stat.st_size, stat.st_mtime_ns)


def _absolute(pattern: str, folder: Path) -> str:
    return os.path.normpath(os.path.join(glob.escape(str(folder.absolute())), os.path.expanduser(pattern)))


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


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn what can go wrong while reading a source file into a DataError that names it."""
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be read to its end ({getattr(error, 'strerror', None) or error})") from None


def split_file(file: File, size: int) -> list[Part]:
    """A file's parts of about `size` bytes. Packed files stay whole: they can only be read from their beginning."""
    count = 1 if file.path.endswith(_PACKED) else max(round(file.size / size), 1)
    edges = [file.size * number // count for number in range(count + 1)]
    return [Part(file.path, start, stop, stop - start, last=stop == file.size) for start, stop in pairwise(edges)]


def split_parquet(file: File) -> list[Part]:
    """A Parquet file's row groups."""
    with reading(file.path), open(file.path, "rb") as raw:
        groups = _open_parquet(raw, file.path).metadata.num_row_groups
    # Weights as if all row groups were alike: they need only be fair enough to balance the work.
    return [Part(file.path, group, group + 1, file.size // groups) for group in range(groups)]


def documents(part: Part, kind: str, field: str) -> Iterator[Chunk]:
    """The documents that begin in a part of a `text`, `jsonl` or `parquet` source (text: what lies in the part)."""
    with reading(part.path), open(part.path, "rb") as raw:
        if kind == "parquet":
            yield from _parquet(raw, part, field)
            return
        if part.path.endswith(_PACKED):
            stream, stop = _unpack(raw, part.path), None
        else:
            limit = CHUNK if kind == "text" else None
            stop = _line_start(raw, part.stop, limit)
            raw.seek(_line_start(raw, part.start, limit))
            stream = raw
        yield from _text(raw, stream, stop, part) if kind == "text" else _jsonl(raw, stream, stop, part.path, field)


def _unpack(raw: BinaryIO, path: str) -> BinaryIO:
    stream: Any = gzip.open(raw) if path.endswith(".gz") else lzma.open(raw)  # noqa: SIM115 - `raw` is what is closed
    return stream  # type: ignore[no-any-return]


def _line_start(file: BinaryIO, offset: int, limit: int | None) -> int:
    """Where the first line begins at or behind `offset`; after `limit` bytes without one, the next character."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    scanned = 0
    while block := file.read(CHUNK if limit is None else limit - scanned):
        if (at := block.find(b"\n")) >= 0:
            return offset - 1 + scanned + at + 1
        scanned += len(block)
        if scanned == limit:
            file.seek(offset)
            return offset + next((i for i, byte in enumerate(file.read(4)) if byte & 0xC0 != 0x80), 0)
    return offset - 1 + scanned


def _text(raw: BinaryIO, stream: BinaryIO, stop: int | None, part: Part) -> Iterator[Chunk]:
    """A whole text file, or a part of a plain one, is one document; it is cut behind lines where it can be."""
    pending, begins, counted = b"", part.start == 0, raw.tell()
    while True:
        wanted = CHUNK - len(pending)
        if stop is not None:
            wanted = min(wanted, stop - raw.tell())
        data = stream.read(wanted)
        buffer = pending + data
        if len(buffer) < CHUNK:  # the end, as far as this part goes
            yield Chunk(buffer, begins, part.last, raw.tell() - counted)
            return
        cut = buffer.rfind(b"\n") + 1 or _character_start(buffer)
        yield Chunk(buffer[:cut], begins, False, raw.tell() - counted)
        pending, begins, counted = buffer[cut:], False, raw.tell()


def _character_start(buffer: bytes) -> int:
    """The length of `buffer` without a UTF-8 character that its end cuts in two."""
    for back in range(1, 4):
        byte = buffer[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(buffer) if back >= needed else len(buffer) - back
        if byte < 0x80:
            break
    return len(buffer)


def _jsonl(raw: BinaryIO, stream: BinaryIO, stop: int | None, path: str, field: str) -> Iterator[Chunk]:
    counted, offset = raw.tell(), stream.tell()
    while stop is None or offset < stop:
        line = stream.readline()
        if not line:
            return
        where = f"{path}, the line at byte {offset}"
        offset += len(line)
        try:
            record = json.loads(line) if not line.isspace() else {field: None}
        except ValueError as error:
            raise DataError(f"{where}: not JSON ({error})") from None
        text = _field(record, field, where)
        yield Chunk(text, True, True, raw.tell() - counted)
        counted = raw.tell()


def _field(record: Any, field: str, where: str) -> bytes:
    """A record's text; null is an empty document."""
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(record).__name__}")
    if field not in record:
        raise RecipeError(f"{where}: no field {field!r}; it has {_names(record)}. Name it in data.source.field")
    return _encode(record[field], field, where)


def _encode(text: Any, field: str, where: str) -> bytes:
    if text is None:
        return b""
    if not isinstance(text, str):
        raise DataError(f"{where}: {field!r} should be text, found {type(text).__name__}")
    return text.encode(errors="replace")


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _open_parquet(raw: BinaryIO, path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError("Parquet sources need the `pyarrow` package: pip install 'phalanx[pyarrow]'") from None
    try:
        return pyarrow.parquet.ParquetFile(raw, pre_buffer=False, buffer_size=CHUNK)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file ({error})") from None


def _parquet(raw: BinaryIO, part: Part, field: str) -> Iterator[Chunk]:
    table = _open_parquet(raw, part.path)
    names = table.schema_arrow.names
    if field not in names:
        raise RecipeError(f"{part.path}: no column {field!r}; it has {_names(names)}. Name it in data.source.field")
    for group in range(part.start, part.stop):
        rows = max(table.metadata.row_group(group).num_rows, 1)
        where = f"{part.path}, row group {group}"
        for batch in table.iter_batches(batch_size=256, row_groups=[group], columns=[field]):
            for value in batch.column(0):
                yield Chunk(_encode(value.as_py(), field, where), True, True, 0)
            yield Chunk(b"", False, False, part.weight * batch.num_rows // rows)
