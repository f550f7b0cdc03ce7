"""Slots for starts of jobs in a file that they share."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phalanx.errors import UsageError
from phalanx.fleet.power.start_slots import StartSlots


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_starts_come_one_after_the_other_and_at_once_when_the_last_is_over(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "new" / "starts-s.json"
    assert [StartSlots(path, clock).take(seconds) for seconds in (7.0, 2.0, 1.0)] == [0.0, 7.0, 9.0]
    clock.now += 9.5
    assert StartSlots(path, clock).take(1.0) == 0.5
    clock.now += 100.0
    assert StartSlots(path, clock).take(1.0) == 0.0


def test_of_jobs_that_start_at_once_no_two_get_one_slot(tmp_path: Path) -> None:
    path, clock = tmp_path / "starts.json", Clock()
    with ThreadPoolExecutor(8) as pool:
        waits = list(pool.map(lambda _: StartSlots(path, clock).take(2.0), range(8)))
    assert sorted(waits) == [2.0 * index for index in range(8)]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"free_at": "soon"}', '{"free_at": NaN}', '{"free_at": 1e12}'),
        '{"free_at": 1' + 400 * "0" + "}",
        1000 * "[",
    ],
)
def test_a_damaged_file_or_a_slot_far_ahead_delays_no_job(tmp_path: Path, text: str) -> None:
    path, clock = tmp_path / "starts.json", Clock()
    path.write_text(text)
    assert [StartSlots(path, clock).take(2.0) for _ in range(2)] == [0.0, 2.0]


@pytest.mark.parametrize(("folder", "file"), [(0o777, 0o666), (0o770, 0o660), (0o755, 0o644)])
def test_whoever_may_write_the_folder_may_take_slots(tmp_path: Path, folder: int, file: int) -> None:
    tmp_path.chmod(folder)
    StartSlots(tmp_path / "starts.json").take(1.0)
    assert (tmp_path / "starts.json").stat().st_mode & 0o777 == file


def test_the_file_of_another_user_in_a_folder_of_mode_1777_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Linux has it with fs.protected_regular, the default of most distributions: O_CREAT is refused there."""
    path, clock, open_file = tmp_path / "starts.json", Clock(), os.open
    StartSlots(path, clock).take(2.0)

    def open_protected(name: Path, flags: int, mode: int = 0o777) -> int:
        if name == path and flags & os.O_CREAT and path.exists():
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_file(name, flags, mode)

    monkeypatch.setattr(os, "open", open_protected)
    assert StartSlots(path, clock).take(2.0) == 2.0


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("important")
    os.symlink(tmp_path / "mine", tmp_path / "starts.json")
    with pytest.raises(UsageError, match="cannot be written"):
        StartSlots(tmp_path / "starts.json").take(1.0)
    assert (tmp_path / "mine").read_text() == "important"


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"starts\.json: the slots for starts of jobs cannot be written: "):
        StartSlots(tmp_path / "file" / "starts.json").take(1.0)
