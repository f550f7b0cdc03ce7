"""Notes of people about a run."""

from pathlib import Path

import pytest

from phalanx.errors import UsageError
from phalanx.run import Run
from phalanx.run.notes import MAX_NOTE_CHARS, RunNote, add_note, read_notes


def test_notes_are_read_in_their_order(tmp_path: Path) -> None:
    run = Run(tmp_path)
    add_note(run, "ada", " lower the rate\n", lambda: 1.0)
    add_note(run, "bob", "done", lambda: 2.0)
    assert read_notes(run) == [RunNote(1.0, "ada", "lower the rate"), RunNote(2.0, "bob", "done")]


@pytest.mark.parametrize("text", ["", "  \n", "x" * (MAX_NOTE_CHARS + 1)])
def test_a_note_that_is_empty_or_too_long_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="expected 1 to"):
        add_note(Run(tmp_path), "ada", text)
    assert not Run(tmp_path).notes.exists()


def test_lines_that_are_no_note_are_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.notes.write_text('{"time": 1}\nhalf\n[]\n{"time": "x", "author": 1, "text": 2}\n')
    add_note(run, "ada", "hello", lambda: 1.0)
    assert [note.text for note in read_notes(run)] == ["hello"]


def test_notes_that_are_a_folder_are_none_and_cannot_be_added(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.notes.mkdir()
    assert read_notes(run) == []
    with pytest.raises(UsageError, match="not kept"):
        add_note(run, "ada", "hello")
