"""`phalanx fleet watch`: the table of nodes, again and again."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from phalanx import formatting
from phalanx.cli.fleet_output import format_fleet
from phalanx.errors import UsageError
from phalanx.std_streams import escape_control_chars

if TYPE_CHECKING:
    from phalanx.app.fleet_nodes import FleetReader

PrintLinesFn = Callable[[list[str]], None]


def watch_fleet(
    reader: "FleetReader",
    interval_s: float,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> None:
    """Print the nodes every `interval_s` seconds, until Ctrl-C. When the backend fails later, the ages of the last
    readings grow.

    Raises UsageError where the first reading fails.
    """
    view = reader.read()
    with _open_display() as print_lines:
        while True:
            lines = [formatting.format_timestamp(now()), *format_fleet(view, now())]
            print_lines([*lines, *(f"warning: {escape_control_chars(problem)}" for problem in view.problems)])
            sleep(interval_s)
            try:
                view = reader.read()
            except UsageError as error:
                view.problems = [str(error)]


@contextmanager
def _open_display() -> Iterator[PrintLinesFn]:
    """A function that replaces the lines on a terminal, and adds them elsewhere."""
    if not sys.stdout.isatty():
        yield lambda lines: print("\n".join([*lines, ""]), flush=True)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(), auto_refresh=False) as live:
        yield lambda lines: live.update(Text("\n".join(lines), no_wrap=True, overflow="crop"), refresh=True)
