"""Tables of text: columns without lines around them. They fit a terminal, and are as wide as they need elsewhere."""

import io
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_UNLIMITED_WIDTH = 100_000
_MIN_LAST_WIDTH = 24


@dataclass(frozen=True)
class Column:
    """A column of a table. Numbers are aligned to the right. `min_width` aligns rows that are printed one by one."""

    title: str = ""
    is_number: bool = False
    min_width: int = 0


def format_table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str]],
    *,
    indent: int = 0,
    show_header: bool = True,
    width: int | None = None,
) -> list[str]:
    """Format rows as lines. Only the last column is broken into several lines, and only where a width is given or
    standard output is a terminal, so that a program that reads the lines finds whole paths.

    Args:
        columns: One for each cell of a row; without any title there is no header.
        rows: Cells as text, in which a line break becomes a space. A row may be shorter than the columns.
        indent: Spaces before each line.
        show_header: False for rows below a header that was printed before.
        width: Characters a line.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        show_header=show_header and any(column.title for column in columns),
    )
    for index, column in enumerate(columns):
        table.add_column(
            Text(column.title),
            justify="right" if column.is_number else "left",
            min_width=max(column.min_width, len(column.title)),
            no_wrap=index < len(columns) - 1,
            overflow="fold",
        )
    cells = [[Text(cell.replace("\n", " ")) for cell in row] for row in rows]
    for row in cells:
        table.add_row(*row)
    if width is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNLIMITED_WIDTH
    fixed_widths = (
        max([column.min_width, len(column.title), *(row[index].cell_len for row in cells if index < len(row))]) + 2
        for index, column in enumerate(columns[:-1])
    )
    console = Console(
        file=io.StringIO(),
        width=max(width - indent, sum(fixed_widths) + _MIN_LAST_WIDTH),
        color_system=None,
        force_terminal=False,
        legacy_windows=False,
    )
    with console.capture() as captured:
        console.print(table)
    return [f"{' ' * indent}{line}".rstrip() for line in captured.get().splitlines()]


def format_facts(
    facts: Iterable[tuple[str, str]], *, indent: int = 0, label_width: int = 0, width: int | None = None
) -> list[str]:
    """Format labels and their values as two columns."""
    return format_table([Column(min_width=label_width), Column()], facts, indent=indent, width=width)
