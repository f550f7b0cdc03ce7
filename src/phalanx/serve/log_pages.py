"""Output of workers: the end of a log. A log may have gigabytes: what is read for one page is bounded."""

import os
from html import escape
from pathlib import Path

from phalanx.errors import DataError
from phalanx.jobs.log_stream import LOG_NAME_PATTERN, decode_terminal_line
from phalanx.run import Run
from phalanx.safe_files import open_regular
from phalanx.std_streams import escape_control_chars

TAIL_BYTES = 128 << 10
SHORT_TAIL_BYTES = 8 << 10
"""On the page of the run, where the tail is read every second."""
MAX_LINE_CHARS = 4000
NO_LOG_NOTE = '<p class="note">No worker has printed anything yet.</p>'


def list_logs(run: Run) -> list[str]:
    """Names of the logs of workers, the newest attempt first, ranks ascending."""
    try:
        names = [entry.name for entry in os.scandir(run.logs) if LOG_NAME_PATTERN.fullmatch(entry.name)]
    except OSError:
        return []
    numbers = {name: found.groups() for name in names if (found := LOG_NAME_PATTERN.fullmatch(name))}
    return sorted(numbers, key=lambda name: (-int(numbers[name][0]), int(numbers[name][1])))


def read_log_tail(path: Path, max_bytes: int) -> list[str]:
    """The last lines of a log, in `max_bytes`. DataError for anything but a file; OSError where it cannot be read."""
    if path.parent.is_symlink():  # the run may come from another person, and change while its page is open
        raise DataError(f"{path.parent}: expected a directory, found a link")
    descriptor = open_regular(path, follow_links=False)
    try:
        end = os.fstat(descriptor).st_size
        start = max(0, end - max_bytes)
        text = os.pread(descriptor, end - start, start)
    finally:
        os.close(descriptor)
    lines = text.split(b"\n")
    kept = lines[1:] if start and len(lines) > 1 else lines
    texts = (escape_control_chars(decode_terminal_line(line)) for line in kept if line)
    return [text if len(text) <= MAX_LINE_CHARS else f"{text[:MAX_LINE_CHARS]} ..." for text in texts]


def render_log_tail(run: Run, name: str | None = None, max_bytes: int = SHORT_TAIL_BYTES) -> str:
    """The last lines of one of `list_logs`; of the newest attempt's first rank for None."""
    if not (names := list_logs(run)):
        return NO_LOG_NOTE
    chosen = name if name in names else names[0]
    try:
        lines = read_log_tail(run.logs / chosen, max_bytes)
    except (OSError, DataError) as error:
        return f'<p class="note">{escape(str(error))}</p>'
    text = escape("\n".join(lines))
    note = f'<p class="note">{_describe_name(chosen)}, the last lines.</p>'
    return f'{note}<pre class="log" tabindex="0" data-key="log">{text}</pre>'


def render_logs(run: Run, id: str, name: str | None) -> str:
    """The page with the end of one log of a run; `name` is one of `list_logs`, the first for None."""
    names = list_logs(run)
    options = "".join(
        f'<option value="{escape(each)}"{" selected" if each == name else ""}>{escape(_describe_name(each))}</option>'
        for each in names
    )
    form = f"""<form class="bar-form" method="get" action="run/{id}/logs">
<label>Worker <select name="log">{options}</select></label>
<button>Show</button></form>"""
    title = f'<header><h1>Logs</h1></header><p class="sub"><a href="run/{id}">{escape(str(run.path))}</a></p>'
    return f'{title}{form if names else ""}<div id="log">{render_log_tail(run, name, TAIL_BYTES)}</div>'


def _describe_name(name: str) -> str:
    found = LOG_NAME_PATTERN.fullmatch(name)
    assert found is not None
    return f"rank {found[2]}" + (f", attempt {found[1]}" if int(found[1]) else "")
