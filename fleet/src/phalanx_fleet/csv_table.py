"""Read a CSV file with a header, row by row. What the columns mean is up to the readers."""

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from phalanx.errors import DataError, UsageError
from phalanx.formatting import format_plural
from phalanx.recipe.validation_errors import suggest_nearest

MAX_TIME_S = 1e11
"""The year 5138; milliseconds of today are more."""


@dataclass(frozen=True)
class CsvTable:
    """Columns of a CSV file in their order, and its rows: line, and a value for each column."""

    path: Path
    columns: list[str]
    rows: Iterator[tuple[int, list[str]]]

    def describe_columns(self) -> str:
        """Return the names of the columns for an error."""
        return ", ".join(self.columns) or "an empty file"

    def iterate(self, names: Mapping[str, str]) -> Iterator[tuple[int, dict[str, str]]]:
        """Iterate over line and values of rows. `names`: columns by the names that the values get; those that the file
        does not have are left out."""
        places = {name: self.columns.index(column) for name, column in names.items() if column in self.columns}
        for line, row in self.rows:
            yield line, {name: row[place] for name, place in places.items()}


@contextmanager
def open_csv(path: Path) -> Iterator[CsvTable]:
    """Open a CSV file, with or without a byte order mark.

    Raises UsageError for a file that is not there, DataError with the line for columns of the same name, another
    separator, rows that are shorter or longer than the header, and what is no CSV text.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            columns = [name.strip() for name in next(reader, [])]
            if len(columns) == 1 and (found := [each for each in (";", "\t") if each in columns[0]]):
                raise DataError(f"{path}: columns are divided by {found[0]!r}; expected commas, and points in numbers")
            if twice := [name for name in columns if name and columns.count(name) > 1]:
                raise DataError(f"{path}: has the column {twice[0]} twice; remove one")
            rows = ((reader.line_num, row) for row in reader if row)
            yield CsvTable(path, columns, _check_widths(path, rows, len(columns)))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte 0x{error.object[error.start]:02x}); save it as UTF-8") from None
    except csv.Error as error:
        raise DataError(f"{path}: cannot be read as CSV: {error}") from None


def check_names(option: str, columns: Iterable[str], known: Sequence[str]) -> None:
    """Raise UsageError for a name of a column that no reader asks for."""
    for name in columns:
        if name not in known:
            near = suggest_nearest(name, known)
            raise UsageError(f"{option} {name}: no such value; expected one of {', '.join(known)}{near}")


def read_number(path: Path, line: int, name: str, text: str | None, limits: tuple[float, float]) -> float:
    """Return a value of a row; NaN where it is missing. DataError for what is no number, or outside the limits."""
    if text is None or not text.strip():
        return math.nan
    low, high = limits
    try:
        value = float(text)
    except ValueError:
        value = math.inf
    if not (low <= value <= high or math.isnan(value)):
        raise DataError(f"{path}:{line}: {name} {text!r}: expected a number from {low:g} to {high:g}")
    return value


def parse_time(text: str) -> float:
    """Return seconds of a number of seconds, or of an ISO 8601 time; without a zone it is UTC. ValueError else."""
    text = text.strip()
    try:
        value = float(text)
    except ValueError:
        found = datetime.fromisoformat(text)
        value = (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _check_widths(path: Path, rows: Iterable[tuple[int, list[str]]], width: int) -> Iterator[tuple[int, list[str]]]:
    for line, row in rows:
        values = row
        if len(row) > width and not any(map(str.strip, row[width:])):
            values = row[:width]  # a comma at the end
        if len(values) != width:
            hint = "; numbers have points, not commas" if len(values) > width else ""
            number = format_plural(len(values), "value")
            raise DataError(f"{path}:{line}: {number}, expected {width} as in the header{hint}")
        yield line, values
