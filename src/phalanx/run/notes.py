"""Notes of people about a run: RUN/notes.jsonl, one JSON object a line, added by `phalanx serve` and read by it."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from phalanx.errors import DataError, UsageError
from phalanx.run.directory import Run
from phalanx.run.lines import LineTail
from phalanx.safe_files import open_for_append, parse_json

MAX_NOTE_CHARS = 2000
MAX_SHOWN_BYTES = 256 << 10


@dataclass(frozen=True)
class RunNote:
    """A note; `time` in unix seconds."""

    time: float
    author: str
    text: str


def add_note(run: Run, author: str, text: str, clock: Callable[[], float] = time.time) -> RunNote:
    """Append a note. UsageError for an empty or very long one, or where it cannot be written."""
    text = text.strip()
    if not 0 < len(text) <= MAX_NOTE_CHARS:
        raise UsageError(f"a note of {len(text)} characters: expected 1 to {MAX_NOTE_CHARS}")
    note = RunNote(clock(), author, text)
    try:
        descriptor = open_for_append(run.notes)
        try:
            os.write(descriptor, json.dumps(asdict(note)).encode() + b"\n")
        finally:
            os.close(descriptor)
    except (OSError, DataError) as error:
        raise UsageError(f"{run.notes}: the note is not kept: {error}") from None
    return note


def read_notes(run: Run) -> list[RunNote]:
    """The newest notes of a run, oldest first. Lines that are none are left out."""
    tail = LineTail(run.notes)
    tail.skip(MAX_SHOWN_BYTES)
    found = []
    try:
        for line in tail.read():
            try:
                value = parse_json(line.decode(errors="replace"))
                found.append(RunNote(float(value["time"]), str(value["author"]), str(value["text"])))
            except (ValueError, TypeError, KeyError, OverflowError):
                continue
    except (OSError, DataError):  # a link to something else, say; the run may come from a stranger
        return []
    return found
