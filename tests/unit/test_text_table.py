"""Tables of text: columns, widths, and what a pipe gets."""

import os
import pty
import subprocess
import sys

from phalanx.text_table import Column, format_facts, format_table

COLUMNS = [Column("ID"), Column("SIZE", is_number=True), Column("REASON")]


def test_columns_are_as_wide_as_their_cells_and_numbers_stand_right() -> None:
    assert format_table(COLUMNS, [("a", "1", "x"), ("long-name", "1000", "")], indent=1) == [
        " ID         SIZE  REASON",
        " a             1  x",
        " long-name  1000",
    ]


def test_no_text_is_markup_and_no_line_is_colored_or_broken() -> None:
    path = "/data/" + 300 * "x y/" + "[bold]:smile: 1.5"
    (_, line) = format_table(COLUMNS, [(path, "1", path)])
    assert line == f"{path}     1  {path}"


def test_only_the_last_column_is_broken_where_there_is_a_width() -> None:
    identity = 60 * "i"
    lines = format_table(COLUMNS, [(identity, "1", "one two three four five six seven eight")], width=20)
    assert len(lines) == 3
    assert lines[1].startswith(identity)
    assert lines[2].strip() == "six seven eight"


def test_a_short_row_is_filled_up_and_wide_characters_count_twice() -> None:
    assert format_table(COLUMNS, [("a",)], show_header=False) == ["a"]
    assert format_facts([("  模型", "x"), ("steps", "10")], indent=2) == ["    模型  x", "  steps   10"]


def test_no_rows_and_no_titles_give_no_line() -> None:
    assert format_facts([]) == []


def test_rows_printed_one_by_one_are_aligned() -> None:
    columns = [Column("LONG"), Column("B")]
    one_by_one = [format_table(columns, [row], show_header=False)[0] for row in (("x", "1"), ("xyz", "2"))]
    assert one_by_one == ["x     1", "xyz   2"]


def test_a_terminal_limits_the_width() -> None:
    code = "from phalanx.text_table import *; print(*format_facts([('a', 'word ' * 20)]), sep='\\n')"
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", code], stdout=theirs, check=True, env={**os.environ, "COLUMNS": "40"})
    os.close(theirs)
    lines = os.read(ours, 10_000).decode().splitlines()
    os.close(ours)
    assert len(lines) == 3
    assert max(map(len, lines)) <= 40
    assert "\x1b" not in "".join(lines)
