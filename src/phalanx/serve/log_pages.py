"""Output of workers: the end of a log, or the lines of it with a text, newest last. A log may have gigabytes: what is
read for one page is bounded, and a page says how far back it has looked."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import urlencode

from phalanx import formatting
from phalanx.errors import DataError
from phalanx.jobs.log_stream import LOG_NAME_PATTERN, decode_terminal_line
from phalanx.run import Run
from phalanx.safe_files import open_regular
from phalanx.std_streams import escape_control_chars

TAIL_BYTES = 128 << 10
CHUNK_BYTES = 4 << 20
MAX_MATCHES = 500
MAX_SEARCHED_BYTES = 512 << 20
"""Read for one search: about a second. The page offers to search further back."""
MAX_LINE_CHARS = 4000


@dataclass(frozen=True)
class LogPart:
    """Lines of a log, from the byte `start` to the byte `end`."""

    lines: Sequence[str]
    start: int
    end: int


def list_logs(run: Run) -> list[str]:
    """Names of the logs of workers, the newest attempt first, ranks ascending."""
    try:
        names = [entry.name for entry in os.scandir(run.logs) if LOG_NAME_PATTERN.fullmatch(entry.name)]
    except OSError:
        return []
    numbers = {name: found.groups() for name in names if (found := LOG_NAME_PATTERN.fullmatch(name))}
    return sorted(numbers, key=lambda name: (-int(numbers[name][0]), int(numbers[name][1])))


def read_log_tail(path: Path) -> LogPart:
    """The last lines of a log. DataError for anything but a file; OSError where it cannot be read."""
    descriptor = open_regular(path, follow_links=False)
    try:
        end = os.fstat(descriptor).st_size
        start = max(0, end - TAIL_BYTES)
        text = os.pread(descriptor, end - start, start)
    finally:
        os.close(descriptor)
    lines = text.split(b"\n")
    kept = lines[1:] if start and len(lines) > 1 else lines
    return LogPart([_to_text(line) for line in kept if line], start, end)


def search_log(path: Path, wanted: str, end: int | None = None) -> LogPart:
    """The last MAX_MATCHES lines before the byte `end` that have a text in them, in upper or lower case. Looks at
    MAX_SEARCHED_BYTES at most. Errors as of `read_log_tail`."""
    sought = wanted.encode().lower()
    descriptor = open_regular(path, follow_links=False)
    try:
        size = os.fstat(descriptor).st_size
        end = size if end is None else max(0, min(end, size))
        start = end
        found: list[tuple[int, bytes]] = []
        rest = b""  # the end of a line that begins before `start`
        while start > 0 and len(found) < MAX_MATCHES and end - start < MAX_SEARCHED_BYTES:
            first = max(0, start - CHUNK_BYTES)
            text = os.pread(descriptor, start - first, first) + rest
            head = text.partition(b"\n")[0]
            rest = head if first > 0 and len(head) <= CHUNK_BYTES else b""
            if sought in text.lower():  # few chunks have it
                found = _find_lines(text.split(b"\n"), 1 if rest else 0, first, sought) + found
            start = first
    finally:
        os.close(descriptor)
    kept = found[-MAX_MATCHES:]
    searched_from = kept[0][0] if len(kept) < len(found) else start + len(rest)
    return LogPart([_to_text(line) for _, line in kept], searched_from, end)


def _find_lines(lines: Sequence[bytes], skipped: int, start: int, sought: bytes) -> list[tuple[int, bytes]]:
    """The lines with a text in them, and where they begin; `start` is where the first line begins."""
    found, at = [], start
    for number, line in enumerate(lines):
        if number >= skipped and sought in line.lower():
            found.append((at, line))
        at += len(line) + 1
    return found


def render_logs(run: Run, id: str, name: str | None, wanted: str, end: int | None) -> str:
    """The page with one log of a run; `name` is one of `list_logs`, the first for None."""
    names = list_logs(run)
    title = f'<header><h1>Logs</h1></header><p class="sub"><a href="run/{id}">{escape(str(run.path))}</a></p>'
    if not names:
        return f'{title}<p class="note">No worker has printed anything yet.</p>'
    chosen = name if name in names else names[0]
    options = "".join(
        f'<option value="{escape(each)}"{" selected" if each == chosen else ""}>{escape(_describe_name(each))}</option>'
        for each in names
    )
    form = f"""<form class="bar-form" method="get" action="run/{id}/logs" role="search">
<label>Worker <select name="log">{options}</select></label>
<label>Lines with <input type="search" name="q" value="{escape(wanted)}"></label>
<button>Show</button></form>"""
    try:
        part = search_log(run.logs / chosen, wanted, end) if wanted else read_log_tail(run.logs / chosen)
    except (OSError, DataError) as error:
        return f'{title}{form}<p class="note">{escape(str(error))}</p>'
    return f'{title}{form}<div id="log">{_render_part(part, id, chosen, wanted)}</div>'


def _render_part(part: LogPart, id: str, name: str, wanted: str) -> str:
    lines = escape("\n".join(part.lines))
    what = f"{formatting.format_plural(len(part.lines), 'line')} with this text" if wanted else "the last lines"
    read = f"{what}, bytes {part.start} to {part.end}"
    more = ""
    if wanted and part.start > 0:
        words = urlencode({"log": name, "q": wanted, "end": part.start})
        more = f' <a href="run/{id}/logs?{escape(words)}">Search further back</a>'
    return f'<p class="note">{read}.{more}</p><pre class="log" tabindex="0">{lines}</pre>'


def _describe_name(name: str) -> str:
    found = LOG_NAME_PATTERN.fullmatch(name)
    assert found is not None
    return f"rank {found[2]}" + (f", attempt {found[1]}" if int(found[1]) else "")


def _to_text(line: bytes) -> str:
    text = escape_control_chars(decode_terminal_line(line))
    return text if len(text) <= MAX_LINE_CHARS else f"{text[:MAX_LINE_CHARS]} ..."
