"""Rows of a source: the text of one by `text_field`, which is a field's name, or the way to a nested one, as in
`choices[0].text`; and rows that cannot be read (`data.on_bad_row`): the first is an error, or they are skipped and
counted.
"""

import base64
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from phalanx.data.file_format import open_unpacked
from phalanx.errors import DataError, PhalanxError, RecipeError
from phalanx.formatting import format_plural
from phalanx.run.directory import write_json
from phalanx.safe_files import read_json
from phalanx.storage.store import open_location

SKIPPED_FILE = "skipped.json"
"""What was skipped, in a dataset directory. Its fingerprint does not depend on it: it names the source's files."""
MAX_SKIPPED_PLACES = 3
_COUNTED_BYTES = 1 << 20

RowPlace = tuple[str, int | str]
"""A file, and a row of it: the byte at which a line begins, or the row in words; nothing where it is the whole file."""


class BadRowError(Exception):
    """A row that cannot be read: what kind of fault it is, what is wrong, and the error where it is not skipped."""

    def __init__(self, kind: str, reason: str, error: type[PhalanxError] = DataError):
        super().__init__(reason)
        self.kind, self.error = kind, error


SkippedRows = dict[str, tuple[int, list[RowPlace]]]
"""How many rows have each kind of fault, and the first of them. It may be written as JSON."""


class BadRows:
    """What to do with rows that cannot be read. `skipped`: what was left out, by kind."""

    def __init__(self, is_skipping: bool = False):
        self._is_skipping = is_skipping
        self.skipped: SkippedRows = {}

    def add(self, error: BadRowError, path: str, place: int | str) -> None:
        """Count a row, or raise the error that names it."""
        if not self._is_skipping:
            raise error.error(f"{describe_place((path, place))}: {error} (data.on_bad_row: skip leaves such rows out)")
        self.merge({error.kind: (1, [(path, place)])})

    def merge(self, skipped: SkippedRows) -> None:
        """Count what was skipped behind all that is counted already."""
        for kind, (count, places) in skipped.items():
            before, first = self.skipped.get(kind, (0, []))
            self.skipped[kind] = before + count, [*first, *places][:MAX_SKIPPED_PLACES]


RAISE_AT_BAD_ROW = BadRows()


def describe_place(place: RowPlace) -> str:
    """A row's file, and line or name."""
    path, row = place
    row = f"line {_count_lines(path, row) + 1}" if isinstance(row, int) else row
    return f"{path}, {row}" if row else path


def _count_lines(path: str, size: int) -> int:
    """How many lines end in the first bytes of a file, unpacked."""
    with open_location(path) as raw:
        (stream, _), lines = open_unpacked(raw, path), 0
        while size and (block := stream.read(min(size, _COUNTED_BYTES))):
            lines, size = lines + block.count(b"\n"), size - len(block)
    return lines


def describe_skipped(skipped: SkippedRows) -> str:
    """The skipped rows of a source by kind, the first of each with their places."""
    kinds = (
        f"{count} {kind} ({'; '.join(map(describe_place, places))}{'; ...' if count > len(places) else ''})"
        for kind, (count, places) in sorted(skipped.items())
    )
    return f"skipped {format_plural(sum(count for count, _ in skipped.values()), 'row')}: {', '.join(kinds)}"


def write_skipped(folder: Path, skipped: SkippedRows) -> None:
    """Write down what was skipped for a dataset."""
    kinds = {}
    for kind, (count, places) in sorted(skipped.items()):
        kinds[kind] = {"count": count, "first": [*map(describe_place, places)]}
    write_json(folder / SKIPPED_FILE, {"num_rows": sum(count for count, _ in skipped.values()), "kinds": kinds})


def count_skipped(folder: Path) -> int:
    """How many rows of its source a dataset has not."""
    try:
        num_rows = read_json(folder / SKIPPED_FILE)["num_rows"]
    except FileNotFoundError:
        return 0
    return num_rows if isinstance(num_rows, int) else 0


WHOLE_RECORD = ""
"""The `text_field` of conversations: the record as JSON."""
_FIELD_STEP = re.compile(r"\[(\d+)\]|\.?([^.\[]+)")


def split_field(field: str) -> list[str | int]:
    """The names and numbers that lead to a nested field."""
    return [name or int(number) for number, name in _FIELD_STEP.findall(field)]


def find_column(field: str, columns: Sequence[str], path: str) -> str:
    """The column of a table that holds a field; one of the whole name goes before a nested field."""
    column = field if field in columns else str((split_field(field) or [field])[0])
    if column not in columns:
        raise RecipeError(
            f"{path}: no column {column!r}; it has {format_names(columns)}. Name it in data.source.text_field"
        )
    return column


def parse_json(data: bytes) -> Any:
    """What a text of JSON says. Raises BadRowError for what is none."""
    try:
        return json.loads(data)
    except UnicodeDecodeError as error:
        raise BadRowError("not UTF-8", f"text that is not UTF-8 ({error.reason} at byte {error.start})") from None
    except ValueError as error:
        raise BadRowError("not JSON", f"not JSON ({error})") from None
    except RecursionError:
        raise BadRowError("not JSON", "not JSON that can be read: it is nested too deeply") from None


def encode_field(record: Any, field: str) -> bytes:
    """The text of a record in UTF-8. A list of texts is joined by newlines. Raises BadRowError where there is none."""
    if not isinstance(record, dict):
        cure = "; of one array, jq -c '.[]' makes lines" if isinstance(record, list) else ""
        raise BadRowError("without a JSON object", f"expected a JSON object, found {type(record).__name__}{cure}")
    if field == WHOLE_RECORD:
        return json.dumps(record, ensure_ascii=False, default=_to_text).encode(errors="surrogatepass")
    value: Any = record
    for step in [field] if field in record else split_field(field):
        try:
            if isinstance(value, str):
                raise TypeError
            value = value[step]
        except (KeyError, IndexError, TypeError):
            names = format_names(value) if isinstance(value, dict) else type(value).__name__
            why = f"no field {field!r}; it has {names}. Name it in data.source.text_field"
            raise BadRowError("without the field", why, RecipeError) from None
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        value = "\n".join(value)
    if not isinstance(value, str):
        what = "null" if value is None else type(value).__name__
        raise BadRowError("without text", f"{field!r} should be text, found {what}")
    return value.encode(errors="surrogatepass")  # halves of pairs are no UTF-8, which is counted


def _to_text(value: Any) -> str:
    """A value of a table that JSON does not have: bytes as a data URL, others as Python shows them."""
    return f"data:;base64,{base64.b64encode(value).decode()}" if isinstance(value, bytes) else str(value)


def format_names(names: Iterable[str]) -> str:
    """Names as a list for an error."""
    return ", ".join(map(repr, names)) or "none"
