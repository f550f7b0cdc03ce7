"""The history of nodes: an SQLite file with seconds, minutes and ten minutes."""

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.errors import DataError
from phalanx_fleet.pages.site_history import (
    HOUR_S,
    MINUTE_S,
    RETENTION_S,
    TEN_MINUTES_S,
    HistoryBusyError,
    HistoryWriter,
    read_history,
)

KEY = ("n1", "draw_w")
NOON = 36_000 * 48
WRITE_FOREVER = """
import sys
from pathlib import Path
from phalanx_fleet.pages.site_history import HistoryWriter
writer = HistoryWriter(Path(sys.argv[1]))
for second in range(10**9):
    writer.write(second, {("n1", "draw_w"): float(second), ("n1", "margin_k"): 1.0})
    print(second, flush=True)
"""


def write(path: Path, values: dict[int, float]) -> None:
    writer = HistoryWriter(path)
    for time_s, value in values.items():
        writer.write(time_s, {KEY: value})
    writer.close()


def read(path: Path, period_s: int, since: float = NOON, until: float = NOON + 1000) -> list[tuple[float, ...]]:
    return [
        (each.time, each.num_samples, each.min, each.mean, each.max)
        for each in read_history(path, [KEY], since, until, period_s)[KEY]
    ]


def test_seconds_are_rolled_up_into_minutes_and_ten_minutes(tmp_path: Path) -> None:
    path = tmp_path / "n1.db"
    write(path, {NOON + 30 * step: float(step) for step in range(41)})
    assert read(path, MINUTE_S, NOON, NOON + 60) == [(NOON, 2, 0.0, 0.5, 1.0), (NOON + 60, 2, 2.0, 2.5, 3.0)]
    assert read(path, TEN_MINUTES_S, NOON, NOON + 1200) == [
        (NOON, 20, 0.0, 9.5, 19.0),
        (NOON + 600, 20, 20.0, 29.5, 39.0),
        (NOON + 1200, 1, 40.0, 40.0, 40.0),
    ]


def test_the_minute_in_which_a_writer_ended_is_complete_after_the_next_one_writes(tmp_path: Path) -> None:
    path = tmp_path / "n1.db"
    write(path, {NOON: 1.0, NOON + 1: 2.0, NOON + 2: 6.0})
    write(path, {NOON + 7000: 5.0})
    assert read(path, MINUTE_S, NOON, NOON + 7000) == [(NOON, 3, 1.0, 3.0, 6.0), (NOON + 6960, 1, 5.0, 5.0, 5.0)]


def test_the_file_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "n1.db"
    sizes = []
    writer = HistoryWriter(path)
    for hour in range(3 * 24):
        for second in range(3):
            writer.write(NOON + HOUR_S * hour + second, {("n1", f"value {number}"): 1.0 for number in range(5)})
        sizes.append(path.stat().st_size)
    writer.close()
    with sqlite3.connect(path) as db:
        counts = dict(db.execute("SELECT period_s, count(*) / 5 FROM points GROUP BY period_s").fetchall())
    assert counts[TEN_MINUTES_S] <= RETENTION_S[TEN_MINUTES_S] // HOUR_S + 1
    assert counts[MINUTE_S] <= RETENTION_S[MINUTE_S] // HOUR_S + 1
    assert sizes[-1] <= max(sizes[: 2 * 24])


def test_a_clock_that_jumps_back_leaves_no_sample_of_the_future_in_a_reading(tmp_path: Path) -> None:
    path = tmp_path / "n1.db"
    write(path, {NOON + 5000: 1.0, NOON + 5001: 1.0, NOON: 2.0, NOON + 1: 2.0, NOON + 60: 4.0})
    assert read(path, 1, NOON, NOON + 60)[:2] == [(NOON, 1, 2.0, 2.0, 2.0), (NOON + 1, 1, 2.0, 2.0, 2.0)]
    assert read(path, MINUTE_S, NOON, NOON + 60) == [(NOON, 2, 2.0, 2.0, 2.0), (NOON + 60, 1, 4.0, 4.0, 4.0)]


def test_one_process_writes_and_others_read_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "n1.db"
    first = HistoryWriter(path)
    with pytest.raises(HistoryBusyError, match=r"n1\.db: another process writes it"):
        HistoryWriter(path)
    first.write(NOON, {KEY: 1.0})
    assert read(path, 1) == [(NOON, 1, 1.0, 1.0, 1.0)]
    first.close()
    HistoryWriter(path).close()
    assert read(path, 1) == [(NOON, 1, 1.0, 1.0, 1.0)]


def test_what_a_killed_writer_has_written_is_there(tmp_path: Path) -> None:
    path = tmp_path / "n1.db"
    with subprocess.Popen(
        [sys.executable, "-c", WRITE_FOREVER, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == 200:
                process.send_signal(signal.SIGKILL)
                break
        last = max([200, *(int(line) for line in process.stdout)])
    assert [row[0] for row in read(path, 1, 0, last)] == list(range(last + 1))
    write(path, {last + 60: 1.0})
    assert read(path, MINUTE_S, 0, 0)[0][:4] == (0, 60, 0.0, 29.5)


def set_version(path: Path) -> None:
    write(path, {NOON: 1.0})
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize("make", [lambda path: path.write_bytes(b"not a database" * 1000), set_version])
def test_what_is_no_history_of_this_version_is_an_error_and_stays(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "n1.db"
    make(path)
    content = path.read_bytes()
    with pytest.raises(DataError, match=r"n1\.db: no telemetry of this version .*Remove it"):
        read(path, 1)
    with pytest.raises(OSError, match=r"n1\.db: .*remove it if it is damaged"):
        HistoryWriter(path)
    assert path.read_bytes() == content


def test_without_a_file_there_are_no_points(tmp_path: Path) -> None:
    assert read(tmp_path / "none.db", 1) == []


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "n1.db", {NOON: float("nan"), NOON + 1: float("inf"), NOON + 2: 3.0})
    assert read(tmp_path / "n1.db", 1) == [(NOON + 2, 1, 3.0, 3.0, 3.0)]
